"""`nnfmq model show`: a model's inputs, outputs, operations and sizes, and which devices support them."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import console, open_client, print_json, table
from nnfmq.cli.model.inspection import (
    InspectedModel,
    describe_declared,
    plan_of,
    read_hosted,
    read_inspected,
    shareable,
)
from nnfmq.cli.model_file import SizesNeeded, shapes_of
from nnfmq.client.connection.device import hosts_runtime
from nnfmq.hal.errors import InvalidArgument, UnsupportedModel
from nnfmq.hal.feature_levels import FeatureLevel, interface_name
from nnfmq.hal.summaries import code_name
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, Subgraph
from nnfmq.validation import validate_model

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.hal.tensor_info import TensorInfo
    from nnfmq.importers.loaded_model import LoadedModel
    from nnfmq.planning.plan import ExecutionPlan

__all__ = ["describe_model", "show"]


# ----------------------------------------------------------------------------------------------------------------------
# The description of a model that `nnfmq model show` prints: plain values, as in its JSON.


_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)


def describe_model(inspected: InspectedModel, supported: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """Return the description. `supported` has, for each device that was asked, a bool for each main operation."""
    model = inspected.model
    subgraphs = (model.main, *model.referenced)
    level = _feature_level(model)
    operations = [_operation(model.main, number, supported) for number in range(len(model.main.operations))]
    return {
        "model": inspected.name,
        "feature_level": level,
        "interface": None if level is None else interface_name(level),
        "inputs": [_tensor(info) for info in inspected.inputs],
        "outputs": [_tensor(info) for info in inspected.outputs],
        "states": [_tensor(state.tensor) for state in inspected.states],
        "signatures": list(inspected.signatures),
        "open_inputs": {name: list(shape) for name, shape in inspected.open_inputs.items()},
        "operations": operations,
        "subgraphs": [[_operation(graph, i, {}) for i in range(len(graph.operations))] for graph in model.referenced],
        "counts": dict(Counter(code_name(one.type) for graph in subgraphs for one in graph.operations).most_common()),
        "operands": sum(len(graph.operands) for graph in subgraphs),
        "constants_bytes": sum(_constant_bytes(graph, range(len(graph.operands))) for graph in subgraphs),
        "extensions": [extension.name for extension in model.extensions],
        "relaxes_float32": model.relax_computation_float32_to_float16,
        "devices": {name: {"supported": sum(found), "of": len(found)} for name, found in supported.items()},
    }


def _feature_level(model: Model) -> FeatureLevel | None:
    """Return the feature level that the model needs; None if it is not valid (`nnfmq model validate` says why)."""
    try:
        return FeatureLevel(validate_model(model, allow_unspecified_boundaries=True))
    except InvalidArgument:
        return None


def _tensor(info: TensorInfo) -> dict[str, Any]:
    quantization = {"scale": info.scale, "zero_point": info.zero_point} if info.scale else None
    return {"name": info.name, "dtype": info.dtype, "shape": list(info.shape), "quantization": quantization}


def _operation(graph: Subgraph, number: int, supported: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    operation = graph.operations[number]
    return {
        "number": number,
        "operation": code_name(operation.type),
        "inputs": [_operand(graph.operands[index]) for index in _values(graph, operation)],
        "outputs": [_operand(graph.operands[index]) for index in operation.outputs if index < len(graph.operands)],
        "constants_bytes": _constant_bytes(graph, dict.fromkeys(operation.inputs)),
        "supported_by": [name for name, found in supported.items() if found[number]],
    }


def _values(graph: Subgraph, operation: Operation) -> list[int]:
    """Return the inputs of an operation that are computed or come with the request."""
    others = (*_CONSTANTS, LifeTime.NO_VALUE, LifeTime.SUBGRAPH)
    found = [index for index in operation.inputs if index < len(graph.operands)]
    return [index for index in found if graph.operands[index].lifetime not in others]


def _operand(operand: Operand) -> dict[str, Any]:
    return {"type": code_name(operand.type), "dimensions": list(operand.dimensions)}


def _constant_bytes(graph: Subgraph, indexes: Sequence[int] | Mapping[int, object]) -> int:
    operands = [graph.operands[index] for index in indexes if index < len(graph.operands)]
    return sum(operand.location.length for operand in operands if operand.lifetime in _CONSTANTS)


# ----------------------------------------------------------------------------------------------------------------------
# `nnfmq model show`: a model's inputs, outputs, operations and sizes, and which devices support them.


_SHAPES_SHOWN = 2


def show(arguments: argparse.Namespace) -> int:
    """Read the model, ask the devices, print the description; return the exit status."""
    from nnfmq.importers.file_format import UnknownFormat  # slow to import

    try:
        inspected = read_inspected(arguments)
    except SizesNeeded as needed:
        _print_declared(arguments, describe_declared(arguments, needed))
        return 0
    except (UnsupportedModel, UnknownFormat) as refusal:
        _print_hosted(arguments, refusal, *read_hosted(arguments, refusal))
        return 0
    with ExitStack() as resources:
        model = shareable(inspected.model, resources)
        supported, hosts = _asked(arguments, model)
        report = describe_model(inspected, supported) | {"hosts": hosts}
        plan = plan_of(arguments, model)
        if arguments.json:
            print_json(report | _planned(plan), arguments.model)
        else:
            _print(console(arguments.no_color), report, plan)
    return 0


def _print_hosted(arguments: argparse.Namespace, refusal: InvalidArgument, device: str, loaded: LoadedModel) -> None:
    """Print what nnfmq's own engine does not support of a model, and which device runs it."""
    from nnfmq.importers.loaded_model import grouped

    problems = refusal.problems if isinstance(refusal, UnsupportedModel) else ()
    report = {
        "model": arguments.model.name,
        **{kind: [_tensor(info) for info in getattr(loaded, kind)] for kind in ("inputs", "outputs")},
        "states": [_tensor(state.tensor) for state in loaded.states],
        "signatures": list(loaded.signatures),
        "problems": [problem._asdict() for problem in problems] or [{"reason": str(refusal)}],
        "device": device,
    }
    if arguments.json:
        print_json(report, arguments.model)
        return
    screen = console(arguments.no_color)
    screen.print(_tensors(report))
    rows = table("not supported", ">count", "types", "reason")
    for group in grouped(problems):
        name, count = group.problem.operator or "(whole model)", str(len(group.indexes))
        rows.add_row(name, count, group.problem.types, group.reason)
    screen.print(rows if problems else str(refusal))
    screen.print(f"nnfmq's own engine does not run this model. Device {device} does, which hosts a runtime.")


def _print_declared(arguments: argparse.Namespace, declared: dict[str, Any]) -> None:
    """Print inputs and outputs of a model whose operations are not known before its inputs have sizes."""
    if arguments.json:
        print_json(declared, arguments.model)
        return
    screen = console(arguments.no_color)
    rows = table("", "name", "type", "shape", title=declared["model"])
    for kind in ("inputs", "outputs"):
        for number, tensor in enumerate(declared[kind]):
            shape = "unknown rank" if tensor["shape"] is None else _symbols(tensor["shape"])
            rows.add_row(f"{kind.removesuffix('s')} {number}", tensor["name"], tensor["dtype"], shape)
    screen.print(rows)
    screen.print("The file leaves sizes of inputs open. To see the operations, or for nnfmq's own engine, give them:")
    screen.print(f"nnfmq model show {shlex.quote(str(arguments.model))} {declared['shape_options']}", soft_wrap=True)


def _planned(plan: ExecutionPlan | None) -> dict[str, Any]:
    from nnfmq.planning.text import plan_dict

    return {} if plan is None else {"plan": plan_dict(plan)}


def _asked(arguments: argparse.Namespace, model: Model) -> tuple[dict[str, list[bool]], dict[str, str | None]]:
    """Ask the devices of --device which operations they support; those that host runtimes, whether they open the file.

    For each of these: None, or why it rejects the file.
    """
    supported: dict[str, list[bool]] = {}
    hosts: dict[str, str | None] = {}
    if not arguments.device:
        return supported, hosts
    options = {"shapes": shapes_of(arguments), "signature": arguments.signature}
    with open_client(arguments.connect) as client:
        for device in [client.device(name) for name in dict.fromkeys(arguments.device)]:
            if not hosts_runtime(device.info):
                supported[device.info.name] = device.supported_operations(model)
                continue
            try:
                device.load(arguments.model, **options)
                hosts[device.info.name] = None
            except InvalidArgument as error:
                hosts[device.info.name] = str(error)
    return supported, hosts


def _print(screen: Console, report: Mapping[str, Any], plan: ExecutionPlan | None) -> None:
    screen.print(_tensors(report))
    screen.print(_operations(report["operations"], report["devices"], "operations"))
    for number, operations in enumerate(report["subgraphs"]):
        screen.print(_operations(operations, {}, f"subgraph {number}"))
    counts = ", ".join(f"{count} {name}" for name, count in report["counts"].items())
    screen.print(f"{sum(report['counts'].values())} operations: {counts}.")
    for line in _facts(report):
        screen.print(line)
    if plan is not None:
        from nnfmq.planning.text import plan_text

        screen.print("", plan_text(plan), sep="\n")


def _tensors(report: Mapping[str, Any]) -> Any:
    rows = table("", "name", "type", "shape", "quantization", title=report["model"])
    for kind in ("inputs", "outputs", "states"):
        for number, tensor in enumerate(report[kind]):
            found = tensor["quantization"]
            quantization = f"{found['scale']:g} × (q − {found['zero_point']})" if found else ""
            name, shape = tensor["name"], _shape(tensor["shape"])
            rows.add_row(f"{kind.removesuffix('s')} {number}", name, tensor["dtype"], shape, quantization)
    return rows


def _operations(operations: Sequence[Mapping[str, Any]], devices: Mapping[str, Any], title: str) -> Any:
    missing = [[name for name in devices if name not in one["supported_by"]] for one in operations]
    rows = table(
        ">", "operation", "inputs", "outputs", ">constants", *(["not on"] if any(missing) else []), title=title
    )
    rows.padding = (0, 1, 0, 0)  # so that a row fits 80 columns
    for one, lacking in zip(operations, missing, strict=True):
        values = _shapes(one["inputs"]), _shapes(one["outputs"]), _bytes(one["constants_bytes"])
        rows.add_row(str(one["number"]), one["operation"], *values, *([", ".join(lacking)] if any(missing) else []))
    return rows


def _shapes(operands: Sequence[Mapping[str, Any]]) -> str:
    shown = [_shape(operand["dimensions"]) for operand in operands[:_SHAPES_SHOWN]]
    return ", ".join(shown) + (f", {len(operands) - len(shown)} more" if len(operands) > len(shown) else "")


def _symbols(dimensions: Sequence[int | str | None]) -> str:
    """Return a shape with the names of unknown dimensions, as `batch x 3 x ?`."""
    return " x ".join("?" if extent is None else str(extent) for extent in dimensions) or "scalar"


def _shape(dimensions: Sequence[int]) -> str:
    return "x".join(str(extent or "?") for extent in dimensions) or "scalar"


def _bytes(count: int) -> str:
    return f"{count:,}" if count else ""


def _facts(report: Mapping[str, Any]) -> list[str]:
    level, extensions = report["feature_level"], ", ".join(report["extensions"])
    needs = f"feature level {level} ({report['interface']})" if level else "a valid model: see `nnfmq model validate`"
    facts = [f"{report['operands']:,} operands, {report['constants_bytes']:,} bytes of constants; needs {needs}."]
    facts += [f"Extensions: {extensions}."] if extensions else []
    facts += ["float32 may be computed as float16."] if report["relaxes_float32"] else []
    facts += [f"Signatures: {', '.join(report['signatures'])}."] if report["signatures"] else []
    for name, shape in report["open_inputs"].items():
        example = "x".join(str(size or 4) for size in shape)
        facts.append(
            f"The file leaves sizes open: {name} is {_symbols(shape)}; resize it with --shape {name}={example}."
        )
    for name, reason in report["hosts"].items():
        facts.append(f"{name}, which hosts a runtime, {f'rejects the file: {reason}' if reason else 'runs the file'}.")
    for name, found in report["devices"].items():
        facts.append(f"{name} supports {found['supported']} of {found['of']} operations.")
    return facts
