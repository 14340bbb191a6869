"""Hosted models that nnfmq's own client does not build: a driver refuses each, and its worker and a neighbour go on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.drivers import Daemon
from support.onnx_files import file_of
from support.onnx_runtime import onnx

import nnfmq
from nnfmq.hal.hosted import RUNTIMES, FileParts, HostedCall, call_of
from nnfmq.hal.types import DataLocation, Model, OperandType, OperationType
from nnfmq.importers import hosted

pytest.importorskip("ai_edge_litert")

DIGITS = Path(nnfmq.example_path("digits.tflite"))
Change = Callable[[HostedCall], HostedCall]


def files(*names: str, parts: int = 1) -> Change:
    return lambda call: replace(call, files=tuple(FileParts(name, parts) for name in names))


NOT_ALLOWED: dict[str, tuple[Change, str]] = {
    "a name in another folder": (files("../digits.tflite"), "'../digits.tflite' is no name of a file"),
    "the folder above": (files(".."), "'..' is no name of a file"),
    "an absolute path": (files("/etc/passwd"), "'/etc/passwd' is no name of a file"),
    "a name with a NUL": (files("a\0b"), "is no name of a file"),
    "no name": (files(""), "'' is no name of a file"),
    "no files": (files(), "a hosted model has 1 to 64 files, this one has 0"),
    "too many files": (files(*map(str, range(65)), parts=0), "this one has 65"),
    "two files of one name": (files("a", "a", parts=0), "two files of a hosted model have the same name"),
    "less than no parts": (files("a", parts=-1), "file 'a' has -1 parts"),
    "a signature that is not there": (lambda call: replace(call, signature="x"), "there is no signature 'x'"),
    "threads that are no number": (lambda call: replace(call, options={"threads": "2"}), "threads '2'"),
    "an option that names a library": (
        lambda call: replace(call, options={"experimental_delegates": ["/tmp/a.so"]}), "allowed are threads, ",
    ),
}  # fmt: skip
"""What neither a question about a file nor a model may have."""
NOT_THE_FILE_S: dict[str, tuple[Change, str]] = {
    "more parts than operands": (files("a", parts=2), "the inputs of a hosted model are those of its operation"),
    "a part as an input": (files("a", parts=0), "the inputs of a hosted model are those of its operation"),
    "no output": (lambda call: replace(call, outputs=()), "the outputs of a hosted model are those of its operation"),
    "an output of another name": (
        lambda call: replace(call, outputs=(replace(call.outputs[0], name="z"),)),
        "the model declares output 0 as 'z'",
    ),
    "an output of another type": (
        lambda call: replace(call, outputs=(replace(call.outputs[0], dtype="int32"),)),
        "output 'probabilities' is int32 (1, 10), its operand TENSOR_FLOAT32 (1, 10)",
    ),
    "strings": (
        lambda call: replace(call, inputs=(replace(call.inputs[0], dtype="string"),)), "has elements of type string",
    ),
}  # fmt: skip


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[nnfmq.Client]:
    """Return a client whose worker is not replaced; its model and a neighbour's execute after the test."""
    with ExitStack() as stack:
        clients = [stack.enter_context(shared_daemon.connect(recover=False)) for _ in range(2)]
        models = [stack.enter_context(each.device("litert").prepare(DIGITS)) for each in clients]
        x = np.zeros(models[0].inputs[0].shape, models[0].inputs[0].dtype)
        yield clients[0]
        first, second = (model.execute(x)[0] for model in models)
        assert np.array_equal(first, second)


def with_call(model: Model, data: bytes) -> Model:
    """Return a hosted model with another constant as its first operand."""
    first = replace(model.main.operands[0], dimensions=(len(data),), location=DataLocation(0, 0, len(data)))
    main = replace(model.main, operands=(first, *model.main.operands[1:]))
    return replace(model, main=main, operand_values=data)


@pytest.mark.parametrize(("change", "text"), NOT_ALLOWED.values(), ids=NOT_ALLOWED)
def test_a_question_about_a_file_is_refused(
    client: nnfmq.Client, change: Change, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_of_files = hosted._call_of
    monkeypatch.setattr(hosted, "_call_of", lambda *given: change(call_of_files(*given)))
    with pytest.raises(nnfmq.InvalidArgument, match=re.escape(text)):
        client.device("litert").load(DIGITS)


def test_a_question_without_the_bytes_of_a_file_is_refused(
    client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_of_files = hosted._call_of
    monkeypatch.setattr(hosted, "_call_of", lambda *given: files("a", "b")(call_of_files(*given)))
    with pytest.raises(nnfmq.InvalidArgument, match="the files have 2 parts, 1 were given"):
        client.device("litert").load(DIGITS)


@pytest.mark.parametrize(("change", "text"), (NOT_ALLOWED | NOT_THE_FILE_S).values(), ids=NOT_ALLOWED | NOT_THE_FILE_S)
def test_a_model_is_refused(client: nnfmq.Client, change: Change, text: str) -> None:
    device = client.device("litert")
    model = device.load(DIGITS).model
    with pytest.raises(nnfmq.InvalidArgument, match=re.escape(text)):
        device.prepare(with_call(model, change(call_of(model)).encode()))


def with_operation(model: Model, **changes: Any) -> Model:
    """Return a hosted model with another operation."""
    (operation,) = model.main.operations
    return replace(model, main=replace(model.main, operations=(replace(operation, **changes),)))


@pytest.mark.parametrize("change", ["another operation of the extension", "no inputs"])
def test_a_model_with_another_operation_is_refused(client: nnfmq.Client, change: str) -> None:
    device = client.device("litert")
    model = device.load(DIGITS).model
    (operation,) = model.main.operations
    other = {"inputs": ()} if change == "no inputs" else {"type": OperationType(operation.type + 1)}
    for prepare in (device.prepare, client.prepare):
        with pytest.raises(nnfmq.InvalidArgument, match=r"a hosted model has one operation, nnfmq\.hosted\.0"):
            prepare(with_operation(model, **other))


NOT_THE_TENSOR_S: dict[str, dict[str, Any]] = {
    "smaller elements": {"type": OperandType.TENSOR_QUANT8_ASYMM, "scale": 1.0},
    "less elements": {"dimensions": (1, 2)},
    "more elements": {"dimensions": (1, 1000)},
    "an unknown size": {"dimensions": (1, 0)},
    "an unknown rank": {"dimensions": ()},
}


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize("changes", NOT_THE_TENSOR_S.values(), ids=NOT_THE_TENSOR_S)
def test_a_model_whose_operand_is_not_the_tensor_of_its_call_is_refused(
    client: nnfmq.Client, kind: str, changes: dict[str, Any]
) -> None:
    """A runtime that has the tensor's type for an operand of another one would read or write beyond its memory."""
    device = client.device("litert")
    model = device.load(DIGITS).model
    operands = list(model.main.operands)
    (index,) = model.main.input_indexes if kind == "input" else model.main.output_indexes
    operands[index] = replace(operands[index], **changes)
    with pytest.raises(nnfmq.InvalidArgument, match=rf"{kind} '\w+' is float32 \(1, .*\), its operand TENSOR_"):
        device.prepare(replace(model, main=replace(model.main, operands=tuple(operands))))


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b'{"format": 1, "files": []}', b"[" * 100_000], ids=repr)
def test_a_model_whose_first_operand_is_no_call_is_refused(client: nnfmq.Client, data: bytes) -> None:
    device = client.device("litert")
    with pytest.raises(nnfmq.InvalidArgument, match="the first operand of a hosted model is not valid"):
        device.prepare(with_call(device.load(DIGITS).model, data))


def add() -> bytes:
    return file_of([onnx.helper.make_node("Add", ["x", "x"], ["y"])], {"x": np.ones(2, np.float32)}, ["y"])


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda runtime: runtime.name)
def test_a_file_that_is_sent_as_one_of_another_format_is_refused(
    client: nnfmq.Client, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the runtime, or by what reads the file before it."""
    if find_spec(runtime.package) is None:
        pytest.skip(f"{runtime.package} is not installed")
    monkeypatch.setattr(hosted, "hosted_format", lambda _data, _path: runtime.formats[0])
    monkeypatch.setattr(hosted, "companion_files", lambda _format, _file: {})
    content = add() if runtime.name == "litert" else DIGITS.read_bytes()
    text = f"^{runtime.name}: |^a truncated or corrupt ONNX model|^an OpenVINO model is an XML file"
    with pytest.raises(nnfmq.InvalidArgument, match=text):
        client.device(runtime.name).load(content)
