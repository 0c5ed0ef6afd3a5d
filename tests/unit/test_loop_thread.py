from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import asyncio, atexit, threading

def look():
    print([thread.name for thread in threading.enumerate() if thread.name == "tierd-client-loop"])

atexit.register(look)

from tierd.client.loop_thread import LoopThread

async def wait():
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled")

async def begin():
    global task
    task = asyncio.ensure_future(wait())

def tick():
    loop.loop.call_later(0.001, tick)

loop = LoopThread.shared()
loop.run(begin(), seconds=10, what="the beginning")
loop.call(tick)
"""


def test_the_loop_has_stopped_and_its_tasks_have_ended_before_the_interpreter_does() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "cancelled\n[]\n", "")
