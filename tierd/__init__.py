"""tierd: a storage daemon that keeps the routed experts of Mixture-of-Experts models on tiers."""

import os

__version__ = "0.1.0"

# gRPC's own lines on standard error tell of every handshake that a stranger breaks off; it reads this at its import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
