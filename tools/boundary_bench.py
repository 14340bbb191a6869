"""The cost of a boundary between two devices: a burst of a plan of two steps, minus the bursts of its steps alone.

Two embedded drivers execute one step each: an ADD of two vectors, whose result is the other step's input. The same
process executes a burst of the plan and a burst of each step in turn, without copying arguments, so that all of them
meet the same disturbances. For each size: the medians of a round, and the cost, which is the plan's median minus the
sum of the steps'. The table has the median over the rounds, and the smallest and the largest cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import nnfmq
from nnfmq.client.partitioned.model import PartitionedModel
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import DataLocation, LifeTime, Model, Operand, OperandType, Operation, OperationType, Subgraph
from nnfmq.planning.plan import MAIN, ExecutionPlan, ExecutionStep, OperandKey

SIZES = (1024, 4096, 1 << 20)
_WARM_UP = 200


def chain(adds: int, floats: int) -> Model:
    """Return a model that adds input 1 to input 0 as often; operand 0 and 1 are the inputs, 3 the first sum."""
    tensor, kind = OperandType.TENSOR_FLOAT32, LifeTime
    lifetimes = [kind.SUBGRAPH_INPUT] * 2 + [kind.CONSTANT_COPY] + [kind.TEMPORARY_VARIABLE] * adds
    operands = [Operand(tensor, (floats,), lifetime=lifetime) for lifetime in lifetimes]
    operands[2] = Operand(OperandType.INT32, (), lifetime=kind.CONSTANT_COPY, location=DataLocation(0, 0, 4))
    operands[-1] = Operand(tensor, (floats,), lifetime=kind.SUBGRAPH_OUTPUT)
    sums = [0, *range(3, 3 + adds)]
    operations = [Operation(OperationType.ADD, (a, 1, 2), (b,)) for a, b in pairwise(sums)]
    return Model(Subgraph(tuple(operands), tuple(operations), (0, 1), (sums[-1],)), operand_values=bytes(4))


def plan_of_two(floats: int) -> ExecutionPlan:
    """Return the plan that executes the first ADD of two on one device and the second on another."""
    steps = []
    for index, (source, target) in enumerate(((0, 3), (3, 4))):
        inputs, outputs = (OperandKey(MAIN, source), OperandKey(MAIN, 1)), (OperandKey(MAIN, target),)
        steps.append(ExecutionStep(index, MAIN, (index,), chain(1, floats), inputs, outputs))
    return ExecutionPlan(chain(2, floats), ("first", "second"), tuple(steps), (OperandKey(MAIN, 3),))


def measure(size_bytes: int, rounds: int, executions: int, device: str, window_us: float | None) -> dict[str, Any]:
    """Return the medians in µs for one size, and the cost of the boundary."""
    floats = size_bytes // 4
    plan = plan_of_two(floats)
    inputs = tuple(TensorInfo(f"input {i}", (floats,), "float32") for i in range(2))
    with ExitStack() as stack:
        clients = [stack.enter_context(nnfmq.connect(embedded=True)) for _ in range(2)]
        steps = [
            client.device(device).prepare(step.model)
            for client, step in zip(clients, plan.execution_steps, strict=True)
        ]
        outputs = (TensorInfo("output 0", (floats,), "float32"),)
        model = stack.enter_context(PartitionedModel(plan, steps, None, inputs, outputs))
        bursts = [stack.enter_context(step.burst(polling_window_us=window_us)) for step in steps]
        calls = [_call(burst) for burst in (stack.enter_context(model.burst(polling_window_us=window_us)), *bursts)]
        _round(calls, _WARM_UP)
        found = [_round(calls, executions) for _ in range(rounds)]
    costs = [plan_us - first - second for plan_us, first, second in found]
    columns = [statistics.median(column) for column in zip(*found, strict=True)]
    return {
        "bytes": size_bytes,
        "plan_us": columns[0],
        "steps_us": columns[1:],
        "cost_us": statistics.median(costs),
        "cost_min_us": min(costs),
        "cost_max_us": max(costs),
    }


def _call(burst: Any) -> Callable[[], object]:
    for array in burst.inputs:
        array[...] = 1
    outputs = burst.outputs
    return lambda: burst.execute(out=outputs)


def _round(calls: Sequence[Callable[[], object]], executions: int) -> list[float]:
    """Return the median time of each call in µs; the calls take turns."""
    times: list[list[int]] = [[] for _ in calls]
    clock = time.perf_counter_ns
    for _ in range(executions):
        for call, found in zip(calls, times, strict=True):
            begin_ns = clock()
            call()
            found.append(clock() - begin_ns)
    return [statistics.median(found) / 1e3 for found in times]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cpus", default="", help="CPUs of all three processes, such as 0,1 (default: unchanged)")
    parser.add_argument("--device", default="reference", help="of each driver (default: reference)")
    parser.add_argument("--window", type=float, default=None, metavar="US", help="polling window of the client")
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    parser.add_argument("--executions", type=int, default=300, help="of each in a round (default: 300)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    if arguments.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in arguments.cpus.split(",")})  # the drivers inherit it
    measured = [measure(size, arguments.rounds, arguments.executions, arguments.device, arguments.window)
                for size in SIZES]  # fmt: skip
    cpus = sorted(os.sched_getaffinity(0))
    if arguments.json:
        print(json.dumps({"cpus": cpus, "device": arguments.device, "sizes": measured}, indent=2))
        return 0
    print(f"CPUs {cpus}, device {arguments.device}; medians in µs")
    print("   bytes     plan   step 1   step 2    cost (smallest, largest)")
    for row in measured:
        first, second = row["steps_us"]
        spread = f"({row['cost_min_us']:.1f}, {row['cost_max_us']:.1f})"
        print(f"{row['bytes']:8} {row['plan_us']:8.1f} {first:8.1f} {second:8.1f} {row['cost_us']:7.1f} {spread}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
