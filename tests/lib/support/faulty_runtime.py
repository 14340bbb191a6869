"""A driver with a hosted runtime that fails as its files say, and files for it.

A file is JSON: what the runtime does when it opens the file (`open`), and in an execution (`run`) whose first input
value is FAULT. Otherwise it adds 1 to four floats. `dynamic` leaves the output's shape open.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

import nnfmq
from support.drivers import Daemon, running_daemon, short_folder, until
from support.plugins import add_plugin, path_with

DEVICE = "faulty"
FAULT = 13.0
GRACE_S, STALL_S = 0.2, 1.5
"""The watchdog's limits in this driver."""

_SOURCE = f"""
import contextlib
import ctypes
import json
import mmap
import os
import signal
import threading
import time

import numpy as np

from nnfmq.hal.hosted import HostedDescription, HostedTensor
from nnfmq.driver.execution import watchdog
from nnfmq.hosted.adapter import HostedModel, HostedRun
from nnfmq.hosted.device import HostedDevice

watchdog.GRACE_S = watchdog.OPEN_GRACE_S = {GRACE_S}
watchdog.STALL_S = {STALL_S}
kept = []


def reserve():
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    kept.append(mmap.mmap(-1, 64 << 30, flags=flags))


def keep(size_mib):
    kept.append(np.ones(size_mib << 20, np.uint8))


def fail(text):
    raise RuntimeError(text)


def write(size, then=lambda: None):
    with contextlib.suppress(BlockingIOError):
        for _ in range(size // len(WORDS)):
            os.write(2, WORDS)
    then()


WORDS = b"the runtime says\\n  two lines\\n"
FAULTS = {{
    "write": lambda: write(len(WORDS)),
    "write and abort": lambda: write(len(WORDS), os.abort),
    "write 1 MiB": lambda: write(1 << 20),
    "nothing": lambda: None,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "endless": lambda: time.sleep(3600),
    "keep the GIL": lambda: ctypes.PyDLL(None).pause(),
    "10 GiB": lambda: keep(10 << 10),
    "bad_alloc": lambda: fail("std::bad_alloc"),
    "64 MiB": lambda: keep(64),
    "reserve 64 GiB": reserve,
    "raise": lambda: fail("as the test wants"),
    "0.2 s": lambda: time.sleep(0.2),
}}
RESULTS = {{
    "rank": np.ones((1, 2), np.float32),
    "dtype": np.ones(4, np.int8),
    "same size": np.ones(4, np.int32),
    "no array": [1.0],
}}


class Run(HostedRun):
    def __init__(self, model, x, y):
        self.model, self.x, self.y = model, x, y
        self.stop = threading.Event()

    def __call__(self):
        self.stop.clear()
        fault = self.model.content.get("run", "nothing") if self.x[0] == {FAULT} else "nothing"
        if fault == "until aborted":
            self.stop.wait()
            raise RuntimeError("terminated")
        if fault in RESULTS:
            return [RESULTS[fault]]
        if fault == "no result":
            return []
        FAULTS[fault]()
        if self.y is None:
            return [self.x + 1]
        np.add(self.x, 1, self.y)
        return [None]

    def abort(self):
        self.stop.set()
        return True


class Model(HostedModel):
    is_thread_safe = True

    def __init__(self, content):
        self.content = content
        self.is_thread_safe = not content.get("one thread")
        FAULTS[content.get("open", "nothing")]()
        shape = ("n",) if content.get("dynamic") else (4,)
        self.description = HostedDescription(
            (HostedTensor("x", "float32", (4,)),), (HostedTensor("y", "float32", shape),)
        )

    def bind(self, inputs, outputs):
        return Run(self, inputs[0], outputs[0])


class Faulty(HostedDevice):
    name = "{DEVICE}"
    formats = ("faulty",)

    def open(self, file, options):
        return Model(json.loads(bytes(file.model)))


class Reserving(Faulty):
    name = "reserving"
    reserved_bytes = 65 << 30
"""


@contextmanager
def faulty_driver(site: Path, environment: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    """Run a driver that has the device, which is installed into the folder `site`."""
    names = {name.lower(): f"nnfmq_faulty:{name}" for name in ("Faulty", "Reserving")}
    add_plugin(site, "nnfmq_faulty", _SOURCE, names, "nnfmq.devices")
    with (
        short_folder() as made,
        running_daemon(made / "d.sock", environment={**path_with(site), **(environment or {})}) as daemon,
    ):
        yield daemon


def faulty_file(folder: Path, **content: object) -> Path:
    """Return a file for the device."""
    path = folder / "net.faulty"
    path.write_text(json.dumps(content))
    return path


def four(value: float) -> npt.NDArray[np.float32]:
    """Return an input that is this value four times."""
    return np.full(4, value, np.float32)


@contextmanager
def unharmed_neighbour(daemon: Daemon, folder: Path) -> Iterator[None]:
    """Let another client of the daemon execute over a burst for the duration of the block: all of it succeeds."""
    neighbour = folder / "neighbour"
    neighbour.mkdir()
    with executing_neighbour(daemon, lambda client: client.device(DEVICE).prepare(faulty_file(neighbour))):
        yield


@contextmanager
def executing_neighbour(daemon: Daemon, prepare: Callable[[nnfmq.Client], nnfmq.PreparedModel]) -> Iterator[None]:
    """Let another client of the daemon execute a model over a burst during the block: it adds 1 to four floats."""
    counts: list[int] = []
    stop = threading.Event()

    def execute() -> None:
        while not stop.is_set():
            (result,) = burst.execute(four(1), timeout=60)
            assert (result == 2).all()
            counts.append(1)

    with daemon.connect() as client, prepare(client) as model, model.burst() as burst:
        thread = threading.Thread(target=execute)
        thread.start()
        try:
            yield
            before = len(counts)
            until(lambda: len(counts) > before, "the neighbour executes")
        finally:
            stop.set()
            thread.join()
