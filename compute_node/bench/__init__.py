"""Measurements of the compute node: kernels, the step, prefill, decoding from the drive, and a comparison."""
