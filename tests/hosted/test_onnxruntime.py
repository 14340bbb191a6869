"""The device `onnxruntime`: a driver computes with ONNX Runtime, bit for bit, what that computes in this process.

Options that name files or libraries are refused, and files that a model names are never opened by their path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder
from support.onnx_files import OnnxCase
from support.onnx_runtime import onnx, runtime
from support.oracles import Array

import nnfmq
from nnfmq.hosted.adapter import HostedFile, OpenOptions
from nnfmq.hosted.onnxruntime import OnnxRuntimeDevice

ONE_THREAD = {"threads": 1}
EXTERNAL = "w.bin"
HERE = "pyproject.toml"  # a file of the driver's current folder
random = np.random.default_rng(3)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def device(daemon: Daemon) -> Iterator[nnfmq.Device]:
    with daemon.connect(recover=False) as client:
        yield client.device("onnxruntime")


def info(name: str, shape: Sequence[int | str] | None, kind: int = 1) -> Any:
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def node(name: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    return onnx.helper.make_node(name, inputs, outputs, **attributes)


def model_of(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], constants: Sequence[Any] = ()) -> Any:
    graph = onnx.helper.make_graph(nodes, "graph", inputs, outputs, constants)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=opsets)


def file_of(*parts: Any) -> bytes:
    data: bytes = model_of(*parts).SerializeToString()
    return data


def in_process(content: bytes | str, fed: Mapping[str, Array]) -> list[Array]:
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return [np.asarray(array) for array in session.run(None, dict(fed))]


def assert_same(found: Sequence[Array], expected: Sequence[Array]) -> None:
    """Check shapes, element types and bits."""
    assert [(a.dtype, a.shape) for a in found] == [(a.dtype, a.shape) for a in expected]
    assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]


def floats(*shape: int) -> Array:
    return random.uniform(-1, 1, shape).astype(np.float32)


def boxes(count: int, size: float) -> Array:
    corners = random.uniform(0, size, (count, 2, 2)).astype(np.float32)
    return np.concatenate([corners.min(1), corners.max(1)], -1)


# ---- operators and element types

CASES = [
    OnnxCase("Conv", [floats(1, 2, 4, 5, 6), floats(3, 2, 2, 2, 2)], constants=frozenset([1])),
    OnnxCase("AveragePool", [floats(1, 2, 4, 4, 4)], {"kernel_shape": [2, 2, 2]}),
    OnnxCase("NonMaxSuppression", [boxes(9, 1)[None], floats(1, 2, 9), np.int64([3])]),
    OnnxCase("RoiAlign", [floats(1, 2, 8, 8), boxes(2, 8), np.int64([0, 0])], {"output_height": 2, "output_width": 2}),
    OnnxCase("GridSample", [floats(1, 1, 4, 4), floats(1, 3, 3, 2)]),
    OnnxCase("Unique", [np.int64([3, 1, 3, 2])], outputs=4),
    OnnxCase("LSTM", [floats(3, 1, 2), floats(1, 16, 2), floats(1, 16, 4)], {"hidden_size": 4}, outputs=3),
    OnnxCase("MatMulInteger", [random.integers(0, 99, (2, 3)).astype(np.uint8), np.ones((3, 2), np.uint8)]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operators_that_nnfmq_s_own_engine_refuses_run_by_call_and_burst(device: nnfmq.Device, case: OnnxCase) -> None:
    content, fed = case.content(), case.fed()
    with device.prepare(content, runtime_options=ONE_THREAD) as model:
        expected = in_process(content, fed)
        for _ in range(2):
            assert_same(model.execute(*fed.values()), expected)
        with model.burst() as burst:
            for _ in range(3):
                assert_same(burst.execute(*fed.values()), expected)


def test_a_model_of_trees_runs(device: nnfmq.Device) -> None:
    domain = {"domain": "ai.onnx.ml"}
    scaled = node("Scaler", ["x"], ["s"], offset=[0.5, 0.25], scale=[2.0, 3.0], **domain)
    trees = node(
        "TreeEnsembleRegressor", ["s"], ["y"], n_targets=1, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2],
        nodes_featureids=[1, 0, 0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values=[0.1, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0], target_treeids=[0, 0], target_nodeids=[1, 2],
        target_ids=[0, 0], target_weights=[1.5, -2.5], **domain,
    )  # fmt: skip
    content = file_of([scaled, trees], [info("x", ["n", 2])], [info("y", ["n", 1])])
    fed = {"x": floats(5, 2)}
    with device.prepare(content) as model:
        assert_same(model.execute(fed["x"]), in_process(content, fed))


NUMBERS = [f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)]
NUMBERS += ["bool", "float16", "float32", "float64"]


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)])
def test_elements_of_all_types_cross_as_they_are(device: nnfmq.Device, shape: tuple[int, ...]) -> None:
    fed = {name: random.integers(0, 255, (*shape, 8), dtype=np.uint8).view(name)[..., 0] for name in NUMBERS}
    fed["bool"] = random.integers(0, 2, shape).astype(bool)
    kinds = [onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in NUMBERS]
    sides = [[info(p + name, shape, kind) for name, kind in zip(NUMBERS, kinds, strict=True)] for p in "xy"]
    content = file_of([node("Identity", ["x" + name], ["y" + name]) for name in NUMBERS], *sides)
    arrays = list(fed.values())
    with device.prepare(content) as model, model.burst() as burst:
        assert_same(model.execute(*arrays), arrays)
        assert_same(burst.execute(*arrays), arrays)


def test_bfloat16_crosses_as_words(device: nnfmq.Device) -> None:
    casts = [node("Cast", ["x"], ["f"], to=1), node("Cast", ["f"], ["y"], to=16)]
    content = file_of(casts, [info("x", [4], 16)], [info("f", [4]), info("y", ["n"], 16)])
    words = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)
    with device.prepare(content) as model:
        wide, back = model.execute(words)
    assert_same([wide, back], [(words.astype(np.uint32) << 16).view(np.float32), words])


SEQUENCE = onnx.helper.make_tensor_sequence_value_info("y", 1, None)
REFUSED = {
    "input 'x' has elements of type string": (node("Identity", ["x"], ["y"]), info("x", [1], 8), info("y", [1], 8)),
    "output 'y' has elements of type seq(tensor(float))": (
        node("SequenceConstruct", ["x"], ["y"]), info("x", [1]), SEQUENCE,
    ),
    "output 'y' has elements of type float8e4m3fn": (
        node("Cast", ["x"], ["y"], to=17), info("x", [1]), info("y", [1], 17),
    ),
    "output 'y' has elements of type int4": (node("Cast", ["x"], ["y"], to=22), info("x", [2]), info("y", [2], 22)),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_cross_is_refused_by_name(device: nnfmq.Device, message: str) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=re.escape(message)):
        device.prepare(file_of(*([part] for part in REFUSED[message])))


# ---- shapes


def test_open_sizes_and_an_unknown_rank_are_those_of_each_request(device: nnfmq.Device) -> None:
    add = node("Add", ["x", "x"], ["y"])
    with device.prepare(file_of([add], [info("x", ["n", 3])], [info("y", ["n", 3])])) as model:
        for rows in (2, 1, 4):
            assert_same(model.execute(np.ones((rows, 3), np.float32)), [np.full((rows, 3), 2, np.float32)])
    anything = file_of([add], [info("x", None)], [info("y", None)])
    with device.prepare(anything) as model:
        for shape in ((2, 3), (4,)):
            assert_same(model.execute(np.ones(shape, np.float32)), [np.full(shape, 2, np.float32)])
    with device.prepare(anything, shapes={"x": ()}) as model:
        assert_same(model.execute(np.float32(3)), [np.array(6, np.float32)])


def test_an_output_may_have_another_shape_each_time(device: nnfmq.Device) -> None:
    content = file_of([node("NonZero", ["x"], ["y"])], [info("x", [4])], [info("y", [1, "n"], 7)])
    with device.prepare(content) as model:
        for x in ([1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]):
            assert_same(model.execute(np.float32(x)), in_process(content, {"x": np.float32(x)}))


@pytest.mark.parametrize("stated", [[1, 2], [1, 2, 3], ["n", "n"], [2]], ids=str)
def test_an_output_has_the_shape_that_is_computed_whatever_the_file_states(
    device: nnfmq.Device, stated: list[int | str]
) -> None:
    nodes = [node("NonZero", ["x"], ["i"]), node("Shape", ["x"], ["s"]), node("Reshape", ["i", "s"], ["r"])]
    outputs = [info("i", stated, 7), info("r", stated, 7)]
    content = file_of(nodes, [info("x", ["n"])], outputs)
    with (
        device.prepare(content) as open_sizes,
        device.prepare(content, shapes={"x": (2,)}) as bound,
        bound.burst() as burst,
    ):
        for execute in (open_sizes.execute, bound.execute, burst.execute):
            x = np.ones(2, np.float32)
            assert_same(execute(x), in_process(content, {"x": x}))
    content = file_of(nodes[:1], [info("x", [4])], outputs[:1])
    with device.prepare(content) as model, model.burst() as burst:
        for x in ([0, 1, 1, 0], [1, 1, 1, 0]):
            assert_same(burst.execute(np.float32(x)), in_process(content, {"x": np.float32(x)}))


def test_a_shape_that_onnx_runtime_infers_may_be_wrong_where_the_file_states_another_one(device: nnfmq.Device) -> None:
    pool = node("MaxPool", ["x"], ["y"], auto_pad="SAME_LOWER", dilations=[3], kernel_shape=[3])
    content, x = file_of([pool], [info("x", [1, 1, 4])], [info("y", [1, 1, 0])]), np.ones((1, 1, 4), np.float32)
    assert in_process(content, {"x": x})[0].shape == (1, 1, 0)
    with device.prepare(content) as model:
        assert_same(model.execute(x), in_process(content, {"x": x}))


def test_an_output_that_is_empty_whatever_its_unknown_size_is_has_its_shape(device: nnfmq.Device) -> None:
    constants = [onnx.helper.make_tensor(name, 7, [1], [0]) for name in ("begin", "end")]
    outputs, feeds = [info("y", [0, "n"])], {"x": np.ones((4, 3), np.float32)}
    content = file_of([node("Slice", ["x", "begin", "end"], ["y"])], [info("x", [4, "n"])], outputs, constants)
    with device.prepare(content) as model, model.burst() as burst:
        for execute in (model.execute, burst.execute):
            assert_same(execute(*feeds.values()), in_process(content, feeds))


def test_outputs_that_are_inputs_or_named_twice_are_right(device: nnfmq.Device) -> None:
    outputs = [info("x", [2]), info("y", [2]), info("y", [2]), info("c", [2])]
    content = file_of(
        [node("Neg", ["x"], ["y"])], [info("x", [2])], outputs, [onnx.helper.make_tensor("c", 1, [2], [5, 6])]
    )
    with device.prepare(content) as model, model.burst() as burst:
        for value in (1, 2):
            x = np.float32([value, -value])
            assert_same(burst.execute(x), [x, -x, -x, np.float32([5, 6])])


def test_an_input_with_an_initializer_is_no_input(device: nnfmq.Device) -> None:
    content = file_of([node("Add", ["x", "w"], ["y"])], [info("x", [2]), info("w", [2])], [info("y", [2])],
                      [onnx.helper.make_tensor("w", 1, [2], [3, 4])])  # fmt: skip
    with device.prepare(content) as model:
        assert [each.name for each in model.inputs] == ["x"]
        assert model.execute(np.float32([1, 1]))[0].tolist() == [4, 5]


# ---- options

ADD = file_of([node("Add", ["x", "x"], ["y"])], [info("x", [2])], [info("y", [2])])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extension": "a.so"}, "runtime option 'extension': allowed are threads, providers, .*, custom_op_libraries$"),
        ({"optimized_model_filepath": "/tmp/x"}, "'optimized_model_filepath': allowed"),
        ({"register_custom_ops_library": "a.so"}, "'register_custom_ops_library': allowed"),
        ({"enable_profiling": True}, "'enable_profiling': allowed"),
        ({"providers": ["NoSuchProvider"]}, "provider 'NoSuchProvider':.*CPUExecutionProvider"),
        ({"providers": "CPUExecutionProvider"}, "providers and provider_options are lists of the same length"),
        ({"providers": ["CPUExecutionProvider"], "provider_options": []}, ""),
        ({"provider_options": [{}, {}]}, "of the same length"),
        ({"providers": [["CPUExecutionProvider", {"a": 1}]]}, "CPUExecutionProvider option 'a': allowed are none"),
        ({"execution_mode": "FAST"}, "execution_mode 'FAST':.*ORT_SEQUENTIAL, ORT_PARALLEL"),
        ({"graph_optimization_level": 3}, "graph_optimization_level 3:.*ORT_ENABLE_ALL"),
        ({"enable_mem_pattern": "no"}, "enable_mem_pattern 'no':.*True, False"),
        ({"session_config_entries": ["a"]}, "'session_config_entries' has settings by name, not"),
        ({"session_config_entries": {"session.model_external_initializers_file_folder_path": "/"}}, "config entry"),
        ({"session_config_entries": {"session.optimized_model_filepath": "x"}}, "config entry 'session.optimized"),
        ({"session_config_entries": {"session.enable_profiling": "1"}}, "config entry 'session.enable_profiling'"),
        ({"session_config_entries": {"ep.context_enable": "1"}}, "config entry 'ep.context_enable'"),
        ({"session_config_entries": {"session.disable_prepacking": "maybe", "mlas.disable_kleidiai": "1"}}, ""),
    ],
)
def test_options_are_checked(device: nnfmq.Device, options: dict[str, object], message: str) -> None:
    if message:
        with pytest.raises(nnfmq.InvalidArgument, match=message):
            device.prepare(ADD, runtime_options=options)
    else:
        device.prepare(ADD, runtime_options=options).close()


def test_options_of_sessions_are_taken(device: nnfmq.Device) -> None:
    options = {
        "threads": 2, "execution_mode": "ORT_PARALLEL", "graph_optimization_level": "ORT_DISABLE_ALL",
        "enable_cpu_mem_arena": False, "session_config_entries": {"session.set_denormal_as_zero": "1"},
        "providers": [["CPUExecutionProvider", {}]],
    }  # fmt: skip
    with device.prepare(ADD, runtime_options=options) as model:
        assert model.execute(np.float32([1, 2]))[0].tolist() == [2, 4]


OPENING = """
import sys
from nnfmq.hosted.adapter import HostedFile, OpenOptions
from nnfmq.hosted.onnxruntime import OnnxRuntimeDevice
OnnxRuntimeDevice().open(HostedFile("onnx", {"net.onnx": memoryview(sys.stdin.buffer.read())}), OpenOptions())
"""


def test_a_runtime_that_is_imported_keeps_no_telemetry(tmp_path: Path) -> None:
    """Outside of a sandbox, which would keep it from writing: by itself ONNX Runtime makes an id and a database."""
    places = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"} | places
    subprocess.run([sys.executable, "-c", OPENING], input=ADD, env=environment, timeout=60, check=True)
    assert list(tmp_path.rglob("*")) == []


def test_floats_are_private_if_an_operator_sorts_by_them() -> None:
    top = file_of([node("TopK", ["x", "k"], ["y", "i"])], [info("x", [4])], [info("y", [2])],
                  [onnx.helper.make_tensor("k", 7, [1], [2])])  # fmt: skip
    for content, is_private in ((top, True), (ADD, False)):
        opened = OnnxRuntimeDevice().open(HostedFile("onnx", {"net.onnx": memoryview(content)}), OpenOptions())
        assert opened.copies_floats is is_private


def test_floats_and_outputs_are_where_the_client_has_them() -> None:
    opened = OnnxRuntimeDevice().open(HostedFile("onnx", {"net.onnx": memoryview(ADD)}), OpenOptions())
    x, y = np.float32([1, 2]), np.zeros(2, np.float32)
    run = opened.bind([x], [y])
    run()
    for value in (3, 4):
        x[:] = value
        assert run() is None
        assert y.tolist() == [2 * value] * 2


# ---- external data


def external(name: str, location: str, size: int = 4) -> Any:
    tensor = onnx.TensorProto(name=name, data_type=1, dims=[size], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="length", value=str(4 * size))
    return tensor


def in_branch(constant: Any, initializers: Sequence[Any] = ()) -> bytes:
    """Return a model whose If has a node `Constant` and initializers in one branch, and nothing in the other."""
    first = [node("Constant", [], ["k"], value=constant)] if constant else []
    used = ["x", "k" if constant else "w"]
    then = onnx.helper.make_graph([*first, node("Add", used, ["t"])], "then", [], [info("t", [4])], initializers)
    other = onnx.helper.make_graph([node("Neg", ["x"], ["e"])], "else", [], [info("e", [4])])
    choice = node("If", ["b"], ["y"], then_branch=then, else_branch=other)
    return file_of([choice], [info("x", [4]), info("b", [], 9)], [info("y", [4])])


def in_graph(location: str) -> bytes:
    return file_of([node("Add", ["x", "w"], ["y"])], [info("x", [4])], [info("y", [4])], [external("w", location)])


FORMS = {
    "initializer": in_graph,
    "constant of a branch": lambda location: in_branch(external("", location)),
    "initializer of a branch": lambda location: in_branch(None, [external("w", location)]),
}


@pytest.mark.parametrize("form", FORMS)
def test_external_data_cross_with_the_model(device: nnfmq.Device, tmp_path: Path, form: str) -> None:
    (tmp_path / EXTERNAL).write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (tmp_path / "net.onnx").write_bytes(FORMS[form](EXTERNAL))
    with device.prepare(tmp_path / "net.onnx") as model:
        fed = {"x": floats(4), "b": np.array(True)}
        given = [fed[each.name] for each in model.inputs]
        assert_same(model.execute(*given), [fed["x"] + np.arange(4, dtype=np.float32)])
    with pytest.raises(nnfmq.InvalidArgument, match=f"has tensors in '{EXTERNAL}': give its path"):
        device.prepare(FORMS[form](EXTERNAL))


@pytest.mark.parametrize("location", ["../w.bin", "/etc/passwd", "a/b", "..", "*/_ORT_MEM_ADDR_/*"])
def test_names_outside_the_folder_are_refused(device: nnfmq.Device, tmp_path: Path, location: str) -> None:
    (tmp_path / "net.onnx").write_bytes(in_graph(location))
    with pytest.raises(nnfmq.InvalidArgument, match="only files of its own folder are read"):
        device.prepare(tmp_path / "net.onnx")


@pytest.mark.parametrize("location", [HERE, "/etc/passwd", "*/_ORT_MEM_ADDR_/*"])
@pytest.mark.parametrize("form", FORMS)
def test_a_driver_opens_no_file_that_a_model_names(
    device: nnfmq.Device, monkeypatch: pytest.MonkeyPatch, form: str, location: str
) -> None:
    monkeypatch.setattr("nnfmq.importers.hosted.companion_files", lambda *_: {})  # a client that gives no files
    with pytest.raises(nnfmq.InvalidArgument, match="which is not one of the files given"):
        device.prepare(FORMS[form](location))


# ---- bad files, deadlines


def test_bad_files_get_onnx_runtime_s_text_and_a_neighbour_runs_on(
    device: nnfmq.Device, tmp_path: Path, daemon: Daemon
) -> None:
    bad = {
        "cut.onnx": ADD[:-20],
        "empty.onnx": b"",
        "noise.onnx": random.bytes(200),
        "swapped.onnx": b"\0\0\0\0TFL3" * 9,
    }
    with daemon.connect(recover=False) as client, client.device("onnxruntime").prepare(ADD) as neighbour:
        for name, content in bad.items():
            (tmp_path / name).write_bytes(content)
            text = "runs onnx files" if name == "swapped.onnx" else "onnxruntime: |corrupt ONNX model"
            with pytest.raises(nnfmq.InvalidArgument, match=text):
                device.prepare(tmp_path / name)
        (tmp_path / "net.tflite").write_bytes(ADD)  # the content decides
        with device.prepare(tmp_path / "net.tflite") as model:
            for each in (model, neighbour):
                assert each.execute(np.float32([1, 2]))[0].tolist() == [2, 4]


def test_an_execution_ends_at_its_deadline_and_the_burst_goes_on(device: nnfmq.Device) -> None:
    body = onnx.helper.make_graph(
        [node("Identity", ["c"], ["d"]), node("Mul", ["a", "a"], ["b"])], "body",
        [info("i", [], 7), info("c", [], 9), info("a", [64])], [info("d", [], 9), info("b", [64])],
    )  # fmt: skip
    always = onnx.helper.make_tensor("t", 9, [], [True])
    content = file_of([node("Loop", ["n", "t", "x"], ["y"], body=body)], [info("n", [], 7), info("x", [64])],
                      [info("y", [64])], [always])  # fmt: skip
    x = np.ones(64, np.float32)
    with device.prepare(content, runtime_options=ONE_THREAD) as model, model.burst() as burst:
        for _ in range(2):
            with pytest.raises(nnfmq.MissedDeadline):
                burst.execute(np.int64(10**12), x, timeout=0.2)
            assert_same(burst.execute(np.int64(2), x, timeout=30), [x])
        with pytest.raises(nnfmq.MissedDeadline):
            model.execute(np.int64(10**12), x, timeout=0.2)
        assert_same(burst.execute(np.int64(2), x), [x])


def test_an_abort_that_comes_late_does_not_end_the_next_execution() -> None:
    opened = OnnxRuntimeDevice().open(HostedFile("onnx", {"net.onnx": memoryview(ADD)}), OpenOptions())
    y = np.zeros(2, np.float32)
    run = opened.bind([np.float32([1, 2])], [y])
    run()
    run.abort()
    with pytest.raises(Exception, match="terminate flag"):
        run()
    run.resume()
    y[:] = 0
    run()
    assert y.tolist() == [2, 4]
