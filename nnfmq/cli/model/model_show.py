"""`nnfmq model show`: a model's inputs, outputs, operations and sizes, and which devices support them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import console, open_client, print_json, table
from nnfmq.cli.model.model_description import describe_model
from nnfmq.cli.model.model_inspection import describe_declared, read_inspected, shareable
from nnfmq.cli.model.model_plan import plan_of
from nnfmq.cli.model_file import SizesNeeded

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.execution_plan.plan import ExecutionPlan
    from nnfmq.hal.types import Model

__all__ = ["execute"]

_SHAPES_SHOWN = 2


def execute(arguments: argparse.Namespace) -> int:
    """Read the model, ask the devices, print the description; return the exit status."""
    try:
        inspected = read_inspected(arguments)
    except SizesNeeded as needed:
        _print_declared(arguments, describe_declared(arguments, needed))
        return 0
    with ExitStack() as resources:
        model = shareable(inspected.model, resources)
        report = describe_model(inspected, _supported(arguments, model))
        plan = plan_of(arguments, model)
        if arguments.json:
            print_json(report | _planned(plan))
        else:
            _print(console(arguments.no_color), report, plan)
    return 0


def _print_declared(arguments: argparse.Namespace, declared: dict[str, Any]) -> None:
    """Print inputs and outputs of a model whose operations are not known before its inputs have sizes."""
    if arguments.json:
        print_json(declared)
        return
    screen = console(arguments.no_color)
    rows = table("", "name", "type", "shape", title=declared["model"])
    for kind in ("inputs", "outputs"):
        for number, tensor in enumerate(declared[kind]):
            shape = "unknown rank" if tensor["shape"] is None else _symbols(tensor["shape"])
            rows.add_row(f"{kind.removesuffix('s')} {number}", tensor["name"], tensor["dtype"], shape)
    screen.print(rows)
    screen.print("The file leaves sizes of inputs open. To see the operations, or to run the model, give them:")
    screen.print(f"nnfmq model show {shlex.quote(str(arguments.model))} {declared['shape_options']}", soft_wrap=True)


def _planned(plan: ExecutionPlan | None) -> dict[str, Any]:
    from nnfmq.execution_plan.plan_text import plan_dict

    return {} if plan is None else {"plan": plan_dict(plan)}


def _supported(arguments: argparse.Namespace, model: Model) -> dict[str, list[bool]]:
    """Ask the devices of --device which operations they support."""
    if not arguments.device:
        return {}
    with open_client(arguments.connect) as client:
        devices = [client.device(name) for name in dict.fromkeys(arguments.device)]
        return {device.info.name: device.supported_operations(model) for device in devices}


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
        from nnfmq.execution_plan.plan_text import plan_text

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
    for name, found in report["devices"].items():
        facts.append(f"{name} supports {found['supported']} of {found['of']} operations.")
    return facts
