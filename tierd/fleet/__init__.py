"""Fleets: workers, nodes and an HTTP entrance as actors of Ray, from one small file. Needs the extra `ray`."""

from __future__ import annotations

import os

# Ray reads these when it is imported: it must tell nobody that it runs, and print no log of its own.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
# Serve ends its HTTP proxy if it is not ready after 5 s, which a busy host may need for its imports.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
