"""Interpreters of `nnfmq.compat.litert` beside those of LiteRT: the same script has the same outcome."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, Process, until, wait_for_closers
from support.litert import litert
from support.litert_scripts import (
    IMAGES,
    INPUT,
    OUTPUT,
    RNG,
    WEIGHTS,
    Script,
    adding,
    assert_same,
    classify,
    digits,
    made,
    outcome,
)
from support.tflite_files import Operator, Tensor, single, writer

import nnfmq
import nnfmq.compat.litert as ours

ONE = IMAGES[:1]
BATCH = [2, 8, 8, 1]


@pytest.fixture(autouse=True)
def _use_daemon(_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Not `daemon`: after the shortest tests the daemon may still be about to start its compile server.
    monkeypatch.setenv("NNFMQ_SOCKET", str(_daemon.path))
    yield
    gc.collect()
    wait_for_closers()


def unallocated(lite: Any) -> Any:
    return lite.Interpreter(digits(), experimental_op_resolver_type=lite.OpResolverType.BUILTIN_REF)


def resized(lite: Any, shape: Any = BATCH, **options: Any) -> Any:
    found = made(lite)
    found.resize_tensor_input(INPUT, shape, **options)
    return found


def _views(lite: Any) -> Any:
    found = made(lite)
    source, sink = found.tensor(INPUT), found.tensor(OUTPUT)
    source()[0] = ONE[0]
    source()[0, 0] += 1
    found.invoke()
    return [sink().copy(), source().copy(), found.get_tensor(OUTPUT), source().flags.writeable]


def _held(lite: Any, call: str, *arguments: Any) -> Any:
    found = made(lite)
    array = found.tensor(INPUT)()[0, 1:]
    result = getattr(found, call)(*arguments)
    return [result, array.shape]


def _released(lite: Any) -> Any:
    found = made(lite)
    array = found.tensor(INPUT)()
    del array
    return classify(found, ONE)


def _batch(lite: Any) -> Any:
    found = resized(lite)
    shapes = [found.get_input_details()[0]["shape"], found.get_output_details()[0]["shape"]]
    found.allocate_tensors()
    return [*shapes, found.get_tensor_details(), classify(found, IMAGES)]


def _back(lite: Any) -> Any:
    found = resized(lite)
    found.resize_tensor_input(INPUT, [1, 8, 8, 1])
    found.allocate_tensors()
    return classify(found, ONE)


def _after_a_refused_shape(lite: Any) -> Any:
    found = resized(lite, [8, 8])
    raised = outcome(lambda _: found.allocate_tensors(), lite)
    found.resize_tensor_input(INPUT, [1, 8, 8, 1])
    found.allocate_tensors()
    return [raised, classify(found, ONE)]


def set_tensor(value: Any, index: Any = INPUT) -> Script:
    return lambda lite: made(lite).set_tensor(index, value)


RUNS: dict[str, Script] = {
    "a result": lambda lite: classify(made(lite), ONE),
    "a result of floats": lambda lite: classify(
        made(lite, str(nnfmq.example_path("digits.tflite"))), ONE.astype(np.float32)
    ),
    "bytes as model": lambda lite: classify(made(lite, Path(digits()).read_bytes()), ONE),
    "a Path as model": lambda lite: classify(made(lite, Path(digits())), ONE),
    "strided input": lambda lite: classify(made(lite), ONE[:, ::-1]),
    "inputs can be read": lambda lite: [made(lite).set_tensor(INPUT, ONE), classify(made(lite), ONE)],
    "constants can be read": lambda lite: made(lite).get_tensor(WEIGHTS),
    "constants before the allocation": lambda lite: unallocated(lite).get_tensor(WEIGHTS),
    "int64": lambda lite: classify_int64(lite, [2**40, -5]),
    "NumPy integers as index": lambda lite: made(lite).set_tensor(np.int64(INPUT), ONE),
    "allocated twice": lambda lite: [found.allocate_tensors() for found in [made(lite)] * 2],
    "views": _views,
    "a released view": _released,
    "a held view, invoke": lambda lite: _held(lite, "invoke"),
    "a held view, allocate": lambda lite: _held(lite, "allocate_tensors"),
    "a held view, resize": lambda lite: _held(lite, "resize_tensor_input", INPUT, BATCH),
    "a held view, set": lambda lite: _held(lite, "set_tensor", INPUT, ONE),
    "a held view, reset": lambda lite: _held(lite, "reset_all_variables"),
    "a view before the allocation": lambda lite: unallocated(lite).tensor(INPUT)(),
    "a function of no tensor": lambda lite: made(lite).tensor(99)(),
    "a batch": _batch,
    "resized and back": _back,
    "resized to what it is": lambda lite: classify(resized(lite, [1, 8, 8, 1], strict=True), ONE),
    "a refused shape": _after_a_refused_shape,
    "resized strictly": lambda lite: resized(lite, strict=True),
    "resized to another rank, strictly": lambda lite: resized(lite, [8, 8], strict=True),
    "resized, not allocated, invoked": lambda lite: resized(lite).invoke(),
    "resized, not allocated, set": lambda lite: resized(lite).set_tensor(INPUT, IMAGES),
    "resized, not allocated, read": lambda lite: resized(lite).get_tensor(INPUT),
    "resized, not allocated, output read": lambda lite: resized(lite).get_tensor(OUTPUT).shape,
    "resized to a matrix": lambda lite: resized(lite, [BATCH]),
    "resized to text": lambda lite: resized(lite, "a"),
    "resized to a negative size": lambda lite: resized(lite, [-1, 8, 8, 1]),
    "resized, no tensor": lambda lite: made(lite).resize_tensor_input(99, [1]),
    "set before the allocation": lambda lite: unallocated(lite).set_tensor(INPUT, ONE),
    "read before the allocation": lambda lite: unallocated(lite).get_tensor(INPUT),
    "invoked before the allocation": lambda lite: unallocated(lite).invoke(),
    "another type": set_tensor(ONE.astype(np.float32)),
    "a list": set_tensor([1, 2]),
    "text": set_tensor("a"),
    "nothing": set_tensor(None),
    "another rank": set_tensor(ONE[0]),
    "another shape": set_tensor(ONE[:, 1:]),
    "no tensor": set_tensor(ONE, 99),
    "a negative index": set_tensor(ONE, -1),
    "an index that is text": set_tensor(ONE, "0"),
    "an index that is a float": set_tensor(ONE, 0.0),
    "no tensor read": lambda lite: made(lite).get_tensor(99),
    "no subgraph read": lambda lite: made(lite).get_tensor(0, 1),
    "details of no tensor": lambda lite: made(lite)._get_tensor_details(99, 0),
    "details of no subgraph": lambda lite: made(lite).get_tensor_details(1),
    "details of no operator": lambda lite: made(lite)._get_op_details(99),
    "subgraphs": lambda lite: made(lite).num_subgraphs(),
    "is safe": lambda lite: made(lite)._safe_to_run(),
    "an option without effect": lambda lite: made(lite).experimental_compress_quantization_zero_points,
    "no signatures": lambda lite: made(lite).get_signature_list(),
    "the only signature of none": lambda lite: made(lite).get_signature_runner(),
    "an unknown signature": lambda lite: made(lite).get_signature_runner("x"),
    "a runner of nothing": lambda lite: lite.SignatureRunner(),
    "a runner without key": lambda lite: lite.SignatureRunner(made(lite)),
    "neither path nor bytes": lambda lite: lite.Interpreter(),
    "path and bytes": lambda lite: lite.Interpreter(digits(), b"x"),
    "no file": lambda lite: lite.Interpreter("none.tflite"),
    "a folder": lambda lite: lite.Interpreter("/"),
    "no model": lambda lite: lite.Interpreter(model_content=b"no model" * 50),
    "a cut model": lambda lite: lite.Interpreter(model_content=Path(digits()).read_bytes()[:-500]),
    "bytes of no bytes": lambda lite: lite.Interpreter(model_content=b""),
    "a string as bytes": lambda lite: lite.Interpreter(model_content="abc"),
    "a number as path": lambda lite: lite.Interpreter(3),
    "no threads": lambda lite: lite.Interpreter(digits(), num_threads=0),
    "half a thread": lambda lite: lite.Interpreter(digits(), num_threads=0.5),
    "threads": lambda lite: classify(made(lite, num_threads=4), ONE),
    "an unknown resolver": lambda lite: lite.Interpreter(digits(), experimental_op_resolver_type=1),
    "what is no delegate": lambda lite: lite.Interpreter(digits(), experimental_delegates=[None]),
}  # fmt: skip


def classify_int64(lite: Any, values: list[int]) -> Any:
    found = made(lite, adding())
    found.set_tensor(0, np.array(values, np.int64))
    found.invoke()
    return [found.get_tensor(2), found.get_output_details()]


@pytest.mark.parametrize("name", RUNS)
def test_a_script_has_the_outcome_that_it_has_with_litert(name: str) -> None:
    script = RUNS[name]
    assert_same(outcome(script, ours), outcome(script, litert))


def models(data_dir: Path) -> list[Path]:
    """Return the models of the data folder that LiteRT loads."""
    found = sorted((data_dir / "models").rglob("*.tflite"))
    return [path for path in found if path.name != "person_detect.tflite"]


def described(interpreter: Any, count: int) -> list[Any]:
    """Return all that an interpreter says of a file; LiteRT appends scratch tensors to the file's `count`."""
    return [
        interpreter.get_input_details(),
        interpreter.get_output_details(),
        interpreter.get_tensor_details()[:count],
        interpreter._get_ops_details(),
        interpreter.get_signature_list(),
        interpreter._get_full_signature_list(),
        interpreter.num_subgraphs(),
    ]


def drawn(details: Any) -> Any:
    """Return a random value for a tensor."""
    dtype = np.dtype(details["dtype"])
    if dtype.kind == "f":
        return RNG.uniform(-1, 1, details["shape"]).astype(dtype)
    return RNG.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, details["shape"], dtype, endpoint=True)


@pytest.mark.full
def test_details_of_all_models_are_litert_s_before_and_after_the_allocation(data_dir: Path) -> None:
    for path in models(data_dir):
        both = [unallocated_of(lite, path) for lite in (ours, litert)]
        count = len(both[0].get_tensor_details())
        assert_same(*[described(found, count) for found in both], where=path.name)
        for found in both:
            found.allocate_tensors()
        assert_same(*[described(found, count) for found in both], where=path.name)


def unallocated_of(lite: Any, path: Path) -> Any:
    return lite.Interpreter(str(path), experimental_op_resolver_type=lite.OpResolverType.BUILTIN_REF)


PER_CHANNEL_STEPS = 16
"""How far the results of MobileNet v2 with scales per channel may be apart: the HAL multiplies scales in float32."""


@pytest.mark.full
def test_results_of_all_models_are_litert_s_step_after_step(data_dir: Path) -> None:
    for path in models(data_dir):
        mine, theirs = [made(lite, str(path)) for lite in (ours, litert)]
        for _ in range(2):
            for details in theirs.get_input_details():
                value = drawn(details)
                for found in (mine, theirs):
                    found.set_tensor(details["index"], value)
            mine.invoke()
            theirs.invoke()
            for details in theirs.get_output_details():
                results = [found.get_tensor(details["index"]) for found in (mine, theirs)]
                if "per_channel" in path.name:
                    apart = np.abs(results[0].astype(int) - results[1])
                    assert apart.max() <= PER_CHANNEL_STEPS, path.name
                else:
                    assert_same(*results, where=path.name)


def test_intermediate_results_are_litert_s_if_they_are_preserved() -> None:
    both = [made(lite, experimental_preserve_all_tensors=True) for lite in (ours, litert)]
    for found in both:
        classify(found, ONE)
    for index in range(13):
        assert_same(*[found.get_tensor(index) for found in both], where=str(index))


def test_only_inputs_are_resized() -> None:
    """LiteRT resizes results as well, and computes them in their own shapes."""
    found = made(ours)
    for index in (WEIGHTS, OUTPUT):
        with pytest.raises(ValueError, match=f"tensor {index} is no input of the model: only inputs can be resized"):
            found.resize_tensor_input(index, [1])


def test_intermediate_results_that_are_not_preserved_are_refused() -> None:
    found = made(ours)
    with pytest.raises(ValueError, match="only with experimental_preserve_all_tensors"):
        found.get_tensor(1)
    with pytest.raises(ValueError, match="is a constant"):
        found.set_tensor(WEIGHTS, found.get_tensor(WEIGHTS))


def test_preserving_with_the_default_resolver_warns_as_litert() -> None:
    for lite in (ours, litert):
        with pytest.warns(UserWarning, match="experimental_preserve_all_tensors"):
            lite.Interpreter(digits(), experimental_preserve_all_tensors=True)


def test_delegates_are_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"delegate libedgetpu\.so\.1 is ignored"):
        delegate = ours.load_delegate("libedgetpu.so.1", {"device": "usb"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(classify(made(ours, experimental_delegates=[delegate]), ONE), classify(made(litert), ONE))


def test_registerers_of_custom_operators_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be called"):
        ours.InterpreterWithCustomOps(custom_op_registerers=["Register"], model_path=digits())
    assert ours.InterpreterWithCustomOps(model_path=digits()).num_subgraphs() == 1


def test_a_model_that_cannot_run_says_why_when_it_is_loaded() -> None:
    content = single("SPARSE_TO_DENSE", [Tensor("x", (2,)), Tensor("y", (2,))])
    with pytest.raises(ValueError, match=r"operator 0 \(SPARSE_TO_DENSE\)"):
        ours.Interpreter(model_content=content)


# ------------------------------------------------------------------------------------------------ signatures


@pytest.fixture
def sine(data_dir: Path) -> str:
    """Return the path of a model with a signature."""
    return str(data_dir / "models" / "micro" / "hello_world_float.tflite")


def _signature(lite: Any, path: str) -> Any:
    runner = made(lite, path).get_signature_runner()
    results = [runner(dense_input=np.full((size, 1), 0.5, np.float32)) for size in (1, 3, 1)]
    return [results, runner.get_input_details(), runner.get_output_details()]


def test_a_signature_is_litert_s(sine: str) -> None:
    assert_same(*[_signature(lite, sine) for lite in (ours, litert)])


@pytest.mark.parametrize("arguments", [{}, {"x": 1}, {"dense_input": [1.0]}, {"dense_input": np.ones((1, 1))}])
def test_wrong_arguments_of_a_signature_raise_as_in_litert(sine: str, arguments: Any) -> None:
    raised = [
        outcome(lambda lite: made(lite, sine).get_signature_runner()(**arguments), lite) for lite in (ours, litert)
    ]
    assert_same(*raised)


def two_signatures(variable: bool = False) -> bytes:
    """Return a model that doubles in its first subgraph and squares in its second one, or reads a variable there."""
    tensors = [Tensor("x", (1, 2)), Tensor("y", (1, 2))]
    double = Operator("ADD", (0, 0), (1,), "AddOptions", {"FusedActivationFunction": 0})
    half = Tensor("half", (1,), data=np.float32(0.5).tobytes())
    square = [
        Operator("MUL", (0, 0), (2,), "MulOptions", {"FusedActivationFunction": 0}),
        Operator("MUL", (2, 3), (1,), "MulOptions", {"FusedActivationFunction": 0}),
    ]
    rnn = [Tensor("w", (2, 2), data=np.eye(2, dtype=np.float32).tobytes()), Tensor("b", (2,), data=bytes(8)),
           Tensor("state", (1, 2), extra={"IsVariable": 1})]  # fmt: skip
    recurrent = Operator("RNN", (0, 2, 2, 3, 4), (1,), "RNNOptions", {"FusedActivationFunction": 0})
    second = writer.Subgraph([*tensors, Tensor("squared", (1, 2)), half], square, (0,), (1,))
    if variable:
        second = writer.Subgraph([*tensors, *rnn], [recurrent], (0,), (1,))
    keys = [writer.Signature(key, {"x": 0}, {"y": 1}, place) for place, key in enumerate(("double", "square"))]
    content: bytes = writer.write(tensors, [double], (0,), (1,), more=[second], signatures=keys)
    return content


def _two_signatures(lite: Any) -> Any:
    found = lite.Interpreter(model_content=two_signatures())
    double, square = (found.get_signature_runner(key) for key in ("double", "square"))
    results = []
    for value in (np.float32([[1, 2]]), np.float32([[3, 4], [5, 6]]), np.float32([[-1, 0]])):
        results += [square(x=value), double(x=value), square(x=value), found.get_tensor(3, 1)]
    return [results, square.get_input_details(), square.get_output_details(), found.num_subgraphs(),
            found.get_signature_list(), found.get_tensor_details(1)]  # fmt: skip


def test_signatures_of_all_subgraphs_are_litert_s() -> None:
    assert_same(*[_two_signatures(lite) for lite in (ours, litert)])


def _other_variables(lite: Any) -> Any:
    interpreter = lite.Interpreter(model_content=two_signatures(variable=True))
    double, recurrent = (interpreter.get_signature_runner(key) for key in ("double", "square"))
    results = []
    for _ in range(2):
        results += [recurrent(x=np.float32([[1, 2]])), double(x=np.float32([[3, 4]])), interpreter.get_tensor(4, 1)]
        results.append(recurrent(x=np.float32([[1, 2]])))
        interpreter.reset_all_variables()
    return results


def test_variables_of_another_subgraph_are_litert_s() -> None:
    assert_same(*[_other_variables(lite) for lite in (ours, litert)])


# ------------------------------------------------------------------------------------------------ states, death


@pytest.fixture
def speech(data_dir: Path) -> str:
    """Return the path of a model with states."""
    return str(data_dir / "models" / "tts_float.tflite")


def _steps(lite: Any, path: str, between: str = "") -> list[Any]:
    found, results = made(lite, path), []
    values = np.random.default_rng(5).uniform(-1, 1, (3, 1, 334)).astype(np.float32)
    output = found.get_output_details()[0]["index"]
    for value in values:
        found.set_tensor(0, value)
        found.invoke()
        results.append(found.get_tensor(output))
        if between:
            getattr(found, between)()
    return results


@pytest.mark.parametrize("between", ["", "reset_all_variables", "allocate_tensors"])
def test_states_are_kept_and_reset_as_in_litert(speech: str, between: str) -> None:
    assert_same(*[_steps(lite, speech, between) for lite in (ours, litert)])


def test_variables_can_be_read_and_set(speech: str) -> None:
    found = made(ours, speech)
    (variable, *_) = found._allocation.variables
    before = found.get_tensor(variable)
    found.set_tensor(0, np.ones((1, 334), np.float32))
    found.invoke()
    after = found.get_tensor(variable)
    assert not before.any() and after.any()
    found.set_tensor(variable, before)
    assert_same(found.get_tensor(variable), before)


def kill_driver(interpreter: Any) -> None:
    client = interpreter._share.client()
    client.devices()  # connects again: after another death, the CPU may have executed without the driver
    with Process(client.worker_pid) as worker:
        worker.kill()
        worker.wait_for_end()


def test_an_interpreter_goes_on_after_the_driver_s_death_with_its_states(speech: str) -> None:
    found, output, results = made(ours, speech), 71, []
    values = np.random.default_rng(5).uniform(-1, 1, (3, 1, 334)).astype(np.float32)
    for value in values:
        found.set_tensor(0, value)
        kill_driver(found)
        found.invoke()
        results.append(found.get_tensor(output))
    assert_same(results, _steps(litert, speech))


def test_a_driver_that_dies_in_the_middle_costs_no_result() -> None:
    found, begun = made(ours), threading.Event()
    wanted, results = classify(found, ONE), []

    def run_often() -> None:
        for _ in range(300):
            begun.set()
            results.append(classify(found, ONE))

    thread = threading.Thread(target=run_often)
    thread.start()
    begun.wait(30)
    kill_driver(found)
    thread.join()
    assert len(results) == 300
    for result in results:
        assert_same(result, wanted)


def test_without_a_driver_runtime_errors_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise nnfmq.DeviceUnavailable("no driver listens")

    monkeypatch.setattr("nnfmq.compat.shared_client.connect", refuse)
    with pytest.raises(RuntimeError, match="no driver listens"):
        made(ours)


def test_an_interpreter_that_is_collected_releases_its_part_of_the_driver() -> None:
    other, found = made(ours), made(ours)
    burst, model = found._allocation._burst, found._allocation._model
    del found
    gc.collect()
    until(lambda: not model.handle.is_open and not burst.outputs, "the model and the burst are closed")
    assert_same(classify(other, ONE), classify(made(litert), ONE))


def test_a_view_outlives_its_interpreter() -> None:
    view = made(ours).tensor(INPUT)()
    gc.collect()
    view[...] = 3
    assert view.sum() == 3 * 64


def test_operations_have_tflite_s_definition_where_the_hal_s_is_another_one() -> None:
    """The HAL rounds a mean down."""
    tensors = [
        Tensor("x", (4, 50), "INT8", scales=(0.1,), zero_points=(3,)),
        Tensor("axes", (1,), "INT32", np.array([1], np.int32).tobytes()),
        Tensor("y", (4,), "INT8", scales=(0.1,), zero_points=(3,)),
    ]
    content = single("MEAN", tensors, "ReducerOptions", {})
    values = np.arange(200, dtype=np.int16).reshape(4, 50) % 97
    found = []
    for lite in (litert, ours):
        runner = lite.Interpreter(model_content=content, experimental_op_resolver_type=lite.OpResolverType.BUILTIN_REF)
        runner.allocate_tensors()
        runner.set_tensor(runner.get_input_details()[0]["index"], values.astype(np.int8))
        runner.invoke()
        found.append(runner.get_tensor(runner.get_output_details()[0]["index"]))
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[1], values.sum(axis=1) // 50)
