"""Starts a program that does not outlive the process that wanted it, however that one ends.

    python -I -S leash.py PARENT PROGRAM…

The kernel kills the program when the thread that started this ends (prctl(2), PR_SET_PDEATHSIG); it keeps that through
`execv`. Stands alone, since it has to be fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        sys.exit("leash: whoever started this is gone")
    os.execv(program[0], program)  # noqa: S606 - to become it is the purpose


if __name__ == "__main__":
    main()
