"""compute_node: runs the dense layers of an MoE model and takes its experts from tierd."""

from __future__ import annotations

import os

# The node's own threads compute; those that numpy's linear algebra would start only take their cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
