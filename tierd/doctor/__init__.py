"""The doctor: looks at a store, its drives and the host, and says what is wrong and what to do about it."""
