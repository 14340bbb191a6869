"""`nnfmq.base.threads`: a start does not wait for a thread that has no memory to begin with."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from nnfmq.base import threads
from nnfmq.base.threads import Thread

WITHOUT_MEMORY = """
import resource
from nnfmq.base import threads

threads.BEGIN_S = 0.2
for _ in range(4):  # their stacks are used again
    thread = threads.Thread(target=int)
    thread.start()
    thread.join()
with open("/proc/self/statm") as file:
    pages = int(file.read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
taken, size = [], 1 << 20
while size >= 512:
    try:
        taken.append(bytearray(size))
    except MemoryError:
        size //= 2
try:
    threads.Thread(target=int).start()
except RuntimeError as error:
    text = str(error)
del taken
print(text)
"""


def test_the_start_of_a_thread_without_memory_to_begin_with_raises() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout in ("there is no memory for another thread\n", "can't start new thread\n"), done.stderr


def test_a_thread_that_begins_after_its_start_has_raised_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "BEGIN_S", 0.0)
    begin, called, ended = threading.Event(), threading.Event(), threading.Event()
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def begins_late(self: threading.Thread) -> None:
        begin.wait()
        bootstrap(self)
        ended.set()

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", begins_late)
    thread = Thread(target=called.set)
    with pytest.raises(RuntimeError, match="there is no memory for another thread"):
        thread.start()
    begin.set()
    assert ended.wait(30)
    assert not called.is_set()


def test_a_thread_calls_its_target() -> None:
    found: list[int] = []
    thread = Thread(target=found.append, args=(3,), name="three", daemon=True)
    thread.start()
    thread.join()
    assert (found, thread.name, thread.daemon) == ([3], "three", True)
