"""One file per model family: how its config.json is read, and the decode program that it builds."""
