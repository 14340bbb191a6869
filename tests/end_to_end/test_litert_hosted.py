"""LiteRT's interface for models that nnfmq's own engine refuses: LiteRT in the driver runs them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder, wait_for_closers
from support.litert import litert as theirs
from support.litert_scripts import assert_same, outcome
from support.tflite_files import Operator, Tensor, floats, ints, writer

import nnfmq.compat.litert as ours

PLAIN = {"FusedActivationFunction": 0}
MULTIPLY = "STABLEHLO_MULTIPLY"  # nnfmq's importer has no operators of StableHLO


def squaring(shape: tuple[int, ...] = (1, 3), kind: str = "INT64", **extra: Any) -> bytes:
    """Return a model that squares the elements of a tensor."""
    tensors = [Tensor(name, shape, kind, **extra) for name in ("x", "square")]
    content: bytes = writer.write(tensors, [Operator(MULTIPLY, (0, 0), (1,))], (0,), (1,))
    return content


@pytest.fixture(autouse=True)
def _use_daemon(_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NNFMQ_SOCKET", str(_daemon.path))
    yield
    gc.collect()
    wait_for_closers()


# ------------------------------------------------------------------------------------------------ outcomes


def different_shapes(lite: Any) -> Any:
    """Return what a script sees of several executions, of which one has another shape."""
    interpreter = lite.Interpreter(model_content=squaring())
    interpreter.allocate_tensors()
    (taken,), (given,) = interpreter.get_input_details(), interpreter.get_output_details()
    found = [taken, given]
    for array in (np.array([[3, -2, 2**33]]), np.array([[0, 1, 5]]), np.arange(6).reshape(2, 3)):
        if array.shape != tuple(interpreter.get_input_details()[0]["shape"]):
            interpreter.resize_tensor_input(taken["index"], array.shape)
            interpreter.allocate_tensors()
        interpreter.set_tensor(taken["index"], array)
        interpreter.invoke()
        found.append((interpreter.get_tensor(given["index"]), interpreter.tensor(given["index"])().tolist()))
    return found


def empty_batch(lite: Any) -> Any:
    interpreter = lite.Interpreter(model_content=squaring(), num_threads=True)
    found = []
    for rows in (0, 2, 0, 1):
        interpreter.resize_tensor_input(0, (rows, 3))
        interpreter.allocate_tensors()
        interpreter.set_tensor(0, np.arange(3 * rows).reshape(rows, 3))
        interpreter.invoke()
        found += [interpreter.get_output_details(), outcome(lambda _: interpreter.get_tensor(1), lite) if rows else 0]
    return found


def counted(shape: tuple[int, ...], signature: tuple[int, ...] = ()) -> Callable[[Any], Any]:
    """Return a script of the indices of true elements, for which the file states a shape."""
    tensors = [Tensor("x", (4,), "BOOL"), Tensor("y", shape, "INT64", signature=signature)]
    content = writer.write(tensors, [Operator("WHERE", (0,), (1,))], (0,), (1,))

    def script(lite: Any) -> Any:
        interpreter = lite.Interpreter(model_content=content)
        found = [interpreter.get_output_details()]
        interpreter.allocate_tensors()
        found.append(interpreter.get_output_details())
        for x in np.bool_([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]]):
            interpreter.set_tensor(0, x)
            interpreter.invoke()
            found += [interpreter.get_tensor(1), interpreter.get_output_details()]
        return found

    return script


def unknown_before_an_execution(lite: Any) -> Any:
    """Return the details of an output whose shape follows from the data, of a model that LiteRT runs from the start."""
    tensors = [Tensor("x", (3,), "INT32"), Tensor("square", (3,), "INT32"), Tensor("begin", (), "INT32", ints(0)),
               Tensor("last", (), "INT32"), Tensor("step", (), "INT32", ints(1)), Tensor("y", (5,), "INT32"),
               Tensor("axis", (1,), "INT32", ints(0))]  # fmt: skip
    operators = [Operator(MULTIPLY, (0, 0), (1,)), Operator("SUM", (1, 6), (3,), "ReducerOptions", {}),
                 Operator("RANGE", (2, 3, 4), (5,))]  # fmt: skip
    interpreter = lite.Interpreter(model_content=writer.write(tensors, operators, (0,), (5,)))
    interpreter.allocate_tensors()
    found = [interpreter.get_output_details(), outcome(lambda _: interpreter.get_tensor(5), lite)]
    interpreter.set_tensor(0, np.int32([1, 0, 1]))
    interpreter.invoke()
    return [*found, interpreter.get_output_details(), interpreter.get_tensor(5)]


def sized(name: str, taken: tuple[int, ...], given: tuple[int, ...], *sizes: list[int]) -> Callable[[Any], Any]:
    """Return a script of an operator whose second input is the size of its result, an input of the model."""
    tensors = [Tensor("x", taken), Tensor("size", (len(sizes[0]),), "INT32"),
               Tensor("y", (1,) * len(given), signature=given)]  # fmt: skip
    inputs = (1, 0) if name == "FILL" else (0, 1)
    operator = Operator(name, inputs, (2,), f"{name.title().replace('_', '')}Options", {})
    content = writer.write(tensors, [operator], (0, 1), (2,))

    def script(lite: Any) -> Any:
        interpreter = lite.Interpreter(model_content=content)
        interpreter.allocate_tensors()
        found = []
        for size in sizes:
            interpreter.set_tensor(0, np.arange(np.prod(taken), dtype=np.float32).reshape(taken))
            interpreter.set_tensor(1, np.int32(size))
            interpreter.invoke()
            found += [interpreter.get_tensor(2), interpreter.get_output_details()]
        return found

    return script


def two_subgraphs(lite: Any) -> Any:
    """Return what signatures of two subgraphs give, of which nnfmq's engine runs the first one alone."""
    tensors = [Tensor("x", (1, 2)), Tensor("y", (1, 2))]
    second = writer.Subgraph(tensors, [Operator(MULTIPLY, (0, 0), (1,))], (0,), (1,))
    keys = [writer.Signature(key, {"a": 0}, {"b": 1}, place) for place, key in enumerate(("double", "square"))]
    double = Operator("ADD", (0, 0), (1,), "AddOptions", PLAIN)
    interpreter = lite.Interpreter(
        model_content=writer.write(tensors, [double], (0,), (1,), more=[second], signatures=keys)
    )
    found = []
    for value in (np.float32([[1, 2]]), np.float32([[3, 4], [5, 6]])):
        for key in ("double", "square"):
            found.append(interpreter.get_signature_runner(key)(a=value))
        found.append(interpreter.get_tensor(1, 1))
    runner = interpreter.get_signature_runner("square")
    return [found, runner.get_input_details(), runner.get_output_details()]


def recurrent() -> bytes:
    """Return two RNNs with a square between them; the tensors 3 and 4 are variables."""
    early, late = (Tensor(name, (1, 2), extra={"IsVariable": 1}) for name in ("early", "late"))
    weights = [Tensor("w", (2, 2), data=floats(2, 2)), Tensor("b", (2,), data=floats(2))]
    tensors = [Tensor("x", (1, 2)), *weights, late, early, *(Tensor(name, (1, 2)) for name in "abc")]
    operators = [
        Operator("RNN", (0, 1, 1, 2, 4), (5,), "RNNOptions", PLAIN),
        Operator(MULTIPLY, (5, 5), (6,)),
        Operator("RNN", (6, 1, 1, 2, 3), (7,), "RNNOptions", PLAIN),
    ]
    content: bytes = writer.write(tensors, operators, (0,), (7,))
    return content


def variables(lite: Any) -> Any:
    interpreter = lite.Interpreter(model_content=recurrent())
    found = [outcome(lambda _: interpreter.get_tensor(3), lite)]
    interpreter.allocate_tensors()

    def step() -> None:
        interpreter.set_tensor(0, np.float32([[0.1, 0.2]]))
        interpreter.invoke()
        found.extend(interpreter.get_tensor(index) for index in (3, 4, 7))

    step()
    step()
    interpreter.set_tensor(4, np.float32([[1, 1]]))
    step()
    found.append(outcome(lambda _: interpreter.set_tensor(4, np.float32([[1, 1, 1]])), lite))
    found.append(outcome(lambda _: interpreter.set_tensor(4, np.float64([[1, 1]])), lite))
    interpreter.reset_all_variables()
    found += [interpreter.get_tensor(3), interpreter.get_tensor(4)]
    step()
    interpreter.allocate_tensors()
    step()
    return found


def intermediate_results(lite: Any) -> Any:
    resolver = lite.OpResolverType.BUILTIN_REF
    interpreter = lite.Interpreter(
        model_content=recurrent(), experimental_preserve_all_tensors=True, experimental_op_resolver_type=resolver
    )
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, np.float32([[0.1, 0.2]]))
    interpreter.invoke()
    return [interpreter.get_tensor(index) for index in range(8)]


def training(operator: Operator) -> Callable[[Any], Any]:
    """Return a script that trains and applies a weight, in two signatures that share it."""
    handle = Operator("VAR_HANDLE", (), (0,), "VarHandleOptions", {"Container": "", "SharedName": "w"})
    once = Operator("CALL_ONCE", (), (), "CallOnceOptions", {"InitSubgraphIndex": 2})
    read = Operator("READ_VARIABLE", (0,), (2,), "ReadVariableOptions")
    tensors = [Tensor("h", (), "RESOURCE"), *(Tensor(name, (2,)) for name in ("x", "old", "y"))]
    add = Operator("ADD", (1, 2), (3,), "AddOptions", PLAIN)
    train = [once, handle, read, add, Operator("ASSIGN_VARIABLE", (0, 3), (), "AssignVariableOptions")]
    infer = writer.Subgraph(tensors, [once, handle, read, operator], (1,), (3,))
    first = [tensors[0], Tensor("first", (2,), data=np.float32([1, 2]).tobytes())]
    begin = writer.Subgraph(first, [handle, Operator("ASSIGN_VARIABLE", (0, 1), (), "AssignVariableOptions")], (), ())
    keys = [writer.Signature(key, {"x": 1}, {"y": 3}, place) for place, key in enumerate(("train", "infer"))]
    content = writer.write(tensors, train, (1,), (3,), more=[infer, begin], signatures=keys)

    def script(lite: Any) -> Any:
        interpreter, x = lite.Interpreter(model_content=content), np.ones(2, np.float32)
        step, apply = interpreter.get_signature_runner("train"), interpreter.get_signature_runner("infer")
        found = [apply(x=x), step(x=x), apply(x=2 * x), step(x=x), step(x=3 * x), apply(x=x)]
        interpreter.reset_all_variables()
        return [*found, apply(x=x), step(x=x)]

    return script


def sum_of_all(lite: Any) -> Any:
    """Return a sum over all executions, in a variable of rank 0, with inputs of different sizes."""
    handle = Operator("VAR_HANDLE", (), (0,), "VarHandleOptions", {"Container": "", "SharedName": "sum"})
    tensors = [Tensor("h", (), "RESOURCE"), Tensor("x", (2,), "INT32", signature=(-1,)),
               *(Tensor(name, (), "INT32") for name in ("old", "part", "new")),
               Tensor("axis", (1,), "INT32", ints(0))]  # fmt: skip
    operators = [
        Operator("CALL_ONCE", (), (), "CallOnceOptions", {"InitSubgraphIndex": 1}),
        handle,
        Operator("READ_VARIABLE", (0,), (2,), "ReadVariableOptions"),
        Operator("SUM", (1, 5), (3,), "ReducerOptions", {"KeepDims": False}),
        Operator("ADD", (2, 3), (4,), "AddOptions", PLAIN),
        Operator("ASSIGN_VARIABLE", (0, 4), (), "AssignVariableOptions"),
    ]
    first = [tensors[0], Tensor("first", (), "INT32", ints(10))]
    begin = writer.Subgraph(first, [handle, Operator("ASSIGN_VARIABLE", (0, 1), (), "AssignVariableOptions")], (), ())
    interpreter = lite.Interpreter(model_content=writer.write(tensors, operators, (1,), (4,), more=[begin]))
    interpreter.allocate_tensors()
    found = []
    for size in (2, 3):
        interpreter.resize_tensor_input(1, (size,))
        interpreter.allocate_tensors()
        interpreter.set_tensor(1, np.arange(size, dtype=np.int32))
        interpreter.invoke()
        found.append(interpreter.get_tensor(4).item())
    interpreter.reset_all_variables()  # of variable tensors only
    interpreter.invoke()
    return [*found, interpreter.get_tensor(4)]


SCRIPTS = {
    "executions of different shapes": different_shapes,
    "a batch without elements": empty_batch,
    "a count that is not the one that the file states": counted((4, 1)),
    "a count that the file leaves open": counted((1, 1), (-1, 1)),
    "a count of which the file states 0": counted((0, 1)),
    "an unknown shape before an execution": unknown_before_an_execution,
    "a shape that is an input": sized("RESHAPE", (6,), (-1, -1), [2, 3], [3, 2], [1, 6]),
    "the size of an image that is an input": sized("RESIZE_BILINEAR", (1, 2, 2, 1), (1, -1, -1, 1), [4, 4], [3, 5]),
    "dimensions that are an input": sized("FILL", (), (-1, -1), [2, 2], [1, 3]),
    "a shape of repetitions that is an input": sized("BROADCAST_TO", (1,), (-1,), [4], [2]),
    "signatures of two subgraphs": two_subgraphs,
    "variables": variables,
    "intermediate results": intermediate_results,
    "training": training(Operator(MULTIPLY, (1, 2), (3,))),
    "training on nnfmq's engine": training(Operator("MUL", (1, 2), (3,), "MulOptions", PLAIN)),
    "a variable of rank 0 and inputs of different sizes": sum_of_all,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_for_a_model_that_nnfmq_refuses_has_the_outcome_of_litert(name: str) -> None:
    assert_same(SCRIPTS[name](ours), SCRIPTS[name](theirs))


# ------------------------------------------------------------------------------------------------ the driver


def test_arguments_of_the_interpreter_are_options_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from nnfmq.client.connection.client import Client

    given: list[Any] = []
    prepare = Client.prepare_hosted

    def recorded(*arguments: Any, **options: Any) -> Any:
        given.append(options["runtime_options"])
        return prepare(*arguments, **options)

    monkeypatch.setattr(Client, "prepare_hosted", recorded)
    ours.Interpreter(model_content=squaring())
    ours.Interpreter(
        model_content=squaring(),
        num_threads=1,
        experimental_op_resolver_type=ours.OpResolverType.BUILTIN_REF,
        experimental_disable_delegate_clustering=True,
    )
    chosen = {"experimental_op_resolver_type": "BUILTIN_REF", "experimental_disable_delegate_clustering": True}
    assert given == [{}, {"threads": 1} | chosen]


def test_an_index_out_of_bounds_is_refused_as_litert_refuses_it_and_harms_no_later_execution() -> None:
    values = Tensor("values", (3,), data=floats(3))
    tensors = [Tensor("index", (1,), "INT32"), values, Tensor("y", (1,))]
    content = writer.write(tensors, [Operator("GATHER", (1, 0), (2,), "GatherOptions")], (0,), (2,))
    for lite, match in ((ours, r"an index is outside \[0, 3\)"), (theirs, "gather index out of bounds")):
        interpreter = lite.Interpreter(model_content=content)
        interpreter.allocate_tensors()
        for _ in range(2):
            interpreter.set_tensor(0, np.int32([7]))
            with pytest.raises(RuntimeError, match=match):
                interpreter.invoke()
            interpreter.set_tensor(0, np.int32([2]))
            interpreter.invoke()
            assert interpreter.get_tensor(2).tolist() == [2.0]


def test_the_death_of_the_worker_is_not_noticed() -> None:
    interpreter = ours.Interpreter(model_content=squaring())
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, np.array([[3, -2, 2**33]]))
    interpreter.invoke()
    os.kill(interpreter._share.client().worker_pid, 9)
    interpreter.invoke()
    assert interpreter.get_tensor(1).tolist() == [[9, 4, 2**66 % 2**64]]


def test_without_litert_in_the_driver_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    match = r"(?s)STABLEHLO_MULTIPLY.*no device 'litert': .* \$NNFMQ_RUNTIMES does not allow"
    with short_folder() as made, running_daemon(made / "d.sock", environment={"NNFMQ_RUNTIMES": ""}) as daemon:
        monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
        with pytest.raises(ValueError, match=match):
            ours.Interpreter(model_content=squaring())


def test_a_model_that_litert_rejects_too_is_rejected_by_each_allocation() -> None:
    x = Tensor("x", (1, 3), "FLOAT32", signature=(-1, 3))
    content = writer.write([x, Tensor("y", (1, 3))], [Operator("CONCAT_EMBEDDINGS", (0,), (1,))], (0,), (1,))
    interpreter = ours.Interpreter(model_content=content)
    texts = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="CONCAT_EMBEDDINGS") as raised:
            interpreter.allocate_tensors()
        texts.append(str(raised.value))
        del raised
    assert texts[0] == texts[1]
