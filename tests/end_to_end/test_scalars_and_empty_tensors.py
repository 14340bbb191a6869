"""Tensors of rank 0, tensors without elements, and outputs that nothing computes, in each way to execute a model.

ONNX Runtime is the oracle of the ONNX models, LiteRT that of the .tflite files: values, shapes and types are equal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, Process
from support.onnx_files import file_of
from support.onnx_runtime import onnx
from support.oracles import Array
from support.tflite_files import Operator, writer
from support.unusual_shapes import CASES, NONE, SCALAR, ShapeCase, X, ints, make, one, wanted
from support.unusual_tflite_shapes import CASES as FILES
from support.unusual_tflite_shapes import FileCase, tensor, vector
from support.unusual_tflite_shapes import X as X_TENSOR

import nnfmq
import nnfmq.compat.litert as our_litert
import nnfmq.compat.onnxruntime as ours
from nnfmq.cli import main
from nnfmq.client.model.compiled_model import CompiledModel

litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")


@pytest.fixture(scope="module")
def path(_daemon: Daemon) -> Path:
    """Return the socket of a driver for all tests here: `daemon` would wait until no client is connected."""
    return _daemon.path


@pytest.fixture(scope="module")
def driver(path: Path) -> Iterator[nnfmq.Client]:
    """Return a client for all tests here."""
    with nnfmq.connect(path) as client:
        yield client


def by_all_forms(model: CompiledModel, inputs: Sequence[Array]) -> Iterator[tuple[Array, ...]]:
    """Yield the outputs of executions of each form."""
    yield model.execute(*inputs)
    with model.burst() as burst:
        yield burst.execute(*inputs)
        yield burst.execute(*inputs, out=[np.zeros(info.shape, info.dtype) for info in model.outputs])
        yield tuple(array.copy() for array in burst.execute(out=burst.outputs))
        yield asyncio.run(burst.execute_async(*inputs))
    with model.create_reusable_execution() as execution:
        yield execution.compute(*inputs)
        yield execution.compute()
        with execution.compute_fenced(*inputs) as launched:
            yield launched.result()
    yield model.execute_async(*inputs).result()
    with model.execute_fenced(*inputs) as launched:
        yield launched.result()


def assert_equal(found: Sequence[Array], expected: Sequence[Array]) -> None:
    assert [array.shape for array in found] == [array.shape for array in expected]
    for array, right in zip(found, expected, strict=True):
        assert array.dtype.kind == right.dtype.kind
        np.testing.assert_allclose(array, right, rtol=1e-5)


@pytest.mark.parametrize("device", ["compiled", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_form_of_execution_returns_what_onnx_runtime_does(
    driver: nnfmq.Client, case: ShapeCase, device: str
) -> None:
    loaded = nnfmq.load(case.content())
    assert [info.shape for info in loaded.outputs] == [array.shape for array in wanted(case)]
    with driver.device(device).prepare(loaded) as model:
        for outputs in by_all_forms(model, list(case.fed.values())):
            assert_equal(outputs, wanted(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_session_returns_what_onnx_runtime_does(path: Path, monkeypatch: pytest.MonkeyPatch, case: ShapeCase) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(path))
    session = ours.InferenceSession(case.content())
    binding = session.io_binding()
    for name, array in case.fed.items():
        binding.bind_cpu_input(name, array)
    for name in case.outputs:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    for found in (session.run(None, dict(case.fed)), binding.copy_outputs_to_cpu()):
        assert [array.dtype for array in found] == [array.dtype for array in wanted(case)]
        assert_equal(found, wanted(case))


BOUND = [
    one("a shape", "ConstantOfShape", ints(2, 3)),
    one("an empty shape", "ConstantOfShape", ints(0, 3)),
    one("a range", "Range", np.array(0), np.array(5), np.array(2)),
    one("what is not zero", "NonZero", ints(2, 0, 3)),
]


@pytest.mark.parametrize("case", BOUND, ids=str)
def test_a_session_whose_inputs_are_all_bound_by_value_returns_the_known_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch, case: ShapeCase
) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(path))
    session = ours.InferenceSession(case.content())
    for _ in range(2):
        assert_equal(session.run(None, dict(case.fed)), wanted(case))


def test_results_are_the_same_after_the_driver_s_death(path: Path) -> None:
    nodes = [make("Exp", ["a"], ["y"]), make("Relu", ["b"], ["z"])]
    case = ShapeCase("a scalar and rows", nodes, {"a": SCALAR, "b": NONE}, ("y", "z"))
    inputs = list(case.fed.values())
    with nnfmq.connect(path) as client, client.prepare(nnfmq.load(case.content())) as model, model.burst() as burst:
        assert_equal(burst.execute(*inputs), wanted(case))
        with Process(client.worker_pid) as worker:
            worker.kill()
            worker.wait_for_end()
        assert_equal(burst.execute(*inputs), wanted(case))
        assert_equal(model.execute(*inputs), wanted(case))


@pytest.mark.parametrize("device", ["compiled", "reference"])
@pytest.mark.parametrize("case", FILES, ids=str)
def test_each_form_of_execution_returns_what_litert_does(driver: nnfmq.Client, case: FileCase, device: str) -> None:
    loaded, inputs = nnfmq.load(case.content()), case.draw()
    expected = by_litert(litert, case.content(), inputs)
    assert [info.shape for info in loaded.outputs] == [array.shape for array in expected]
    with driver.device(device).prepare(loaded) as model:
        for outputs in by_all_forms(model, inputs):
            assert_equal(outputs, expected)


@pytest.mark.parametrize("case", FILES, ids=str)
def test_an_interpreter_returns_what_litert_does(path: Path, monkeypatch: pytest.MonkeyPatch, case: FileCase) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(path))
    content, inputs = case.content(), case.draw()
    found, expected = by_litert(our_litert, content, inputs), by_litert(litert, content, inputs)
    assert [array.dtype for array in found] == [array.dtype for array in expected]
    assert_equal(found, expected)


def by_litert(module: Any, content: bytes, inputs: Sequence[Array]) -> list[Array]:
    """Return the outputs of an interpreter of LiteRT's interface; XNNPACK does not accept all models."""
    runner = module.Interpreter(model_content=content)
    try:
        runner.allocate_tensors()
    except RuntimeError:
        resolver = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        runner = module.Interpreter(model_content=content, experimental_op_resolver_type=resolver)
        runner.allocate_tensors()
    for detail, array in zip(runner.get_input_details(), inputs, strict=True):
        runner.set_tensor(detail["index"], array)
    runner.invoke()
    return [runner.get_tensor(detail["index"]) for detail in runner.get_output_details()]


@pytest.mark.parametrize("name", ["digits.tflite", "digits_quant.tflite"])
def test_inputs_can_be_resized_to_none_and_back(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(path))
    runners = [module.Interpreter(model_path=str(nnfmq.example_path(name))) for module in (our_litert, litert)]
    for batch in (0, 2, 0):
        found = []
        for runner in runners:
            given = runner.get_input_details()[0]
            runner.resize_tensor_input(given["index"], [batch, 8, 8, 1])
            runner.allocate_tensors()
            runner.set_tensor(given["index"], np.ones((batch, 8, 8, 1), given["dtype"]))
            runner.invoke()
            details = runner.get_input_details()[0], runner.get_output_details()[0]
            found.append((*(detail["shape"].tolist() for detail in details), runner.get_tensor(details[1]["index"])))
        assert found[0][:2] == found[1][:2]
        assert_equal(found[0][2:], found[1][2:])


def test_what_follows_from_a_batch_of_0_is_computed_when_a_file_is_loaded(driver: nnfmq.Client) -> None:
    tensors = [tensor("x", 2, 3), vector("axis", 0), tensor("y", 3)]
    content = writer.write(tensors, [Operator("SUM", (0, 1), (2,), "ReducerOptions", {})], [0], [2])
    with driver.prepare(nnfmq.load(content, shapes={"x": (0, 3)})) as model:
        assert_equal(model.execute(NONE), [np.zeros(3, np.float32)])


def test_a_shape_that_does_not_follow_from_a_batch_of_0_is_refused() -> None:
    tensors = [tensor("x", 1, 4, 4, 2), tensor("y", 1, 2, 2, 2)]
    pool = {"StrideW": 2, "StrideH": 2, "FilterWidth": 2, "FilterHeight": 2}
    content = writer.write(tensors, [Operator("MAX_POOL_2D", (0,), (1,), "Pool2DOptions", pool)], [0], [1])
    with pytest.raises(nnfmq.InvalidArgument, match="does not follow from inputs without elements"):
        nnfmq.load(content, shapes={"x": (1, 0, 4, 2)})


def test_a_result_of_unknown_size_is_not_taken_for_one_without_elements(driver: nnfmq.Client) -> None:
    tensors = [tensor("x", 3, kind="BOOL"), tensor("y", 0, 1, kind="INT64")]
    content = writer.write(tensors, [Operator("WHERE", (0,), (1,))], [0], [1])
    with driver.prepare(nnfmq.load(content)) as model:
        assert model.execute(np.array([True, False, True]))[0].tolist() == [[0], [2]]


def test_a_signature_names_one_tensor_twice(driver: nnfmq.Client, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(path))
    content = writer.write(
        [X_TENSOR, tensor("y", 2, 3)],
        [Operator("RELU", (0,), (1,))],
        [0],
        [1],
        signatures=[writer.Signature("run", {"x": 0}, {"given": 0, "one": 1, "two": 1})],
    )
    with driver.prepare(nnfmq.load(content, signature="run")) as model:
        outputs = model.execute(X)
    assert [info.name for info in model.outputs] == ["given", "one", "two"]
    assert_equal(outputs, [X, np.maximum(X, 0), np.maximum(X, 0)])
    for module in (our_litert, litert):
        found = module.Interpreter(model_content=content).get_signature_runner("run")(x=X)
        assert_equal([found[name] for name in ("given", "one", "two")], outputs)


def test_numbers_are_inputs_of_rank_0(driver: nnfmq.Client) -> None:
    case = one("sum", "Add", SCALAR, np.array(1, np.float32))
    with driver.prepare(nnfmq.load(case.content())) as model:
        (found,) = model.execute(2.5, 4)
    assert found.shape == ()
    assert found == 6.5


@pytest.mark.parametrize(
    ("value", "text"),
    [(np.zeros((3, 0), np.float32), "'x0' has shape 0x3; the given array has 3x0"),
     (np.zeros(3, np.float32), "has shape 0x3; the given array has 1x3"),
     (X, "has shape 0x3; the given array has 2x3")],
)  # fmt: skip
def test_an_array_of_another_shape_is_refused(driver: nnfmq.Client, value: Array, text: str) -> None:
    with driver.prepare(nnfmq.load(one("rows", "Relu", NONE).content())) as model, model.burst() as burst:
        for execute in (model.execute, burst.execute):
            with pytest.raises(nnfmq.InvalidArgument, match=text):
                execute(value)


def test_the_mean_of_nothing_is_not_a_number(driver: nnfmq.Client) -> None:
    """ONNX leaves it undefined, and ONNX Runtime returns 0."""
    with driver.prepare(nnfmq.load(one("mean", "ReduceMean", NONE, constants=[ints(0)]).content())) as model:
        assert np.isnan(model.execute(NONE)[0]).all()


@pytest.mark.parametrize(
    ("case", "text"),
    [(one("mean", "ReduceMean", NONE.astype(np.int32), constants=[ints(0)]), "the mean of no integers"),
     (one("argmax", "ArgMax", NONE, axis=0), "rejected|no elements")],
    ids=str,
)  # fmt: skip
def test_what_has_no_value_is_refused_at_load(case: ShapeCase, text: str) -> None:
    with pytest.raises(nnfmq.UnsupportedModel, match=text):
        nnfmq.load(case.content())


def test_a_loop_without_iterations_collects_nothing(driver: nnfmq.Client) -> None:
    helper, kinds = onnx.helper, onnx.TensorProto
    body = helper.make_graph(
        [make("Add", ["c", "x"], ["n"]), make("Identity", ["k"], ["kk"]), make("Identity", ["n"], ["row"])],
        "body",
        [helper.make_tensor_value_info("i", kinds.INT64, []), helper.make_tensor_value_info("k", kinds.BOOL, []),
         helper.make_tensor_value_info("c", kinds.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("kk", kinds.BOOL, []), helper.make_tensor_value_info("n", kinds.FLOAT, [2, 3]),
         helper.make_tensor_value_info("row", kinds.FLOAT, [2, 3])],
    )  # fmt: skip
    nodes = [make("Loop", ["count", "", "x"], ["last", "rows"], body=body)]
    content = file_of(nodes, {"x": X}, ["last", "rows"], {"count": np.array(0)}, 18)
    with driver.prepare(nnfmq.load(content)) as model:
        last, rows = model.execute(X)
    np.testing.assert_array_equal(last, X)
    assert rows.shape == (0, 2, 3)


def test_run_takes_a_scalar_and_a_file_without_elements(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(path))
    file, number, nothing = tmp_path / "model.onnx", tmp_path / "a.npy", tmp_path / "b.bin"
    nodes = [make("Exp", ["a"], ["y"]), make("Relu", ["b"], ["z"])]
    file.write_bytes(ShapeCase("both", nodes, {"a": SCALAR, "b": NONE}, ("y", "z")).content())
    np.save(number, SCALAR)
    nothing.write_bytes(b"")
    assert main(["run", str(file), "--input", str(number), "--input", str(nothing), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["outputs"]
    assert (first["shape"], second["shape"]) == ([], [0, 3])
