"""compute_node: runs the dense layers of an MoE model and takes its experts from tierd."""
