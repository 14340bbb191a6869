"""Kernels that a model has in common with an earlier one are not compiled again, in drivers that are killed, too.

How many kernels are compiled is what `progress` of a preparation is told.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, Process, running_daemon, thread_state, until
from support.models import logistics_model
from support.plugins import path_with, stopping_writer

import nnfmq

pytest.importorskip("llvmlite", exc_type=ImportError)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return the folder of a driver's cache, which does not exist yet."""
    return tmp_path / "cache" / "nnfmq"


def environment_of(cache: Path, **more: str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(cache.parent), **more}


@pytest.fixture
def daemon(folder: Path, cache: Path) -> Iterator[Daemon]:
    with running_daemon(folder / "d.sock", environment=environment_of(cache)) as started:
        yield started


def compiled_kernels(client: nnfmq.Client, count: int) -> int:
    """Prepare a model of so many kernels, check its results, and return how many of them were compiled."""
    totals = [0]
    with client.device("compiled").prepare(logistics_model(count), progress=lambda _, n: totals.append(n)) as model:
        results = model.execute(*(np.zeros(tensor.shape, np.float32) for tensor in model.inputs))
        assert len(results) == count and all((result == 0.5).all() for result in results)
    return totals[-1]


def kernels(cache: Path) -> list[Path]:
    """Return the complete entries of kernels."""
    return [path for path in cache.glob("kernels/*") if not path.name.startswith(".")]


def wait_for(count: int, cache: Path) -> None:
    """Wait until the cache has so many kernels: a preparation does not."""
    until(lambda: len(list(cache.glob("kernels/*"))) == len(kernels(cache)) == count, f"{count} kernels are stored")


def test_a_worker_compiles_the_kernels_only_that_no_other_has_compiled(daemon: Daemon, cache: Path) -> None:
    with daemon.connect() as first, daemon.connect() as second:
        assert compiled_kernels(first, 3) == 3
        wait_for(3, cache)
        assert compiled_kernels(second, 5) == 2
        wait_for(5, cache)
        assert compiled_kernels(first, 4) == 0


def test_an_embedded_driver_has_the_kernels_of_the_last_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch, daemon: Daemon
) -> None:
    with daemon.connect() as client:
        assert compiled_kernels(client, 3) == 3
    wait_for(3, cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    for count, added in ((4, 1), (5, 1)):
        with nnfmq.connect(embedded=True) as client:
            assert compiled_kernels(client, count) == added


def test_CACHE_12_a_forged_or_truncated_kernel_is_compiled_again_and_replaced(daemon: Daemon, cache: Path) -> None:
    with daemon.connect() as client:
        assert compiled_kernels(client, 3) == 3
        wait_for(3, cache)
        forged, cut, _ = kernels(cache)
        content = bytearray(forged.read_bytes())
        content[-100] ^= 1
        forged.write_bytes(content)
        os.truncate(cut, 100)
        assert compiled_kernels(client, 4) == 3
        until(lambda: "an entry of the cache is removed" in daemon.program.errors(), "the log says so")
        wait_for(4, cache)
        until(lambda: forged.read_bytes() != content and cut.stat().st_size > 100, "both files are replaced")
        assert compiled_kernels(client, 5) == 1


def test_another_instruction_set_compiles_its_own_kernels(daemon: Daemon, cache: Path) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("it has an instruction set of x86-64")
    with daemon.connect() as client:
        assert compiled_kernels(client, 3) == 3
    wait_for(3, cache)
    environment = environment_of(cache, NNFMQ_TARGET="sse4.1")
    with running_daemon(daemon.path.with_name("o.sock"), environment=environment) as other, other.connect() as client:
        assert compiled_kernels(client, 3) == 3
        wait_for(6, cache)


def stopped_writer(daemon: Daemon) -> int:
    """Wait for the child process of a driver that has stopped itself while it writes a kernel, and return its pid."""

    def found() -> list[int]:
        return [pid for pid in daemon.process.children() if thread_state(pid, pid) == "T"]

    until(lambda: len(found()) == 1, "a process has stopped in the middle of a kernel")
    return found()[0]


@pytest.fixture
def stopping(folder: Path, tmp_path: Path, cache: Path) -> Iterator[Daemon]:
    """Run a daemon that stops when it writes a kernel."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(stopping_writer('"/kernels/" in path'))
    environment = environment_of(cache, **path_with(site))
    with running_daemon(folder / "d.sock", environment=environment) as daemon:
        yield daemon


def assert_goes_on(path: Path, cache: Path) -> None:
    """Assert that another driver compiles what was not stored, and that it leaves complete files only."""
    assert kernels(cache) == [] and len(list(cache.glob("kernels/*"))) == 1
    with running_daemon(path, environment=environment_of(cache)) as daemon, daemon.connect() as client:
        assert compiled_kernels(client, 4) == 4
        wait_for(4, cache)
        assert compiled_kernels(client, 5) == 1
        wait_for(5, cache)


def test_LIFE_4_a_process_killed_while_it_writes_kernels_leaves_none(
    stopping: Daemon, folder: Path, cache: Path
) -> None:
    with stopping.connect() as client:
        assert compiled_kernels(client, 3) == 3
        with Process(stopped_writer(stopping)) as writer:
            writer.kill()
            writer.wait_for_end()
    assert_goes_on(folder / "next.sock", cache)


def test_LIFE_4_a_driver_killed_while_it_writes_kernels_leaves_none(
    stopping: Daemon, folder: Path, cache: Path
) -> None:
    with stopping.connect() as client:
        assert compiled_kernels(client, 3) == 3
        with Process(stopped_writer(stopping)) as writer:
            stopping.kill()
            writer.send(signal.SIGKILL)
            writer.wait_for_end()
    assert_goes_on(folder / "next.sock", cache)


def test_LIFE_3_kernels_are_stored_if_the_client_is_killed_meanwhile(stopping: Daemon, cache: Path) -> None:
    with stopping.connect() as client, Process(client.worker_pid) as worker:
        assert compiled_kernels(client, 3) == 3
        writer = stopped_writer(stopping)
        worker.kill()
        os.kill(writer, signal.SIGCONT)
        wait_for(3, cache)
