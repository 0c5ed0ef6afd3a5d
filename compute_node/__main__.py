"""`python -m compute_node`."""

from __future__ import annotations

from compute_node.cli import main

if __name__ == "__main__":
    main()
