"""What operators see of the daemon: metrics and health over HTTP."""
