"""Hundreds of damaged files for each runtime: whatever it makes of one, the driver and its other clients go on.

A file that is cut off, of another format behind the right first bytes, mixed with another one, or has random bits
flipped is opened and executed. The runtime may load it, reject it, or crash; the last costs its worker.
"""

from __future__ import annotations

import random
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, until
from support.hosted_files import made
from support.onnx_files import file_of
from support.onnx_runtime import onnx

import nnfmq

pytestmark = pytest.mark.full

COUNT = 300
OPEN_S, RUN_S = 30.0, 2.0
ALLOWED = (
    nnfmq.InvalidArgument, nnfmq.GeneralFailure, nnfmq.ResourceExhausted, nnfmq.MissedDeadline, nnfmq.DeadObject,
)  # fmt: skip
HEADS = [b"\x08\x08\x12\x00:", b"\x1c\x00\x00\x00TFL3", b"<net", b"PK\x03\x04", b""]


class Valid(NamedTuple):
    """A valid file, and files beside it."""

    path: Path
    others: tuple[Path, ...] = ()


def onnx_file(folder: Path) -> Valid:
    node = onnx.helper.make_node
    weights = {"w": np.ones((4, 4), np.float32), "axes": np.array([1])}
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Relu", ["a"], ["b"]), node("ReduceSum", ["b", "axes"], ["y"])]
    path = folder / "net.onnx"
    path.write_bytes(file_of(nodes, {"x": np.ones((2, 4), np.float32)}, ["y"], weights))
    return Valid(path)


def framework_file(folder: Path, runtime: str, name: str, *others: str) -> Valid:
    made(f"{runtime}_models", folder)
    return Valid(folder / name, tuple(folder / other for other in others))


FILES: dict[str, tuple[str, Callable[[Path], Valid]]] = {
    "onnxruntime": ("onnxruntime", onnx_file),
    "litert": ("ai_edge_litert", lambda _: Valid(Path(nnfmq.example_path("digits.tflite")))),
    "openvino": ("openvino", lambda folder: framework_file(folder, "openvino", "vision.xml", "vision.bin")),
    "torch": ("torch", lambda folder: framework_file(folder, "torch", "vision.pt2")),
    "jax": ("jax", lambda folder: framework_file(folder, "jax", "vision.jax")),
}


def mutated(data: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield damaged files and what was done to each."""
    chance = random.Random(1)
    size = len(data)
    for number in range(count):
        kind = number % 6
        if kind == 0:
            end = chance.randrange(size)
            yield f"cut at {end}", data[:end]
        elif kind == 1:
            head = chance.choice(HEADS)
            yield f"begins with {head!r}", head + data[len(head) :] if number % 12 == 1 else head + data
        elif kind == 2:
            begin, end = sorted(chance.sample(range(size), 2))
            yield f"{begin}:{end} twice", data[:end] + data[begin:]
        else:
            changed = bytearray(data)
            places = [chance.randrange(min(size, 1 << chance.randrange(6, 24))) for _ in range(chance.randint(1, 8))]
            for place in places:
                changed[place] ^= 1 << chance.randrange(8)
            yield f"bits at {places}", bytes(changed)


def run(client: nnfmq.Client, device: str, path: Path) -> str:
    """Open and execute a file; return "runs" or the name of the error."""
    try:
        with client.device(device).prepare(path, timeout=OPEN_S) as model:
            inputs = [np.ones([size or 1 for size in info.shape], info.dtype) for info in model.inputs]
            model.execute(*inputs, timeout=RUN_S)
    except ALLOWED as error:
        return type(error).__name__
    return "runs"


@pytest.mark.parametrize(
    ("runtime", "name", "format"),
    [
        ("litert", "net.tflite", "onnx"), ("onnxruntime", "net.onnx", "tflite"), ("openvino", "net.xml", "pt2"),
        ("torch", "net.pt2", "tflite"), ("jax", "net.jax", "onnx"),
    ],
)  # fmt: skip
def test_a_file_of_another_format_by_the_name_of_the_runtime_s_own_is_refused(
    shared_client: nnfmq.Client, runtime: str, name: str, format: str, tmp_path: Path
) -> None:
    if find_spec(FILES[runtime][0]) is None:
        pytest.skip(f"{FILES[runtime][0]} is not installed")
    (tmp_path / "made").mkdir()
    path = tmp_path / name
    if format == "pt2":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("net/models/model.json", "{}")
    else:
        path.write_bytes(
            FILES["litert" if format == "tflite" else "onnxruntime"][1](tmp_path / "made").path.read_bytes()
        )
    with pytest.raises(nnfmq.InvalidArgument, match=f"not '{format}'"):
        shared_client.device(runtime).prepare(path)


@pytest.mark.parametrize("runtime", FILES)
def test_a_damaged_file_costs_its_worker_at_most(shared_daemon: Daemon, runtime: str, tmp_path: Path) -> None:
    module, make = FILES[runtime]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    valid = make(tmp_path)
    found = Counter[str]()
    folder = tmp_path / "damaged"
    folder.mkdir()
    for other in valid.others:
        (folder / other.name).write_bytes(other.read_bytes())
    path = folder / valid.path.name
    before = len(shared_daemon.process.descendants())
    with ExitStack() as stack:
        neighbour = stack.enter_context(shared_daemon.connect())
        model = stack.enter_context(neighbour.device(runtime).prepare(valid.path))
        inputs = [np.ones(info.shape, info.dtype) for info in model.inputs]
        burst = stack.enter_context(model.burst())
        expected = [array.copy() for array in burst.execute(*inputs)]
        client = shared_daemon.connect()
        for what, data in mutated(valid.path.read_bytes(), COUNT):
            path.write_bytes(data)
            result = run(client, runtime, path)
            found[result] += 1
            if result in ("DeadObject", "MissedDeadlineTransient", "MissedDeadlinePersistent"):
                print(f"{what}: {result}")
                client.close()
                client = shared_daemon.connect()
            assert all(map(np.array_equal, expected, burst.execute(*inputs, timeout=LIMIT_S))), what
        client.close()
    until(lambda: len(shared_daemon.process.descendants()) == before, "the workers have ended")
    print(runtime, dict(found))
    assert found["InvalidArgument"] > COUNT // 6  # at least those that were cut
    assert sorted(file.name for file in folder.iterdir()) == sorted({path.name, *(o.name for o in valid.others)})
