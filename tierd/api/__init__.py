"""Generated from proto/tierd/v1 by `make proto`; never edited by hand. `make check` compares it with its source."""
