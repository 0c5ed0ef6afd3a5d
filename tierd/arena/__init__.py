"""The arena: experts in shared memory, the table that says where they are, and how nodes get at both."""
