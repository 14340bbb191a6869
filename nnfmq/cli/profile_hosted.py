"""`nnfmq profile` of a model that a hosted runtime runs: to the driver it is one operation.

The runtime keeps the times of its own operators to itself: ONNX Runtime writes them to a file, which a worker may not.
So the report has the time of that operation, as the driver measures it, and that of whole executions over a burst.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median_low
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import console, microseconds, open_client, print_json, table
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from nnfmq.cli.inputs import Array
    from nnfmq.importers import LoadedModel

__all__ = ["print_report", "profile_hosted"]

_RUNS = 100
_WARM_UP_RUNS = 3


def profile_hosted(
    arguments: argparse.Namespace, device: str, model: LoadedModel, inputs: Sequence[Array]
) -> dict[str, Any]:
    """Execute a hosted model on its device and return the report; `arguments` are those of `nnfmq profile`. Blocks.

    Raises:
        InvalidArgument: If an option is about nnfmq's own engine.
        NnfmqError: Those of the preparation and of an execution.
    """
    for option in ("threads", "arena", "html"):
        if getattr(arguments, option):
            raise InvalidArgument(f"--{option} is about nnfmq's own engine; this model runs on the device {device}")
    runs = arguments.runs or _RUNS
    wholes: list[int] = []
    operations: list[int] = []
    with (
        open_client(arguments.connect) as client,
        client.device(device).prepare(model) as prepared,
        prepared.burst() as burst,
    ):
        for run in range(_WARM_UP_RUNS + runs):
            begin_ns = time.perf_counter_ns()
            burst.execute(*inputs, measure=True)
            end_ns = time.perf_counter_ns()
            if run >= _WARM_UP_RUNS:
                wholes.append(end_ns - begin_ns)
                operations.append(burst.last.timing.time_on_device_ns)
    return {
        "model": str(arguments.model),
        "device": device,
        "where": "in the driver",
        "runs": runs,
        "inputs": [str(path) for path in arguments.input] or f"random, seed {arguments.seed}",
        "run_ns": {"p50": median_low(wholes), "min": min(wholes)},
        "operations": [_operation(model, operations)],
    }


def _operation(model: LoadedModel, times: Sequence[int]) -> dict[str, Any]:
    from nnfmq.hal.hosted import call_of
    from nnfmq.hal.summaries import code_name

    (operation,) = model.model.main.operations
    return {
        "number": 0,
        "operation": code_name(operation.type),
        "p50_ns": median_low(times),
        "min_ns": min(times),
        "share": 1.0,
        "files": [file.name for file in call_of(model.model).files],
    }


def print_report(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Print a report of `profile_hosted`, as JSON if that is asked for."""
    if arguments.json:
        print_json(report)
        return
    from nnfmq.lab.conditions import machine_text

    screen = console(arguments.no_color)
    rows = table(">", "operation", ">p50 µs", ">min µs", "files")
    for one in report["operations"]:
        times = (microseconds(one[key]) for key in ("p50_ns", "min_ns"))
        rows.add_row(str(one["number"]), one["operation"], *times, ", ".join(one["files"]))
    screen.print(rows)
    whole = report["run_ns"]
    screen.print(
        f"A run over a burst takes {microseconds(whole['p50'])} µs (p50), {microseconds(whole['min'])} µs (min)."
    )
    screen.print(
        f"The model is one operation on the device {report['device']}: its runtime does not tell the time of operators."
    )
    screen.print(machine_text(report["conditions"]))
