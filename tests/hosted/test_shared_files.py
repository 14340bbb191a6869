"""One copy of a hosted file for all clients that send its bytes, also if clients, workers or the driver are killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, Process, Program, running_daemon, short_folder, until

import nnfmq
from nnfmq.base.memory import copy_file
from nnfmq.driver.cache.shared_files import SHARED_BYTES_MIN
from nnfmq.importers import file_format
from nnfmq.importers.file_format import read_source
from nnfmq.importers.hosted import read_hosted
from nnfmq.lab.placement import open_memfd_sizes

pytest.importorskip("onnxruntime")
WIDTH = 300
KILLED = """
import sys
import nnfmq
client = nnfmq.connect(sys.argv[1])
model = client.device("onnxruntime").prepare(sys.argv[2])
print(client.worker_pid, flush=True)
sys.stdin.readline()
"""
ONE = np.ones((1, WIDTH), np.float32)


def write(path: Path, value: float, width: int = WIDTH) -> int:
    """Write a file that multiplies by a matrix of equal values; return its size in bytes."""
    onnx: Any = pytest.importorskip("onnx")
    weights = onnx.numpy_helper.from_array(np.full((width, width), value, np.float32), "weights")
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, width]) for name in "xy"]
    node = onnx.helper.make_node("MatMul", ["x", "weights"], ["y"])
    graph = onnx.helper.make_graph([node], "product", ends[:1], ends[1:], [weights])
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(made.SerializeToString())
    return path.stat().st_size


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock", options=["--runtimes", "onnxruntime"]) as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, int]:
    path = tmp_path / "model.onnx"
    size = write(path, 0.5)
    assert size > SHARED_BYTES_MIN
    return path, size


def prepared(client: nnfmq.Client, path: Path) -> nnfmq.CompiledModel:
    return client.device("onnxruntime").prepare(path)


def copies(daemon: Daemon, size: int, *clients: nnfmq.Client) -> int:
    """Return how many memories of this size the clients in this process, the workers and the supervisor have open."""
    workers = [client.worker_pid for client in clients if client.worker_pid is not None]
    return open_memfd_sizes([os.getpid(), daemon.process.pid, *workers]).count(size)


def test_clients_that_send_the_same_bytes_have_one_memory_and_the_last_one_ends_it(
    daemon: Daemon, file: tuple[Path, int], tmp_path: Path
) -> None:
    path, size = file
    renamed = tmp_path / "renamed.onnx"
    renamed.write_bytes(path.read_bytes())
    with daemon.connect() as first, daemon.connect() as second, prepared(first, path) as one:
        assert copies(daemon, size, first, second) == 1
        with prepared(second, renamed) as two:
            assert copies(daemon, size, first, second) == 1
            assert [model.execute(ONE)[0][0, 0] for model in (one, two)] == [150, 150]
        assert one.execute(ONE)[0][0, 0] == 150
    del one, two
    until(lambda: copies(daemon, size) == 0, "the memory is freed")


def test_other_bytes_of_the_same_size_are_another_memory(
    daemon: Daemon, file: tuple[Path, int], tmp_path: Path
) -> None:
    path, size = file
    other = tmp_path / "other.onnx"
    assert write(other, 0.25) == size
    with (
        daemon.connect() as first, daemon.connect() as second,
        prepared(first, path) as one, prepared(second, other) as two,
    ):  # fmt: skip
        assert copies(daemon, size, first, second) == 2
        assert [model.execute(ONE)[0][0, 0] for model in (one, two)] == [150, 75]


def test_a_small_file_is_not_shared(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    size = write(path, 1, 16)
    with (
        daemon.connect(recover=True) as first, daemon.connect(recover=True) as second,  # they keep their files
        prepared(first, path) as one, prepared(second, path) as two,
    ):  # fmt: skip
        assert copies(daemon, size, first, second) == 2
        assert one.execute(ONE[:, :16])[0][0, 0] == two.execute(ONE[:, :16])[0][0, 0] == 16


def test_the_others_keep_the_memory_of_a_client_whose_worker_is_killed_and_it_shares_again_when_it_recovers(
    daemon: Daemon, file: tuple[Path, int]
) -> None:
    path, size = file
    with (
        daemon.connect(recover=True) as first, daemon.connect() as second, daemon.connect() as third,
        prepared(first, path) as one, prepared(second, path) as two,
    ):  # fmt: skip
        assert first.worker_pid is not None
        with Process(first.worker_pid) as worker:
            worker.kill()
            worker.wait_for_end()
        with prepared(third, path) as three:
            assert copies(daemon, size, second, third) == 1
            assert [model.execute(ONE)[0][0, 0] for model in (one, two, three)] == [150, 150, 150]
            assert copies(daemon, size, first, second, third) == 1


def test_a_client_that_is_killed_in_the_middle_leaves_nothing(daemon: Daemon, file: tuple[Path, int]) -> None:
    path, size = file
    with Program.start(["-c", KILLED, daemon.path, path]) as program, daemon.connect() as second:
        worker = int(program.line())
        with prepared(second, path) as two:
            assert open_memfd_sizes([os.getpid(), program.pid, worker, daemon.process.pid]).count(size) == 1
            program.popen.kill()
            until(lambda: not Path(f"/proc/{worker}").exists(), "the worker exits")
            assert two.execute(ONE)[0][0, 0] == 150
    until(lambda: copies(daemon, size) == 0, "the memory is freed")


def test_the_runtime_is_loaded_in_the_worker_only(daemon: Daemon, file: tuple[Path, int]) -> None:
    with Program.start(["-c", KILLED, daemon.path, file[0]]) as program:
        pids = {"worker": int(program.line()), "client": program.pid, "supervisor": daemon.process.pid}
        assert [name for name, pid in pids.items() if "onnx" in Path(f"/proc/{pid}/maps").read_text()] == ["worker"]


# ----------------------------------------------------------------------------------------------------------------------
# The client's own copy.


def peak_bytes() -> int:
    """Return the largest resident size of this process since `forget_peak`."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def test_a_client_reads_a_file_to_the_memory_that_it_sends_and_has_no_other_copy(tmp_path: Path) -> None:
    path, size = tmp_path / "net.own", 64 << 20
    with path.open("wb") as file:
        file.truncate(size)
        file.write(b"own")
    forget_peak()
    before = peak_bytes()
    source = read_hosted(read_source(path, is_sealed=True))
    assert peak_bytes() - before < size // 4
    (part,) = source.parts
    assert part.size_bytes == size and bytes(part.view[:4]) == b"own\0"


def test_a_file_that_grows_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.own"
    path.write_bytes(bytes(100))

    def copy_and_grow(source: int, begin: int, size: int, target: int) -> None:
        copy_file(source, begin, size, target)
        path.write_bytes(bytes(150))

    monkeypatch.setattr(file_format, "copy_file", copy_and_grow)
    assert len(read_source(path, is_sealed=True).data) == 150
