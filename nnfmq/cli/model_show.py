"""`nnfmq model show`: a model's inputs, outputs, operations and sizes, and which devices support them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import console, open_client, print_json, table
from nnfmq.cli.model_description import describe_model
from nnfmq.cli.model_inspection import InspectedModel, read_inspected

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.hal.types import Model

__all__ = ["execute"]

_SHAPES_SHOWN = 2


def execute(arguments: argparse.Namespace) -> int:
    """Read the model, ask the devices, print the description; return the exit status."""
    inspected = read_inspected(arguments)
    report = describe_model(inspected, _supported(arguments, inspected))
    if arguments.json:
        print_json(report)
    else:
        _print(console(arguments.no_color), report)
    return 0


def _supported(arguments: argparse.Namespace, inspected: InspectedModel) -> dict[str, list[bool]]:
    """Ask the devices of --device which operations they support."""
    if not arguments.device:
        return {}
    with ExitStack() as resources:
        model = _shareable(inspected.model, resources)
        client = resources.enter_context(open_client(arguments.connect))
        devices = [client.device(name) for name in dict.fromkeys(arguments.device)]
        return {device.info.name: device.supported_operations(model) for device in devices}


def _shareable(model: Model, resources: ExitStack) -> Model:
    """Return the model with pools that can be sent: those of a test model are bytes of this process."""
    from nnfmq.memory import Memory

    pools = []
    for pool in model.pools:
        if hasattr(pool, "fileno"):
            pools.append(pool)
            continue
        memory = resources.enter_context(Memory.create(pool.size_bytes, "nnfmq-constants"))
        memory.view[:] = pool.view
        pools.append(memory)
    return replace(model, pools=tuple(pools))


def _print(screen: Console, report: Mapping[str, Any]) -> None:
    screen.print(_tensors(report))
    screen.print(_operations(report["operations"], report["devices"], "operations"))
    for number, operations in enumerate(report["subgraphs"]):
        screen.print(_operations(operations, {}, f"subgraph {number}"))
    counts = ", ".join(f"{count} {name}" for name, count in report["counts"].items())
    screen.print(f"{sum(report['counts'].values())} operations: {counts}.")
    for line in _facts(report):
        screen.print(line)


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
    for name, found in report["devices"].items():
        facts.append(f"{name} supports {found['supported']} of {found['of']} operations.")
    return facts
