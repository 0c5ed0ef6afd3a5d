"""Where a compute node takes its experts from: sources behind one interface."""
