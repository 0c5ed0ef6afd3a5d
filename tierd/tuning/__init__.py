"""Finding the settings that make a machine fastest with a store: trials, the order of them, and what they mean."""
