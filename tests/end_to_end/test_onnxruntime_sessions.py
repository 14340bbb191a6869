"""Sessions of `nnfmq.compat.onnxruntime` beside those of ONNX Runtime: the same script has the same outcome."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, Process, wait_for_closers
from support.onnx_files import file_of
from support.onnx_runtime import onnx, runtime
from support.ort_scripts import (
    FED,
    RNG,
    S,
    Script,
    X,
    answer,
    assert_same,
    bound,
    index_model,
    nodes_of,
    outcome,
    rate_model,
    session,
    symbolic_model,
)

import nnfmq
import nnfmq.compat.onnxruntime as ours
from nnfmq.compat.onnxruntime import shape_plans
from nnfmq.hal.errors import UnsupportedModel


@pytest.fixture(autouse=True)
def _use_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
    yield
    wait_for_closers()


IMAGE = RNG.uniform(-2, 2, (1, 2, 3, 4)).astype(np.float32)
NARROW = {"a": np.uint8([200, 3, 7]), "b": np.uint8([100, 1, 2]), "x": np.float32([0.3, -500, 1e-4])}


def narrow_model() -> bytes:
    """Return a model of uint8 that wraps, and of a float that is rounded to float8."""
    make = onnx.helper.make_node
    nodes = [
        make("Add", ["a", "b"], ["sum"]),
        make("BitShift", ["sum", "b"], ["shifted"], direction="LEFT"),
        make("Cast", ["x"], ["short"], to=onnx.TensorProto.FLOAT8E4M3FN),
        make("Cast", ["short"], ["rounded"], to=onnx.TensorProto.FLOAT),
    ]
    return file_of(nodes, NARROW, ["sum", "shifted", "rounded"], opset=19)


def resizing_model() -> bytes:
    node = onnx.helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="cubic")
    return file_of([node], {"x": IMAGE, "scales": np.ones(4, np.float32)}, ["y"], opset=19)


def feed(**changed: Any) -> dict[str, Any]:
    return {**FED, **changed}


def run(*outputs: str, **changed: Any) -> Script:
    return lambda ort: list(session(ort).run(list(outputs), feed(**changed)))


def with_ort_values(ort: Any) -> Any:
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in FED.items()}
    return [value.numpy() for value in session(ort).run_with_ort_values(["z"], values)]


def _terminated(ort: Any) -> Any:
    options = ort.RunOptions()
    options.terminate = True
    return options


def _with_fixed_dimension(ort: Any) -> Any:
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name("N", 5)
    made = ort.InferenceSession(symbolic_model(), options)
    wrong = outcome(lambda _: made.run(None, FED), ort)
    return [made.get_inputs()[0].shape, made.run(["z"], feed(x=np.resize(X, (5, 3, 1)))), wrong]


def _metadata(ort: Any) -> Any:
    made = session(ort).get_modelmeta()
    names = "producer_name", "graph_name", "domain", "description", "graph_description", "version"
    return [[getattr(made, name) for name in names], made.custom_metadata_map]


def _assigned(ort: Any, **values: Any) -> Any:
    options = ort.SessionOptions()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _denoted(ort: Any, denotation: str) -> Any:
    """Return the shape of an input whose first dimension is a batch's, with a size for a denotation."""
    model = onnx.ModelProto.FromString(symbolic_model())
    model.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_denotation(denotation, 2)
    made = ort.InferenceSession(model.SerializeToString(), options)
    return [made.get_inputs()[0].shape, made.run(["z"], FED)]


RUNS: dict[str, Script] = {
    "all outputs": lambda ort: session(ort).run(None, FED),
    "no names": run(),
    "one output": run("z"),
    "an output twice": run("y", "y"),
    "a tuple of names": lambda ort: session(ort).run(("y",), FED),
    "a list as input": run("z", x=X.tolist()),
    "an OrtValue as input": lambda ort: session(ort).run(["z"], feed(x=ort.OrtValue.ortvalue_from_numpy(X))),
    "strided input": run("z", x=X[:, :, ::-1]),
    "one element for a scalar": run("z", s=S.reshape(1)),
    "OrtValues": with_ort_values,
    "int64 and rank 0": lambda ort: session(ort, index_model()).run(
        None, {"x": X[0].T[:, :1] * np.ones(5, np.float32) + np.arange(5, dtype=np.float32), "add": np.array(2**20)}
    ),
    "other shapes, and the first again": lambda ort: [
        made.run(["z"], feed(x=np.resize(X, shape)))[0]
        for made in [session(ort)]
        for shape in [(2, 3, 4), (1, 3, 2), (2, 3, 4)]
    ],
    "conditions and shapes by the values of inputs": lambda ort: [
        made.run(None, {"x": X[0], "rate": np.array(rate), "times": np.array(times)})[0]
        for made in [session(ort, rate_model())]
        for rate, times in [(8000, [1, 2]), (16000, [1, 2]), (16000, [3, 1]), (8000, [1, 2])]
    ],
    "integers of 8 bits, and floats rounded to 8": lambda ort: session(ort, narrow_model()).run(None, NARROW),
    "scales that are an input": lambda ort: [
        made.run(None, {"x": IMAGE, "scales": np.float32([1, 1, 2, scale])})[0].shape
        for made in [session(ort, resizing_model())]
        for scale in (1.5, 3)
    ],
    "described inputs": lambda ort: nodes_of(session(ort).get_inputs()),
    "described outputs": lambda ort: nodes_of(session(ort).get_outputs()),
    "described without sizes": lambda ort: nodes_of(session(ort, symbolic_model([-1, "?", None])).get_inputs()),
    "described with a fixed dimension": _with_fixed_dimension,
    "metadata": _metadata,
    "providers": lambda ort: [session(ort).get_providers(), session(ort).get_provider_options(), ort.get_device()],
    "a missing input": lambda ort: session(ort).run(None, {"x": X}),
    "a wrong input name": run(q=X),
    "a wrong output name": run("q"),
    "a wrong type": run(x=X.astype(np.float64)),
    "a wrong integer type": run(x=X.astype(np.int64)),
    "strings": run(x=np.array(["a"])),
    "a wrong rank": run(x=X[0]),
    "a wrong dimension": run(x=np.ones((2, 4, 4), np.float32)),
    "a number as input": run(s=2.0),
    "a NumPy scalar as input": run(s=np.float32(2)),
    "a list of inputs": lambda ort: session(ort).run(None, [X, S]),
    "terminate": lambda ort: session(ort).run(None, FED, _terminated(ort)),
    "no file": lambda ort: ort.InferenceSession("none.onnx"),
    "an empty model": lambda ort: ort.InferenceSession(b""),
    "neither path nor bytes": lambda ort: ort.InferenceSession(None),
    "a bytearray": lambda ort: ort.InferenceSession(bytearray(symbolic_model())),
    "an unknown configuration entry": lambda ort: ort.SessionOptions().get_session_config_entry("none"),
    "an unknown run entry": lambda ort: ort.RunOptions().get_run_config_entry("none"),
    "an empty configuration key": lambda ort: ort.SessionOptions().add_session_config_entry("", "1"),
    "a long configuration key": lambda ort: ort.SessionOptions().add_session_config_entry("k" * 1025, "1"),
    "a long configuration value": lambda ort: ort.SessionOptions().add_session_config_entry("k", "v" * 8193),
    "a number as configuration value": lambda ort: ort.SessionOptions().add_session_config_entry("k", 1),
    "an empty run key": lambda ort: ort.RunOptions().add_run_config_entry("", "1"),
    "a number as flag": lambda ort: _assigned(ort, enable_profiling=1).enable_profiling,
    "None as flag": lambda ort: _assigned(ort, enable_mem_reuse=None).enable_mem_reuse,
    "text as flag": lambda ort: _assigned(ort, enable_mem_reuse="yes"),
    "a number as level": lambda ort: _assigned(ort, graph_optimization_level=1),
    "levels beside numbers": lambda ort: [
        ort.GraphOptimizationLevel.ORT_ENABLE_ALL == 99,
        ort.ExecutionMode.ORT_PARALLEL != 1,
        {1: "parallel"}[ort.ExecutionMode.ORT_PARALLEL],
        ort.ExecutionMode.ORT_PARALLEL == ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ],
    "a dictionary as options": lambda ort: ort.InferenceSession(symbolic_model(), {"a": 1}),
    "a dictionary as run options": lambda ort: session(ort).run(None, FED, {"a": 1}),
    "a number as output name": lambda ort: session(ort).run([0], FED),
    "a list as OrtValue": lambda ort: ort.OrtValue.ortvalue_from_numpy([1.0]),
    "a scalar as OrtValue": lambda ort: ort.OrtValue.ortvalue_from_numpy(np.float32(1)),
    "an OrtValue of a negative size": lambda ort: ort.OrtValue.ortvalue_from_shape_and_type([-1], np.float32),
    "an OrtValue of no type": lambda ort: ort.OrtValue.ortvalue_from_shape_and_type([1], "nonsense"),
    "an OrtValue that gets another size": lambda ort: ort.OrtValue.ortvalue_from_numpy(X).update_inplace(X[0]),
    "an OrtValue that gets another type": lambda ort: ort.OrtValue.ortvalue_from_numpy(X).update_inplace(
        ort.OrtValue.ortvalue_from_numpy(X.astype(np.int32))
    ),
    "an OrtValue of an array": lambda ort: ort.OrtValue(X),
    "an OrtValue of nothing": lambda ort: ort.OrtValue(None),
    "an OrtValue of another's tensor": lambda ort: ort.OrtValue(ort.OrtValue.ortvalue_from_numpy(X)._ortvalue).numpy(),
    "a list as OrtValue of a type": lambda ort: ort.OrtValue.ortvalue_from_numpy_with_onnx_type([1.0], 1),
    "an OrtValue of a type of another size": lambda ort: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(X, 11),
    "arrays for OrtValues": lambda ort: session(ort).run_with_ort_values(["z"], FED),
    "a list bound as an array": lambda ort: session(ort).io_binding().bind_cpu_input("x", X.tolist()),
    "a number bound as an array": lambda ort: session(ort).io_binding().bind_cpu_input("x", X[0, 0]),
    "an array bound as OrtValue": lambda ort: session(ort).io_binding().bind_ortvalue_input("x", X),
    "an array bound as OrtValue of an output": lambda ort: session(ort).io_binding().bind_ortvalue_output("z", X),
    "arrays in a vector of OrtValues": lambda ort: ort.capi.onnxruntime_pybind11_state.OrtValueVector().push_back(
        [1.0]
    ),
    "a list that updates an OrtValue": lambda ort: ort.OrtValue.ortvalue_from_numpy(X).update_inplace([1.0]),
    "files in memory without lengths": lambda ort: ort.SessionOptions().add_external_initializers_from_files_in_memory(
        ["a"], [b"x"], []
    ),
    "provider options that are no sequence": lambda ort: _with_providers(ort, ["CPUExecutionProvider"], 7),
    "provider options that are no dictionaries": lambda ort: _with_providers(ort, ["CPUExecutionProvider"], ["a"]),
    "more provider options than providers": lambda ort: _with_providers(ort, ["CPUExecutionProvider"], [{}, {}]),
    "provider options beside pairs": lambda ort: _with_providers(ort, [("CPUExecutionProvider", {})], [{}]),
    "a dimension by its denotation": lambda ort: _denoted(ort, "DATA_BATCH"),
    "a dimension by another denotation": lambda ort: _denoted(ort, "DATA_CHANNEL"),
}


def _with_providers(ort: Any, providers: Any, options: Any) -> Any:
    return ort.InferenceSession(symbolic_model(), providers=providers, provider_options=options).get_providers()


NO_ELEMENTS = {
    "complex64": np.complex64, "complex128": np.complex128, "long double": np.longdouble, "times": "M8[s]",
    "strings": "U3", "objects": object, "bytes without a type": "V4",
}  # fmt: skip


def _bound_elements(ort: Any, array: Any) -> Any:
    made, binding = bound(ort, **feed(x=array))
    binding.bind_output("z")
    made.run_with_iobinding(binding)


@pytest.mark.parametrize("name", NO_ELEMENTS)
def test_elements_of_no_tensor_are_refused_as_by_onnx_runtime(name: str) -> None:
    array = np.zeros(X.shape, NO_ELEMENTS[name])
    scripts: list[Script] = [
        lambda ort: ort.OrtValue.ortvalue_from_numpy(array),
        lambda ort: ort.OrtValue.ortvalue_from_shape_and_type([1], array.dtype),
        run("z", x=array),
        lambda ort: _bound_elements(ort, array),
        lambda ort: session(ort).io_binding().bind_input("x", "cpu", 0, array.dtype, X.shape, X.ctypes.data),
    ]
    for script in scripts:
        assert answer(lambda script=script: script(ours)) == answer(lambda script=script: script(runtime))


@pytest.mark.parametrize("number", [0, 14, 15])
def test_numbers_of_no_element_type_are_refused_as_by_onnx_runtime(number: int) -> None:
    scripts: list[Script] = [
        lambda ort: ort.OrtValue.ortvalue_from_shape_and_type([1], number),
        lambda ort: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(X, number),
    ]
    for script in scripts:
        assert answer(lambda script=script: script(ours)) == answer(lambda script=script: script(runtime))


@pytest.mark.parametrize("name", RUNS)
def test_a_script_has_the_outcome_that_it_has_with_onnx_runtime(name: str) -> None:
    script = RUNS[name]
    assert_same(outcome(script, ours), outcome(script, runtime))


def test_classes_of_errors_at_load_are_onnx_runtime_s(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("hello world")
    (tmp_path / "cut.onnx").write_bytes(symbolic_model()[:-20])
    (tmp_path / "text.tflite").write_bytes(b"\x1c\0\0\0TFL3" + bytes(40))
    for path in [*tmp_path.iterdir(), tmp_path]:
        kinds = [outcome(lambda ort, path=path: ort.InferenceSession(path), ort) for ort in (ours, runtime)]
        assert kinds[0] == kinds[1] and kinds[0][0] == "InvalidProtobuf", path


def test_an_ort_file_is_refused_with_the_reason() -> None:
    with pytest.raises(ours.onnxruntime_pybind11_state.NotImplemented, match=r"\(\.ort\)"):
        ours.InferenceSession(b"\x18\0\0\0ORTM" + bytes(40))


def test_a_model_of_another_domain_is_rejected_as_by_onnx_runtime() -> None:
    model = onnx.ModelProto.FromString(symbolic_model())
    model.opset_import[0].domain = "ai.onnx.ml"
    content = model.SerializeToString()
    assert_same(*(outcome(lambda ort: session(ort, content), ort) for ort in (ours, runtime)))


def model_of(size: int | str, *nodes: Any, function: Any = None) -> bytes:
    """Return a model of `nodes`, from x of the shape (size, 3, 3) to y."""
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in (("", 18), ("acme", 1))]
    x, y = (onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", [size, 3, 3]), ("y", None)))
    graph = onnx.helper.make_graph(nodes, "g", [x], [y])
    functions = [] if function is None else [onnx.helper.make_function("acme", "Double", *function, opsets[:1])]
    content: bytes = onnx.helper.make_model(graph, opset_imports=opsets, functions=functions).SerializeToString()
    return content


@pytest.mark.parametrize("size", [1, "n"])
def test_an_operator_that_neither_engine_has_is_rejected_when_the_model_is_loaded(size: int | str) -> None:
    model = model_of(size, onnx.helper.make_node("Double", ["x"], ["y"], domain="acme"))
    with pytest.raises(ours.onnxruntime_pybind11_state.Fail, match="acme:Double") as raised:
        ours.InferenceSession(model)
    with pytest.raises(runtime.capi.onnxruntime_pybind11_state.Fail, match=re.escape(str(raised.value).rstrip())):
        runtime.InferenceSession(model)
    assert "operator 0 (acme.Double): is not supported" in str(raised.value.__cause__)


@pytest.mark.parametrize("operator", ["RandomUniformLike", "acme.Double"])
@pytest.mark.parametrize("size", [1, "n"])
def test_an_operator_that_is_not_supported_is_refused_when_the_model_is_imported(
    size: int | str, operator: str
) -> None:
    domain, _, name = operator.rpartition(".")
    with pytest.raises(UnsupportedModel, match=rf"operator 0 \({operator}\): is not supported"):
        nnfmq.load(model_of(size, onnx.helper.make_node(name, ["x"], ["y"], domain=domain)))


NODE = onnx.helper.make_node
FUNCTION = (["a"], ["b"], [NODE("Add", ["a", "a"], ["b"])])


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model_of("n", NODE("Mish", ["x"], ["y"])), id="defined by a function"),
        pytest.param(model_of("n", NODE("Double", ["x"], ["y"], domain="acme"), function=FUNCTION), id="a function"),
        pytest.param(
            model_of("n", NODE("Shape", ["x"], ["s"]), NODE("NonZero", ["s"], ["z"]), NODE("Cast", ["z"], ["y"], to=1)),
            id="folded",
        ),
        pytest.param(
            model_of("n", NODE("Relu", ["x"], ["y"]), NODE("RandomUniformLike", ["x"], ["unread"])), id="not read"
        ),
    ],
)
def test_a_model_of_unknown_shapes_is_loaded_if_sizes_may_make_it_one_that_is_supported(model: bytes) -> None:
    fed = {"x": RNG.normal(size=(2, 3, 3)).astype(np.float32)}
    found, wanted = (module.InferenceSession(model).run(None, fed)[0] for module in (ours, runtime))
    np.testing.assert_allclose(found, wanted, rtol=2e-5)


def test_an_int64_beyond_int32_is_computed() -> None:
    fed = {"x": np.ones((1, 5), np.float32), "add": np.array(2**40)}
    assert_same(*(session(module, index_model()).run(None, fed) for module in (ours, runtime)))


def test_an_error_of_an_execution_has_onnx_runtime_s_class_and_text() -> None:
    gather = onnx.helper.make_node("Gather", ["x", "i"], ["y"])
    content = file_of([gather], {"x": X, "i": np.int64([1])}, ["y"])
    made, peer = session(ours, content), session(runtime, content)
    fed = {"x": X, "i": np.int64([1])}
    assert_same(made.run(None, fed), peer.run(None, fed))
    for index in (9, 2**31):  # the driver's own engine refuses it when it executes, and before
        fed["i"] = np.int64([index])
        wanted = answer(lambda: peer.run(None, fed))
        assert "InvalidArgument: [ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status" in wanted
        assert [answer(lambda: made.run(None, fed)) for _ in range(2)] == [wanted] * 2


def test_an_input_without_elements_has_onnx_runtime_s_results() -> None:
    fed = feed(x=np.ones((0, 3, 4), np.float32))
    assert_same(session(ours).run(None, fed), session(runtime).run(None, fed))


def test_a_big_endian_input_is_converted() -> None:
    """ONNX Runtime 1.32 reads its bytes in the machine's order."""
    assert_same(session(ours).run(None, feed(x=X.astype(">f4"))), session(runtime).run(None, FED))


def test_an_exception_is_also_onnx_runtime_s_own() -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    with pytest.raises(InvalidArgument):
        session(ours).run(["q"], FED)


# ------------------------------------------------------------------------------------------------ bindings


def _bound_outputs(ort: Any) -> Any:
    made, binding = bound(ort, **FED)
    binding.bind_output("z")
    binding.bind_output("y", "cpu")
    made.run_with_iobinding(binding)
    copies = binding.copy_outputs_to_cpu()
    values = binding.get_outputs()
    return [copies, [[value.data_type(), value.shape(), value.device_name(), value.numpy()] for value in values]]


def _memory_of_the_caller(ort: Any) -> Any:
    made = session(ort)
    binding, x, z = made.io_binding(), X.copy(), np.zeros_like(X)
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_ortvalue_input("s", ort.OrtValue.ortvalue_from_numpy(S))
    binding.bind_output("z", "cpu", 0, np.float32, z.shape, z.ctypes.data)
    made.run_with_iobinding(binding)
    first = z.copy()
    x *= 2
    binding.synchronize_inputs()
    made.run_with_iobinding(binding)
    binding.synchronize_outputs()
    return [first, z]


def _tensor_as_output(ort: Any) -> Any:
    made, binding = bound(ort, **FED)
    target = ort.OrtValue.ortvalue_from_shape_and_type([2, 3, 4], np.float32)
    binding.bind_ortvalue_output("y", target)
    made.run_with_iobinding(binding)
    return [target.numpy(), binding.get_outputs()[0].data_ptr() == target.data_ptr()]


def _bound_vector(ort: Any) -> Any:
    made, binding = bound(ort, **FED)
    binding.bind_output("z")
    made.run_with_iobinding(binding)
    values = binding.get_outputs_as_ortvaluevector()
    return [len(values), values[0].numpy(), values.element_type_at(0)]


def _run_with_vectors(ort: Any) -> Any:
    kind = ort.capi.onnxruntime_pybind11_state.OrtValueVector
    feeds, fetches = kind(), kind()
    feeds.reserve(2)
    for array in (S, X):
        feeds.push_back(ort.OrtValue.ortvalue_from_numpy(array)._ortvalue)
    device = ort.capi.onnxruntime_pybind11_state.OrtDevice
    cpu = device(device.cpu(), device.default_memory(), 0) if ort is runtime else None
    session(ort).run_with_ortvaluevector(ort.RunOptions(), ["s", "x"], feeds, ["z", "y"], fetches, [cpu, cpu])
    return [value.numpy() for value in fetches]


def _cleared(ort: Any) -> Any:
    made, binding = bound(ort, **FED)
    binding.bind_output("z")
    binding.clear_binding_outputs()
    binding.bind_output("y")
    made.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()


def _bound_wrongly(ort: Any) -> Any:
    made, binding = bound(ort, **feed(x=X.astype(np.float64)))
    binding.bind_output("z")
    return made.run_with_iobinding(binding)


def _without_outputs(ort: Any) -> Any:
    made, binding = bound(ort, **FED)
    return made.run_with_iobinding(binding)


BINDINGS: dict[str, Script] = {
    "new outputs": _bound_outputs,
    "memory of the caller": _memory_of_the_caller,
    "a tensor as output": _tensor_as_output,
    "cleared": _cleared,
    "outputs as a vector": _bound_vector,
    "vectors as inputs and outputs": _run_with_vectors,
    "a wrong type": _bound_wrongly,
    "no outputs": _without_outputs,
    "a wrong name": lambda ort: bound(ort, q=X),
    "another session's": lambda ort: session(ort).run_with_iobinding(bound(ort)[1]),
    "memory without a shape": lambda ort: session(ort).io_binding().bind_output("z", buffer_ptr=1),
    "another device": lambda ort: ort.OrtValue.ortvalue_from_numpy(X, "cuda", 0),
    "an unknown device": lambda ort: ort.OrtDevice.make("abacus", 0),
}


@pytest.mark.parametrize("name", BINDINGS)
def test_a_binding_has_the_outcome_that_it_has_with_onnx_runtime(name: str) -> None:
    script = BINDINGS[name]
    assert_same(outcome(script, ours), outcome(script, runtime))


def test_a_tensor_of_another_shape_cannot_be_an_output() -> None:
    made, binding = bound(ours, **FED)
    binding.bind_ortvalue_output("y", ours.OrtValue.ortvalue_from_shape_and_type([2, 3, 5], 1))
    with pytest.raises(RuntimeError, match=r"'y' has shape {2,3,5} but the computed.* is {2,3,4}"):
        made.run_with_iobinding(binding)


# ------------------------------------------------------------------------------------------------ time, threads, death


def test_run_async_calls_back_with_the_outputs_or_the_error() -> None:
    made, calls, done = session(ours), [], threading.Event()

    def callback(*arguments: Any) -> None:
        calls.append(arguments)
        done.set()

    made.run_async(["z"], FED, callback, "mine")
    assert done.wait(30)
    done.clear()
    made.run_async(None, feed(x=X[0]), callback, 3)
    assert done.wait(30)
    (results, mine, nothing), (none, three, text) = calls
    assert_same(results, runtime_result(["z"]))
    assert (mine, nothing, none, three) == ("mine", "", [], 3)
    assert text.startswith("Invalid rank for input: x Got: 2 Expected: 3")


def runtime_result(names: list[str]) -> Any:
    return session(runtime).run(names, FED)


def test_threads_share_a_session() -> None:
    made, wanted, found = session(ours), runtime_result(["z"]), []

    def run_often() -> None:
        found.extend(made.run(["z"], FED) for _ in range(20))

    threads = [threading.Thread(target=run_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for results in found:
        assert_same(results, wanted)


def test_a_session_keeps_as_many_shapes_prepared_as_it_may(daemon: Daemon) -> None:
    made = session(ours)
    for size in range(1, shape_plans.MAX_PLANS + 4):
        made.run(["z"], feed(x=np.ones((1, 3, size), np.float32)))
    assert len(made._plans._plans) == shape_plans.MAX_PLANS
    assert_same(made.run(["z"], feed(x=np.ones((1, 3, 1), np.float32))), [np.full((1, 3, 1), 3, np.float32)])


def test_a_session_goes_on_after_the_driver_s_death() -> None:
    made = session(ours)
    wanted = made.run(["z"], FED)
    for _ in range(2):
        client = made._plans._share.client()
        with Process(client.worker_pid) as worker:
            worker.kill()
            worker.wait_for_end()
        assert_same(made.run(["z"], FED), wanted)


def test_a_driver_that_is_killed_while_threads_run_costs_no_result() -> None:
    made, found, begun = session(ours), [], threading.Semaphore(0)

    def run_often() -> None:
        for _ in range(200):
            found.append(made.run(["z"], FED)[0])
            begun.release()

    threads = [threading.Thread(target=run_often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        begun.acquire()
    os.kill(made._plans._share.client().worker_pid, 9)
    for thread in threads:
        thread.join()
    wanted = runtime_result(["z"])[0]
    assert len(found) == 400
    for result in found:
        assert_same(result, wanted)


def test_a_profile_has_the_events_of_onnx_runtime_but_those_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.onnx").write_bytes(symbolic_model())
    for given in (symbolic_model(), "model.onnx"):
        found = []
        for ort in (ours, runtime):
            options = _assigned(ort, enable_profiling=True, profile_file_prefix=f"{ort.__name__}_profile")
            made = ort.InferenceSession(given, options)
            assert made.get_profiling_start_time_ns() > 0
            for _ in range(3):
                made.run(None, FED)
            name = made.end_profiling()
            assert re.fullmatch(rf"{ort.__name__}_profile_\d{{4}}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{{3}}\.json", name)
            events = [event for event in json.loads(Path(name).read_text()) if event["cat"] == "Session"]
            assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
            found.append([event["name"] for event in events])
        assert found[0] == found[1]
    assert session(ours).end_profiling() == ""


def test_a_profile_may_end_while_another_thread_runs_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = _assigned(ours, enable_profiling=True, profile_file_prefix=str(tmp_path / "profile"))
    made = ours.InferenceSession(symbolic_model(), options)
    execute = shape_plans.ShapePlan.execute

    def end_and_execute(plan: shape_plans.ShapePlan, *arguments: Any) -> Any:
        made.end_profiling()
        return execute(plan, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shape_plans.ShapePlan, "execute", end_and_execute)
        assert len(made.run(None, FED)) == len(made.get_outputs())


def test_a_session_without_spinning_has_bursts_that_do_not_poll() -> None:
    options = ours.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    made = ours.InferenceSession(symbolic_model((2, 3, 4)), options)
    assert_same(made.run(["z"], FED), runtime_result(["z"]))
    windows = [made._plans.get(((2, 3, 4), ()))._free[0]._window_ns, session(ours)._options.polling_window_us]
    assert windows == [0, None]


def test_unknown_providers_are_reported_and_ignored() -> None:
    with pytest.warns(UserWarning, match="'CUDAExecutionProvider' is not in available provider names"):
        made = ours.InferenceSession(symbolic_model(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert made.get_providers() == ["CPUExecutionProvider"]
    for providers, options in [({"a"}, None), ([3], None), (["CPUExecutionProvider"], []), ([("a", {})], [{}])]:
        with pytest.raises(ValueError, match="provider"):
            ours.InferenceSession(symbolic_model(), None, providers, options, enable_fallback=0)


def test_an_input_array_may_change_after_the_run() -> None:
    x = RNG.uniform(0, 1, (2, 3, 4)).astype(np.float32)
    made = session(ours)
    (first,) = made.run(["y"], feed(x=x))
    kept = first.copy()
    x[:] = 9
    made.run(["y"], feed(x=x))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_if_on_a_computed_condition_runs_in_the_driver(sign: int) -> None:
    helper, y = onnx.helper, onnx.helper.make_empty_tensor_value_info("b")
    branches = {
        name: helper.make_graph([helper.make_node(operator, ["x", "sizes"], ["b"])], name, [], [y])
        for name, operator in (("then_branch", "Mul"), ("else_branch", "Sub"))
    }
    nodes = [
        helper.make_node("Abs", ["x"], ["sizes"]),
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Greater", ["top", "zero"], ["condition"]),
        helper.make_node("If", ["condition"], ["y"], **branches),
    ]
    fed = {"x": sign * RNG.uniform(1, 2, (2, 3)).astype(np.float32)}
    content = file_of(nodes, fed, ["y"], {"zero": np.array(0, np.float32)})
    assert_same(session(ours, content).run(["y"], fed), session(runtime, content).run(["y"], fed))


def test_a_hosted_session_takes_the_entry_about_spinning_and_outlives_its_worker() -> None:
    nodes = [onnx.helper.make_node("NonMaxSuppression", ["boxes", "scores", "count"], ["found"])]
    fed = {
        "boxes": RNG.random((1, 6, 4), np.float32),
        "scores": RNG.random((1, 2, 6), np.float32),
        "count": np.array(3),
    }
    content = file_of(nodes, fed, ["found"])
    options = ours.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    made, peer = ours.InferenceSession(content, options), runtime.InferenceSession(content)
    wanted = peer.run(None, fed)
    assert_same(made.run(None, fed), wanted)
    os.kill(made._plans._share.client().worker_pid, 9)
    assert_same(made.run(None, fed), wanted)


@pytest.mark.full  # the loop takes longer than the HAL's limit, 2 s
def test_a_loop_that_takes_longer_than_the_hal_lets_it_runs_on_onnx_runtime() -> None:
    info, make = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    number, condition = info("i", onnx.TensorProto.INT64, []), info("c", onnx.TensorProto.BOOL, [])
    nodes = [
        make("Mul", ["v", "half"], ["less"]),
        make("Add", ["less", "x"], ["next"]),
        make("ReduceMax", ["next"], ["most"], keepdims=0),
        make("Less", ["most", "limit"], ["goes_on"]),
    ]
    values = [info(name, onnx.TensorProto.FLOAT, [3]) for name in ("v", "next")]
    goes_on = info("goes_on", onnx.TensorProto.BOOL, [])
    body = onnx.helper.make_graph(nodes, "body", [number, condition, values[0]], [goes_on, values[1]])
    constants = {"count": np.array(200_000), "half": np.float32(0.5), "limit": np.float32(9)}
    x = np.float32([1, 2, 3])
    content = file_of([make("Loop", ["count", "", "x"], ["y"], body=body)], {"x": x}, ["y"], constants)
    (found,) = ours.InferenceSession(content).run(None, {"x": x})
    np.testing.assert_allclose(found, 2 * x, 1e-6)
