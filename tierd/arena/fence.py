"""The writer's full fence between "the slot is unpublished" and "the slot is reused".

Release and acquire do not order a store before a later load or a later write by a device; a Python lock promises no
fence at all. The system call membarrier(2) does: its expedited global command runs a full barrier on the calling CPU at
entry and at exit, whatever else it does, and costs about a microsecond.

The private command is cheaper to explain but not enough here: for a process of one thread the kernel returns at once,
without any barrier (`mm_users == 1` in kernel/sched/membarrier.c), and the readers are other processes. The plain
global command waits for a grace period of about ten milliseconds: right, and only a fallback.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

from tierd.errors import ArenaError

__all__ = ["WriterFence"]

_SYSCALL_NUMBERS: Final = {"x86_64": 324, "aarch64": 283}
_CMD_QUERY: Final = 0
_COMMANDS: Final = {"global-expedited": 1 << 1, "global": 1 << 0}


class WriterFence:
    """Call it to order all earlier stores of this thread before everything that follows.

    Attributes:
        available: False where the kernel refuses membarrier; then nodes must not read resident experts without asking.
        kind: "global-expedited", "global" or "none", for the status page.
    """

    def __init__(self) -> None:
        # Letting go of the interpreter's lock for a microsecond means to wait for it behind all reading threads.
        self._libc: ctypes.CDLL = ctypes.PyDLL(None, use_errno=True)
        self._number = ctypes.c_long(_SYSCALL_NUMBERS.get(platform.machine(), -1))
        self._command = ctypes.c_long(0)
        self._zero = ctypes.c_long(0)
        self.kind = "none"
        offered = self._membarrier(ctypes.c_long(_CMD_QUERY)) if self._number.value >= 0 else -1
        for kind, command in _COMMANDS.items():
            if offered > 0 and offered & command:
                if kind == "global":
                    self._libc = ctypes.CDLL(None, use_errno=True)  # this one waits; let others run
                self._command = ctypes.c_long(command)
                if self._membarrier(self._command) == 0:
                    self.kind = kind
                    break
        self.available = self.kind != "none"

    def __call__(self) -> None:
        """Run the full fence.

        Raises:
            ArenaError: the kernel refused it; nothing may be reused then.
        """
        if not self.available or self._membarrier(self._command) != 0:
            raise ArenaError(
                f"the kernel refuses membarrier: {os.strerror(ctypes.get_errno()) or 'not offered'}",
                hint="Allow the system call membarrier in the container's seccomp profile.",
            )

    def _membarrier(self, command: ctypes.c_long) -> int:
        return int(self._libc.syscall(self._number, command, self._zero, self._zero))
