"""The commands of `compute-node`, one file each."""
