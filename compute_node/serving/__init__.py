"""Many requests at once on one model: what is asked, when it is computed, and the thread that does it."""
