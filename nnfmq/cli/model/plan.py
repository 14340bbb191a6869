"""The execution plan of a model (`--plan`) for the devices of --device, or for all of a driver."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from nnfmq.cli.console import add_connect_argument

if TYPE_CHECKING:
    from nnfmq.client.partitioned.runtime import Runtime
    from nnfmq.hal.types import Model
    from nnfmq.planning.plan import ExecutionPlan

__all__ = ["add_plan_arguments", "plan_of"]


def add_plan_arguments(parser: argparse.ArgumentParser, device_help: str) -> None:
    """Declare --plan, --device and --connect."""
    parser.add_argument("--plan", action="store_true", help="with the plan: which device executes which operations")
    parser.add_argument("--device", metavar="NAME", action="append", default=[], help=device_help)
    add_connect_argument(parser)


def plan_of(arguments: argparse.Namespace, model: Model) -> ExecutionPlan | None:
    """Return the plan of `model`, None without --plan; blocks while the devices are asked. Nothing is prepared.

    Raises:
        InvalidArgument: If a device does not exist, or none supports an operation.
        NnfmqError: If no driver can be reached.
    """
    if not arguments.plan:
        return None
    from nnfmq.cli.model.inspection import shareable

    with ExitStack() as resources:
        model = shareable(model, resources)
        runtime = resources.enter_context(_runtime(arguments.connect))
        return runtime.plan(model, list(dict.fromkeys(arguments.device)) or None)


@contextmanager
def _runtime(target: str | None) -> Iterator[Runtime]:
    """Give the devices of the drivers that run, or of an embedded one if none does, or those of --connect."""
    import nnfmq

    if target is not None:
        is_embedded = target == "embedded"
        with nnfmq.Runtime([] if is_embedded else [target], embedded=is_embedded) as runtime:
            yield runtime
        return
    with nnfmq.Runtime() as found:
        if any(not device.is_cpu for device in found.devices()):
            yield found
            return
    with nnfmq.Runtime([], embedded=True) as runtime:
        yield runtime
