"""perf(1) learns the names of compiled kernels: /tmp/perf-PID.map of workers and embedded drivers, and its end."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, Process, running_daemon, short_folder, until

import nnfmq
from nnfmq.base.paths import perf_map_path

pytest.importorskip("llvmlite", exc_type=ImportError)
SETTING = {"NNFMQ_PERF_MAP": "1"}
IMAGE = np.zeros((1, 8, 8, 1), np.float32)


@pytest.fixture(scope="module")
def profiled() -> Iterator[Daemon]:
    """A driver with the setting. Only root may see the mappings of a worker in its sandbox."""
    environment = SETTING if os.geteuid() == 0 else SETTING | {"NNFMQ_SANDBOX": "off"}
    with short_folder() as folder, running_daemon(folder / "d.sock", environment=environment) as daemon:
        yield daemon


def prepared(client: nnfmq.Client) -> nnfmq.PreparedModel:
    device = client.device("compiled")
    return device.prepare(nnfmq.example_path("digits.tflite"), preference="sustained_speed")


def named_functions(pid: int) -> dict[str, tuple[int, int]]:
    """Return begin and end of each function that the file of a process has; of one that was loaded again, the last."""
    lines = [line.split(maxsplit=2) for line in Path(perf_map_path(pid)).read_text().splitlines()]
    assert lines.pop(0) == ["0", "1", f"nnfmq_in_pid_namespace_{os.stat('/proc/self/ns/pid').st_ino}"]
    return {name: (int(begin, 16), int(begin, 16) + int(size, 16)) for begin, size, name in lines}


def executable_ranges(pid: int) -> list[tuple[int, int]]:
    """Return the executable mappings of a process that are no file's: perf reads names for these only."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, permissions, _, _, inode, *_ = line.split()
        if "x" in permissions and inode == "0":
            begin, _, end = addresses.partition("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


def test_the_file_names_each_kernel_where_it_is_in_the_worker(profiled: Daemon) -> None:
    from nnfmq.engines.compiled.kernel_compilation import kernel_types

    classes = {name.partition(".")[2] for name in kernel_types()}
    with profiled.connect() as client, prepared(client) as model:
        model.execute(IMAGE)
        functions, ranges = named_functions(client.worker_pid), executable_ranges(client.worker_pid)
    assert len(functions) >= 3
    for name, (begin, end) in functions.items():
        assert begin < end
        assert any(first <= begin and end <= last for first, last in ranges), name
        found = re.fullmatch(r"(\w+)_[0-9a-f]{16}", name)
        assert found is not None and found[1] in classes, name


def test_a_worker_computes_the_same_with_the_file(profiled: Daemon, daemon: Daemon) -> None:
    image = np.linspace(0, 16, 64, dtype=np.float32).reshape(IMAGE.shape)
    results = []
    for each in (profiled, daemon):
        with each.connect() as client, prepared(client) as model:
            results.append(model.execute(image)[0])
    assert np.array_equal(*results)


@pytest.mark.parametrize("number", [None, signal.SIGKILL], ids=["left", "killed"])
def test_the_file_of_a_worker_is_removed_when_it_ends(profiled: Daemon, number: signal.Signals | None) -> None:
    with profiled.connect() as client:
        pid = client.worker_pid
        until(lambda: os.path.exists(perf_map_path(pid)), "the worker has created the file")
        assert os.stat(perf_map_path(pid)).st_mode & 0o777 == 0o600
        if number is not None:
            with Process(pid) as worker:
                worker.send(number)
                worker.wait_for_end()
    until(lambda: not os.path.exists(perf_map_path(pid)), "the supervisor has removed the file")


def test_the_next_driver_removes_the_file_of_a_worker_that_outlived_its_supervisor() -> None:
    with short_folder() as folder:
        daemon = Daemon.start(folder / "d.sock", environment=SETTING)
        try:
            client = daemon.connect()
            worker_file = Path(perf_map_path(client.worker_pid))
            with Process(client.worker_pid) as worker:
                daemon.kill()
                assert client.devices()
                client.close()
                worker.wait_for_end()
            assert worker_file.exists()
            with running_daemon(folder / "d.sock", environment=SETTING):
                assert not worker_file.exists()
        finally:
            daemon.close()


def test_a_driver_without_the_setting_has_no_file(daemon: Daemon) -> None:
    with daemon.connect() as client, prepared(client) as model:
        model.execute(IMAGE)
        assert not os.path.exists(perf_map_path(client.worker_pid))


@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "killed"])
def test_the_file_of_an_embedded_driver_ends_with_it(monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:
    monkeypatch.setenv("NNFMQ_PERF_MAP", "1")
    with nnfmq.connect(embedded=True, recover=False) as client, prepared(client) as model:
        model.execute(IMAGE)
        pid = client.worker_pid
        assert named_functions(pid)
        if is_killed:
            os.kill(pid, signal.SIGKILL)
    assert not os.path.exists(perf_map_path(pid))
