"""The commands of `tierd`, one file each."""
