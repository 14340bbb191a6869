"""The model that an action of `nnfmq model` is about: that of a file, or a test model of the HAL's suite; its plan."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from nnfmq.cli.console import open_client, open_runtime
from nnfmq.cli.model_file import SizesNeeded, load_model, shapes_of
from nnfmq.client.connection.device import hosts_runtime
from nnfmq.hal.errors import InvalidArgument, UnsupportedModel
from nnfmq.hal.tensor_info import StateInfo, TensorInfo, operand_info

if TYPE_CHECKING:
    from nnfmq.hal.types import Model
    from nnfmq.importers import LoadedModel
    from nnfmq.importers.onnx.interface import OnnxValueType
    from nnfmq.lab.conformance.testmodels import TestModel
    from nnfmq.planning.plan import ExecutionPlan

__all__ = [
    "InspectedModel", "describe_declared", "is_test_file", "plan_of", "read_drawn", "read_hosted", "read_inspected",
    "read_tests", "shareable",
]  # fmt: skip

_NAMES_SHOWN = 8
_NUMPY_NAMES = {"float": "float32", "double": "float64"}


class InspectedModel(NamedTuple):
    """A model, its name, and the names of its inputs and outputs. `signatures` are those of a .tflite file.

    `open_inputs` has inputs whose sizes that file leaves open, with None for each such size, by name.
    """

    name: str
    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[StateInfo, ...] = ()
    signatures: tuple[str, ...] = ()
    open_inputs: Mapping[str, tuple[int | None, ...]] = MappingProxyType({})


def is_test_file(arguments: argparse.Namespace) -> bool:
    """Return whether the file has test models of the HAL's suite."""
    from nnfmq.lab.conformance.testmodels import ENDINGS

    return str(arguments.model).endswith(ENDINGS)


def describe_declared(arguments: argparse.Namespace, needed: SizesNeeded) -> dict[str, Any]:
    """Return inputs and outputs of an ONNX file that leaves sizes open, as plain values.

    An unknown dimension is its symbol, or None without one.
    """
    from nnfmq.importers.file_format import read_source
    from nnfmq.importers.onnx.file import parse
    from nnfmq.importers.onnx.interface import read_interface

    interface = read_interface(parse(read_source(arguments.model)))
    return {
        "model": arguments.model.name,
        "inputs": [_declared(value) for value in interface.inputs],
        "outputs": [_declared(value) for value in interface.outputs],
        "shape_options": needed.options,
    }


def _declared(value: OnnxValueType) -> dict[str, Any]:
    shape = None if value.shape is None else list(value.shape)
    dtype = value.type.removeprefix("tensor(").removesuffix(")")
    return {"name": value.name, "dtype": _NUMPY_NAMES.get(dtype, dtype), "shape": shape}


def read_inspected(arguments: argparse.Namespace) -> InspectedModel:
    """Return the model that the arguments name.

    Raises:
        InvalidArgument: If the file cannot be imported, or --test does not name one of its test models.
        OSError: If the file cannot be read.
    """
    if not is_test_file(arguments):
        _require_model_file(arguments)
        loaded = load_model(arguments)
        return InspectedModel(
            arguments.model.name, loaded.model, loaded.inputs, loaded.outputs, loaded.states, loaded.signatures,
            {} if arguments.shape or arguments.signature is not None else _open_inputs(arguments),
        )  # fmt: skip
    tests = list(read_tests(arguments))
    if len(tests) > 1:
        names = ", ".join(test.name for test in tests[:_NAMES_SHOWN]) + (", …" if len(tests) > _NAMES_SHOWN else "")
        raise InvalidArgument(f"{arguments.model}: {len(tests)} test models; choose one with --test: {names}")
    return _of_test(tests[0])


def read_hosted(arguments: argparse.Namespace, refusal: InvalidArgument) -> tuple[str, LoadedModel]:
    """Return the device that hosts a runtime and opens a file, of those given if there are any, and what it finds.

    Raises:
        UnsupportedModel: If there is none; the message says why, and what to install.
    """
    options = {"shapes": shapes_of(arguments), "signature": arguments.signature}
    with open_client(arguments.connect) as client:
        if not arguments.device:
            return client.load_hosted(arguments.model, refusal, **options)
        name = arguments.device[0]
        if not hosts_runtime(client.device(name).info):
            raise refusal
        return name, client.device(name).load(arguments.model, **options)


def read_drawn(arguments: argparse.Namespace) -> InspectedModel:
    """Return the model that the arguments name, to be drawn; if only a hosted runtime runs the file, that which does.

    Raises:
        NnfmqError: Those of `read_inspected` and `read_hosted`.
        OSError: If the file cannot be read.
    """
    from nnfmq.importers.file_format import UnknownFormat  # slow to import

    try:
        return read_inspected(arguments)
    except (UnsupportedModel, UnknownFormat) as refusal:
        _, loaded = read_hosted(arguments, refusal)
    return InspectedModel(arguments.model.name, loaded.model, loaded.inputs, loaded.outputs, loaded.states)


def _open_inputs(arguments: argparse.Namespace) -> dict[str, tuple[int | None, ...]]:
    from nnfmq.importers.file_format import TFLITE_IMPORTER, importer_of, read_source
    from nnfmq.importers.tflite.interface import read_interface

    content = read_source(arguments.model).data
    if importer_of(content) != TFLITE_IMPORTER:
        return {}
    main = read_interface(content).subgraphs[0]
    tensors = [main.tensors[index] for index in main.inputs]
    found = {tensor.name: tensor.shape_signature for tensor in tensors if min(tensor.shape_signature, default=0) < 0}
    return {name: tuple(size if size >= 0 else None for size in shape) for name, shape in found.items()}


def _require_model_file(arguments: argparse.Namespace) -> None:
    if arguments.test is not None:
        raise InvalidArgument(f"--test is for files of test models (.jsonl, .jsonl.gz); {arguments.model} is none")


def read_tests(arguments: argparse.Namespace) -> Iterator[TestModel]:
    """Yield the test models of a file, or the one that --test names.

    Raises:
        InvalidArgument: If there is none of that name, or the file is not in the format.
        OSError: If the file cannot be read.
    """
    from nnfmq.lab.conformance.testmodels import lines, read_at

    if arguments.shape or arguments.signature is not None:
        raise InvalidArgument("--shape and --signature are for .tflite and .onnx files, not for test models")
    found = False
    for number, line in lines(arguments.model):
        if arguments.test in (None, line["name"]):
            found = True
            yield read_at(arguments.model, number, line)
    if not found:
        raise InvalidArgument(f"{arguments.model}: there is no test model {arguments.test!r} in it")


def _of_test(test: TestModel) -> InspectedModel:
    main = test.model.main
    inputs, outputs = (
        tuple(operand_info(main.operands[index], f"{kind} {i}") for i, index in enumerate(indexes))
        for kind, indexes in (("input", main.input_indexes), ("output", main.output_indexes))
    )
    return InspectedModel(test.name, test.model, inputs, outputs)


def plan_of(arguments: argparse.Namespace, model: Model) -> ExecutionPlan | None:
    """Return the plan of `model`, None without --plan; blocks while the devices are asked. Nothing is prepared.

    Raises:
        InvalidArgument: If a device does not exist, or none supports an operation.
        NnfmqError: If no driver can be reached.
    """
    if not arguments.plan:
        return None
    with ExitStack() as resources:
        model = shareable(model, resources)
        runtime = resources.enter_context(open_runtime(arguments.connect))
        return runtime.plan(model, list(dict.fromkeys(arguments.device)) or None)


def shareable(model: Model, resources: ExitStack) -> Model:
    """Return the model with pools that can be sent until `resources` closes: those of a test model are bytes."""
    from nnfmq.base.memory import Memory

    pools = []
    for pool in model.pools:
        if hasattr(pool, "fileno"):
            pools.append(pool)
            continue
        memory = resources.enter_context(Memory.create(pool.size_bytes, "nnfmq-constants"))
        memory.view[:] = pool.view
        pools.append(memory)
    return replace(model, pools=tuple(pools))
