"""Ctrl-C as a wish to stop, which reaches a step that runs in native code as well."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from compute_node.engine.cancel import CancelWord

__all__ = ["interruptible"]


@contextmanager
def interruptible() -> Iterator[CancelWord]:
    """The first Ctrl-C is a wish to stop, seen between layers; a second one interrupts whatever is running.

    Python's own handler runs in the main thread, when that comes back from native code. So a thread that listens to
    the interpreter's wake-up socket sets the word. For the main thread only.
    """
    word = CancelWord()
    wishes = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal wishes
        wishes += 1
        word.cancel()
        if wishes > 1:
            signal.default_int_handler(number, frame)

    ours, woken = socket.socketpair()
    with ours, woken:
        woken.setblocking(False)
        listener = threading.Thread(target=_listen, args=(ours, word), name="ctrl-c", daemon=True)
        listener.start()
        handler = signal.signal(signal.SIGINT, note)
        descriptor = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        try:
            yield word
        finally:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGINT, handler)
            woken.close()
            listener.join()


def _listen(numbers: socket.socket, word: CancelWord) -> None:
    """Until the other end is closed: one byte per signal."""
    while received := numbers.recv(16):
        if signal.SIGINT in received:
            word.cancel()
