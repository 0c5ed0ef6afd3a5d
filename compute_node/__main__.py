"""`python -m compute_node`, and the `compute-node` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; an interruption ends it without a traceback while it is being imported, too."""
    try:
        from compute_node.cli import main as run  # noqa: PLC0415 - see above

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
