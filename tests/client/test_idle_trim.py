"""An idle driver trims the memory that executions left in the allocator, once, and then sleeps (EXE-13)."""

from __future__ import annotations

import platform
import subprocess
import sys

import numpy as np
import pytest
from support import models
from support.drivers import InThread
from support.executors import LIMIT_S, Held, until

from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.device import Device
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.session.session import Session

ADD = models.add_model()
ONE, TEN = np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32)
PIECES = """
from nnfmq.engines.memory import trim_memory
import os, re

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

pieces = [b"x" * 60_000 for _ in range(500)]  # too small for separate mappings
last, pieces = pieces[-1], None  # the last one prevents free() from returning the others to the kernel
before = resident()
trim_memory()
print(before - resident())
"""

IN_A_THREAD = """
import os, threading
from nnfmq.engines.memory import trim_memory, use_one_heap

use_one_heap()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def allocate():
    bytes(30_000_000)  # free() keeps up to twice as much at the end of a heap from now on
    pieces = [b"x" * 60_000 for _ in range(500)]
    del pieces
    allocated.set()
    done.wait()

allocated, done = threading.Event(), threading.Event()
thread = threading.Thread(target=allocate)
thread.start()
allocated.wait()
before = resident()
trim_memory()
print(before - resident())
done.set()
thread.join()
"""


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Shorten the idle times before a trim, and record each trim."""
    trimmed: list[int] = []
    monkeypatch.setattr("nnfmq.driver.session.session.IDLE_TRIM_MS", 30)
    monkeypatch.setattr("nnfmq.driver.session.session._TRIM_SOON_MS", 30)
    monkeypatch.setattr("nnfmq.driver.session.session.trim_memory", lambda: trimmed.append(1))
    monkeypatch.setattr("nnfmq.client.burst.own._IDLE_NS", 30_000_000)  # an open burst prevents a trim
    return trimmed


@pytest.fixture
def session(trims: list[int], real: tuple[Connection, Session]) -> Session:
    return real[1]


@pytest.fixture
def device(session: Session, real: tuple[Connection, Session]) -> Device:
    return Client(real[0], None).device("reference")


def wait_until_idle(session: Session, trims: list[int]) -> int:
    """Wait until the session is idle, and return the number of trims."""
    until(lambda: session._is_idle)
    return len(trims)


def await_more(trims: list[int], than: int) -> None:
    until(lambda: len(trims) > than)


def let_pass(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return after the session has checked several times whether it is idle."""
    checks: list[int] = []
    real = session._work_done
    with monkeypatch.context() as patch:
        patch.setattr(session, "_work_done", lambda: (checks.append(1), real())[1])
        until(lambda: len(checks) > 8)


def test_EXE_13_idle_memory_is_trimmed_once_and_the_thread_sleeps_until_there_is_work(
    device: Device, session: Session, trims: list[int]
) -> None:
    with device.prepare(ADD) as model:
        for _ in range(3):
            before = wait_until_idle(session, trims)
            for _ in range(5):
                model.execute(ONE, TEN)
            await_more(trims, before)
    assert wait_until_idle(session, trims)


def test_EXE_13_nothing_is_trimmed_while_an_execution_runs(
    device: Device, session: Session, trims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = device.prepare(ADD)
    held = Held(ADD)
    session.models.insert(DriverPreparedModel(ADD, held), model.model_id)  # type: ignore[arg-type]
    before = wait_until_idle(session, trims)
    running = InThread.start(lambda: model.execute(ONE, TEN))
    assert held.begun.wait(LIMIT_S)
    let_pass(session, monkeypatch)
    assert len(trims) == before
    held.go.set()
    running.wait()
    await_more(trims, before)


def test_EXE_13_BUR_1_memory_is_kept_while_a_burst_is_open_and_trimmed_after_it_is_closed(
    device: Device, session: Session, trims: list[int]
) -> None:
    with device.prepare(ADD) as model:
        for _ in range(3):
            before = wait_until_idle(session, trims)
            with model.burst() as burst:
                for _ in range(3):
                    burst.execute(ONE, TEN)
                until(lambda: session._is_idle)
                assert len(trims) == before
            await_more(trims, before)
    assert wait_until_idle(session, trims)


def test_EXE_13_what_a_preparation_leaves_is_trimmed_while_a_burst_is_open(
    device: Device, session: Session, trims: list[int]
) -> None:
    with device.prepare(ADD) as model, model.burst() as burst:
        burst.execute(ONE, TEN)
        for _ in range(3):
            before = wait_until_idle(session, trims)
            with device.prepare(ADD):
                await_more(trims, before)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_EXE_13_memory_that_the_allocator_keeps_is_returned_to_the_kernel() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", PIECES], capture_output=True, text=True, timeout=60, check=False)
    assert int(done.stdout or 0) > 20_000_000, done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_EXE_13_what_a_thread_has_freed_is_returned_if_all_threads_use_one_heap() -> None:
    command = [sys.executable, "-P", "-c", IN_A_THREAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert int(done.stdout or 0) > 20_000_000, done.stderr
