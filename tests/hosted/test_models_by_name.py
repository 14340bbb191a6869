"""Models by name on hosted runtimes: what nnfmq's own engine refuses, what `model.toml` forces, new versions."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, running_daemon, short_folder
from support.model_folders import RepositoryPeer, add_version, adder
from support.onnx_files import file_of
from support.onnx_runtime import onnx
from support.places import ROOT
from support.plugins import add_example, path_with

import nnfmq
from nnfmq.serialize.repository_protocol import ModelState

X = np.arange(8)
READY, UNAVAILABLE = ModelState.READY, ModelState.UNAVAILABLE
EXAMPLE = ROOT / "docs" / "examples" / "hosted"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


@pytest.fixture(scope="module")
def models(folder: Path) -> Path:
    """Return the directory of the models of all tests, so that one is imported while another is tested."""
    models = folder / "models"
    models.mkdir()
    unknown = file_of([_node("NoSuchOperator", ["x"], ["y"])], {"x": np.ones(2, np.float32)}, ["y"])
    forced = 'device = "onnxruntime"\nbatch = 3\nshapes = { x = [1] }\nruntime_options = { threads = 1 }'
    layers = io.BytesIO()
    np.savez(layers, w0=np.float32([[1, -1], [2, 0.5]]), b0=np.float32([0.5, 0]))
    add_version(models, "beside", 1, adder(1))
    add_version(models, "forced", 1, doubled("N"), options=forced, file="model.onnx")
    add_version(models, "layers", 1, layers.getvalue(), options="shapes = { x = [1, 2] }", file="model.npz")
    add_version(models, "open", 1, doubled("N"), file="model.onnx")
    add_version(models, "plus", 1, plus(1), file="model.onnx")
    add_version(models, "rejected", 1, unknown, file="model.onnx")
    return models


@pytest.fixture(scope="module")
def driver(folder: Path, models: Path) -> Iterator[Daemon]:
    """Return a driver with a runtime of a plug-in beside those of this build; it serves the models of `models`."""
    (folder / "site").mkdir()
    add_example(folder / "site", EXAMPLE)
    with running_daemon(folder / "d.sock", models=models, environment=path_with(folder / "site")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def peer(driver: Daemon) -> Iterator[RepositoryPeer]:
    with RepositoryPeer(driver.path) as made:
        yield made


@pytest.fixture
def client(driver: Daemon) -> Iterator[nnfmq.Client]:
    with driver.connect() as made:
        yield made


def doubled(rows: str | int) -> bytes:
    """Return an ONNX file that doubles each float."""
    return _file([_node("Add", ["x", "x"], ["y"])], "FLOAT", rows)


def plus(value: int) -> bytes:
    """Return an ONNX file that adds `value` to each int64, at most the number of different ones.

    nnfmq's engine has no Unique.
    """
    constant = onnx.helper.make_tensor("value", onnx.TensorProto.INT64, [1], [value])
    nodes = [
        _node("Unique", ["x"], ["unique"]),
        _node("Size", ["unique"], ["size"]),
        _node("Min", ["size", "value"], ["least"]),
        _node("Add", ["x", "least"], ["y"]),
    ]
    return _file([_node("Constant", [], ["value"], value=constant), *nodes], "INT64", 8)


def _node(*arguments: Any, **attributes: Any) -> Any:
    return onnx.helper.make_node(*arguments, **attributes)


def _file(nodes: list[Any], kind: str, rows: str | int) -> bytes:
    x, y = (onnx.helper.make_tensor_value_info(name, getattr(onnx.TensorProto, kind), [rows]) for name in "xy")
    graph = onnx.helper.make_graph(nodes, "g", [x], [y])
    opset = onnx.helper.make_opsetid("", 18)
    content: bytes = onnx.helper.make_model(graph, ir_version=8, opset_imports=[opset]).SerializeToString()
    return content


def test_a_file_that_the_own_engine_refuses_is_served_by_a_hosted_runtime_and_a_new_version_replaces_it(
    models: Path, peer: RepositoryPeer, client: nnfmq.Client
) -> None:
    peer.wait_for("plus", version=1, state=READY, device="onnxruntime")
    found, ended = list[int](), Event()
    with client.model("plus", timeout=LIMIT_S) as model, model.burst() as burst:
        assert (model.inputs[0].dtype, model.device) == ("int64", "onnxruntime")

        def execute() -> None:
            while not ended.is_set():
                found.append(int(burst.execute(X)[0][0]))
                if found[-1] == 4:
                    ended.set()

        thread = Thread(target=execute)
        thread.start()
        add_version(models, "plus", 2, plus(4), file="model.onnx")
        assert ended.wait(LIMIT_S)
        thread.join()
        assert burst.execute(X)[0].tolist() == list(range(4, 12))
        assert (set(found), burst.version) == ({1, 4}, 2)


def test_a_file_that_the_runtime_rejects_is_a_broken_version_with_its_text_and_delays_no_other_model(
    models: Path, peer: RepositoryPeer
) -> None:
    peer.wait_for("beside", version=1, state=READY, device="compiled")
    entry = peer.wait_for("rejected", version=0, state=UNAVAILABLE, failed_version=1)
    assert "device 'onnxruntime' rejects it: " in entry.reason and "NoSuchOperator" in entry.reason
    assert str(models) not in entry.reason


def test_options_force_a_runtime_and_bind_the_rows_of_a_batch(peer: RepositoryPeer, client: nnfmq.Client) -> None:
    peer.wait_for("forced", version=1, device="onnxruntime")
    with client.model("forced", timeout=LIMIT_S) as model, model.burst() as burst:
        assert (model.batch, model.inputs[0].shape, model.outputs[0].shape) == (3, (3,), (3,))
        assert burst.execute(np.float32([1, 2, 3]))[0].tolist() == [2, 4, 6]


def test_sizes_that_a_file_leaves_open_stay_open_on_a_hosted_runtime(
    peer: RepositoryPeer, client: nnfmq.Client
) -> None:
    peer.wait_for("open", version=1, device="onnxruntime")
    with client.model("open", timeout=LIMIT_S) as model:
        assert model.inputs[0].has_unknown_shape
        for count in (1, 5):
            assert model.execute(np.arange(count, dtype=np.float32))[0].tolist() == [2 * i for i in range(count)]


def test_a_file_of_a_plug_in_s_format_has_any_ending(peer: RepositoryPeer, client: nnfmq.Client) -> None:
    peer.wait_for("layers", version=1, device="layers")
    with client.model("layers", timeout=LIMIT_S) as model:
        assert model.execute(np.float32([[1, 2]]))[0].tolist() == [[5.5, 0]]
