"""tierd: a storage daemon that keeps the routed experts of Mixture-of-Experts models on tiers."""

__version__ = "0.1.0"
