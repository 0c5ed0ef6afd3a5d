"""What the node can tell the daemon of the experts that it will want."""
