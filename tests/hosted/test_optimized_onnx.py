"""What ONNX Runtime has optimized and prepacked, in files of the cache that all workers map."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, Process, running_daemon, short_folder

import nnfmq
from nnfmq.base.memory import Memory, write_all
from nnfmq.driver.cache import mapped_files
from nnfmq.driver.memory.private import ConstantPool
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.hosted import FileParts, HostedCall
from nnfmq.hosted.adapter import HostedFile, OpenOptions
from nnfmq.hosted.onnxruntime import OnnxRuntimeDevice

onnx: Any = pytest.importorskip("onnx")
onnxruntime: Any = pytest.importorskip("onnxruntime")

WIDTH = 600
RANDOM = np.random.default_rng(7)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nnfmq"


@pytest.fixture
def daemon(cache: Path) -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock", options=["--runtimes", "onnxruntime"]) as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "model.onnx", WIDTH)


def written(path: Path, width: int, **saving: Any) -> Path:
    """Write two products, an addition to fold and a convolution, which have kernels that prepack."""
    weights = {
        "a": RANDOM.standard_normal((width, width), np.float32) / np.float32(width**0.5),
        "b": RANDOM.standard_normal((width, width), np.float32) / np.float32(width**0.5),
        "k": RANDOM.standard_normal((16, 1, 1, 9), np.float32),
        "shape": np.array([1, 1, -1, width], np.int64),
    }
    make = onnx.helper.make_node
    nodes = [
        make("MatMul", ["x", "a"], ["p"]), make("Relu", ["p"], ["q"]), make("Add", ["b", "b"], ["bb"]),
        make("MatMul", ["q", "bb"], ["r"]), make("Reshape", ["r", "shape"], ["s"]), make("Conv", ["s", "k"], ["y"]),
    ]  # fmt: skip
    ends = [
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", width]),
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 16, None, None]),
    ]
    tensors = [onnx.numpy_helper.from_array(values, name) for name, values in weights.items()]
    graph = onnx.helper.make_graph(nodes, "products", ends[:1], ends[1:], tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, **saving)
    return path


def expected(path: Path, x: Any) -> Any:
    """Return what ONNX Runtime computes in this process, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options).run(None, {"x": x})[0]


def computed(client: nnfmq.Client, path: Path, rows: int) -> tuple[Any, Any]:
    """Return the result of the driver, and of ONNX Runtime in this process."""
    x = RANDOM.standard_normal((rows, WIDTH), np.float32)
    with client.device("onnxruntime").prepare(path, runtime_options={"threads": 1}) as model:
        return model.execute(x)[0], expected(path, x)


def mapped(client: nnfmq.Client, cache: Path) -> set[str]:
    """Return the names of the files of the cache that the worker of a client maps."""
    lines = Path(f"/proc/{client.worker_pid}/maps").read_text()
    return set(re.findall(rf"{re.escape(str(cache))}/(\w+)$", lines, re.MULTILINE))


def weights_of(cache: Path) -> list[Path]:
    """Return the files whose name is the digest of their content."""
    return [path for path in cache.iterdir() if sha256(path.read_bytes()).hexdigest() == path.name]


def test_each_worker_maps_the_same_weights_and_computes_what_a_session_of_the_file_does(
    daemon: Daemon, cache: Path, file: Path
) -> None:
    x = RANDOM.standard_normal((1, WIDTH), np.float32)
    with daemon.connect() as first, daemon.connect() as second:
        with first.device("onnxruntime").prepare(file) as one, second.device("onnxruntime").prepare(file) as two:
            (weights,) = weights_of(cache)
            assert mapped(first, cache) == mapped(second, cache) == {weights.name}
            np.testing.assert_array_equal(one.execute(x)[0], expected(file, x))
            np.testing.assert_array_equal(two.execute(x)[0], expected(file, x))
        for rows in (1, 3, 64):
            for client in (first, second):
                np.testing.assert_array_equal(*computed(client, file, rows))


def test_a_model_with_its_weights_in_another_file_has_them_in_the_cache_too(
    daemon: Daemon, cache: Path, tmp_path: Path
) -> None:
    file = written(tmp_path / "large.onnx", WIDTH, save_as_external_data=True, location="large.data")
    with daemon.connect() as first, daemon.connect() as second:
        for client in (first, second):
            np.testing.assert_array_equal(*computed(client, file, 2))
    assert len(weights_of(cache)) == 1


def test_weights_that_were_changed_are_replaced_and_those_that_were_removed_made_again(
    daemon: Daemon, cache: Path, file: Path
) -> None:
    with daemon.connect() as client:
        np.testing.assert_array_equal(*computed(client, file, 1))
    (weights,) = weights_of(cache)
    right = weights.read_bytes()
    changed = bytearray(right)
    changed[len(right) // 3] ^= 1
    for attack in (lambda: weights.write_bytes(changed), weights.unlink, lambda: weights.write_bytes(right[:-1])):
        attack()
        with daemon.connect() as client:
            np.testing.assert_array_equal(*computed(client, file, 1))
        assert weights.read_bytes() == right


def test_a_small_model_and_one_that_the_cache_cannot_hold_have_no_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = written(tmp_path / "small.onnx", 60), written(tmp_path / "large.onnx", WIDTH)
    monkeypatch.setenv("NNFMQ_CACHE_MIB", "4")
    with short_folder() as made, running_daemon(made / "d.sock", options=["--runtimes", "onnxruntime"]) as daemon:
        with daemon.connect() as client, client.device("onnxruntime").prepare(small) as model:
            x = RANDOM.standard_normal((1, 60), np.float32)
            np.testing.assert_array_equal(model.execute(x)[0], expected(small, x))
        with daemon.connect() as client:
            np.testing.assert_array_equal(*computed(client, large, 1))
            assert mapped(client, cache) == set()
    assert weights_of(cache) == []


def test_a_client_whose_limit_does_not_allow_the_copy_gets_its_model(
    cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = file.read_bytes()
    opened = HostedFile("onnx", {"model.onnx": memoryview(data)})
    assert OnnxRuntimeDevice().open(opened, OpenOptions(saves=True)).save() is not None

    def charge(size: int) -> None:
        assert size == 2 * len(data)
        raise nnfmq.ResourceExhausted("too much")

    monkeypatch.setattr("nnfmq.hosted.optimized_onnx.memory.charge", charge)
    model = OnnxRuntimeDevice().open(opened, OpenOptions(saves=True))
    assert model.save() is None
    assert [tensor.name for tensor in model.description.outputs] == ["y"]


def test_a_file_whose_weights_vanish_before_it_is_opened_again_is_open(
    cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnfmq.hosted.optimized_onnx.store_file", lambda memory: "0" * 64)
    call = HostedCall("onnx", (FileParts("model.onnx", 1),))
    for _ in range(2):  # made, then found in the cache
        description = OnnxRuntimeDevice().describe_file(call, [ConstantPool(file.read_bytes())])
        assert [tensor.name for tensor in description.outputs] == ["y"]


def test_the_embedded_driver_stores_and_maps_weights(cache: Path, file: Path) -> None:
    with nnfmq.connect(embedded=True) as client, client.device("onnxruntime").prepare(file):
        assert [path.name for path in weights_of(cache)] == list(mapped(client, cache))


def test_the_other_worker_goes_on_when_the_one_that_stored_the_weights_is_killed(
    daemon: Daemon, cache: Path, file: Path
) -> None:
    x = RANDOM.standard_normal((1, WIDTH), np.float32)
    with (
        daemon.connect(recover=True) as first, daemon.connect() as second,
        first.device("onnxruntime").prepare(file) as one, second.device("onnxruntime").prepare(file) as two,
    ):  # fmt: skip
        assert first.worker_pid is not None
        with Process(first.worker_pid) as worker:
            worker.kill()
            worker.wait_for_end()
        np.testing.assert_array_equal(two.execute(x)[0], expected(file, x))
        np.testing.assert_array_equal(one.execute(x)[0], expected(file, x))


# ----------------------------------------------------------------------------------------------------------------------
# Stored files.


def stored(data: bytes) -> str | None:
    with Memory.create_constant(len(data), lambda fd: write_all(fd, data), "test") as memory:
        return mapped_files.store_file(memory)


def test_a_stored_file_has_the_digest_of_its_content_as_its_name(cache: Path) -> None:
    name = stored(b"weights")
    assert name == sha256(b"weights").hexdigest()
    before = (cache / name).stat()
    assert stored(b"weights") == name
    assert (cache / name).stat().st_ino == before.st_ino  # a worker may just have verified it
    with mapped_files.stored_file(name) as path:
        assert path.read_bytes() == b"weights"


def test_a_file_that_is_replaced_while_a_runtime_opens_it_is_not_used(cache: Path) -> None:
    name = stored(b"weights")
    assert name is not None
    other = cache / "other"
    other.write_bytes(b"weights")
    with pytest.raises(GeneralFailure, match="was replaced"), mapped_files.stored_file(name) as path:
        other.rename(path)


def test_a_file_with_another_content_is_not_used(cache: Path) -> None:
    name = stored(b"weights")
    assert name is not None
    (cache / name).write_bytes(b"weight!")
    with pytest.raises(GeneralFailure, match="has another content"), mapped_files.stored_file(name):
        pass
    assert stored(b"weights") == name
    assert (cache / name).read_bytes() == b"weights"


def test_a_file_that_is_not_there_is_named(cache: Path) -> None:
    no_file = pytest.raises(GeneralFailure, match=f"the cache has no file {'0' * 64}")
    with no_file, mapped_files.stored_file("0" * 64):
        pass
