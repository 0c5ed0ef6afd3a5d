"""The daemon's gRPC side: sessions, reading the store from afar, administration."""
