"""Reading published checkpoints and converting them to stores; one small mapping per model family."""
