"""What a trace and the statistics cost: null bursts of one application and its driver, with and without them.

The trace points are absent, off and on; and off, while the driver counts no execution. In each round all four are
measured, in another order each time: the shortest of some batches of executions, because whatever else runs on the
machine only adds to their time. The result of a process pair is the median of the differences over its rounds; two
pairs differ in the addresses of their memory, so there are several. Reported are the medians of the pairs, and their
95 % intervals (order statistics). Client and driver have a CPU each.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from trace_switch import STATES, TraceSwitch, client_functions

from nnfmq.channel import Channel
from nnfmq.child_environment import child_environment
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType, Subgraph

_BATCHES, _EXECUTIONS, _WARM_UP = 20, 10, 150  # the interpreter adapts to switched code in the warm-up
_POLL_US = 1e6
_COSTS = {
    "off_cost_ns": ("off", "absent"),
    "on_cost_ns": ("on", "off"),
    "statistics_cost_ns": ("off", "uncounted"),
}


def measure(device: str, operations: int, rounds: int) -> dict[str, float]:
    """Return the medians of one process pair, in ns: times in each state, and differences. Needs $NNFMQ_TRACE."""
    import nnfmq
    from nnfmq.measure import cpu_pinning

    with ExitStack() as stack:
        commands = stack.enter_context(_switched_driver())
        client = stack.enter_context(nnfmq.connect(embedded=True, wait_ready=True))
        prepared = stack.enter_context(client.device(device).prepare(_model(operations), preference="sustained_speed"))
        burst: Any = stack.enter_context(prepared.burst(polling_window_us=_POLL_US))
        cpus = cpu_pinning.choose("apart", 0)
        cpu_pinning.pin_process(0, cpus.client)
        cpu_pinning.pin_process(client.driver_pid, cpus.driver)
        trace = burst._trace
        switch = TraceSwitch(client_functions(), lambda is_on: setattr(burst, "_trace", trace if is_on else None))
        burst.inputs[0][...] = np.float32(1)
        times: dict[str, list[float]] = {state: [] for state in STATES}
        for number in range(rounds):
            for position in range(len(STATES)):
                state = STATES[(number + position) % len(STATES)]
                _switch(commands, switch, state)
                times[state].append(_shortest(burst))
        _switch(commands, switch, "on")  # the client's functions are as before
    return _report(times)


@contextmanager
def _switched_driver() -> Iterator[socket.socket]:
    """Let embedded drivers be `trace_switch.py`; yield the socket for its commands."""
    from nnfmq.runtime import embedded_driver

    own, peer = socket.socketpair()
    usual, program = embedded_driver.start_embedded_driver, str(Path(__file__).with_name("trace_switch.py"))

    def started(variables: Mapping[str, str]) -> tuple[Channel, subprocess.Popen[bytes]]:
        client_end, driver_end = Channel.pair()
        with driver_end:
            fds = [driver_end.fileno(), peer.fileno()]
            command = [sys.executable, program, *map(str, fds)]
            environment = child_environment(variables)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment)
        return client_end, process

    with own, peer:
        embedded_driver.start_embedded_driver = started
        try:
            yield own
        finally:
            embedded_driver.start_embedded_driver = usual


def _switch(commands: socket.socket, switch: TraceSwitch, state: str) -> None:
    """Switch driver and client."""
    commands.sendall(bytes([STATES.index(state)]))
    if not commands.recv(1):
        raise OSError("the driver has exited")
    switch.set(state)


def _shortest(burst: Any) -> float:
    """Return the time of an execution in the shortest of some batches."""
    execute, outputs, clock = burst.execute, burst.outputs, time.perf_counter_ns
    for _ in range(_WARM_UP):
        execute(out=outputs)
    durations = []
    for _ in range(_BATCHES):
        begin_ns = clock()
        for _ in range(_EXECUTIONS):
            execute(out=outputs)
        durations.append(clock() - begin_ns)
    return min(durations) / _EXECUTIONS


def _model(operations: int) -> Model:
    """Return a model of `operations` LOGISTICs, one after the other, of one float."""
    lifetimes = [LifeTime.SUBGRAPH_INPUT, *[LifeTime.TEMPORARY_VARIABLE] * (operations - 1), LifeTime.SUBGRAPH_OUTPUT]
    operands = tuple(Operand(OperandType.TENSOR_FLOAT32, (1,), lifetime=lifetime) for lifetime in lifetimes)
    steps = tuple(Operation(OperationType.LOGISTIC, (index,), (index + 1,)) for index in range(operations))
    return Model(Subgraph(operands, steps, (0,), (operations,)))


# ---- the report


def _report(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    report = {f"{state}_ns": statistics.median(times[state]) for state in STATES}
    for name, (longer, shorter) in _COSTS.items():
        report[name] = statistics.median(map(operator.sub, times[longer], times[shorter]))
    return report


def interval(values: Iterable[float]) -> dict[str, float]:
    """Return the median of a sample, and the 95 % interval of the median that it was drawn from.

    The number of values below that has a binomial distribution, so the interval ends at the order statistics that are
    1.96 of its standard deviations, half the root of the number, away from the middle.
    """
    ordered = sorted(values)
    away = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(len(ordered) / 2 - away))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + away))
    return {"median": statistics.median(ordered), "low": ordered[low], "high": ordered[high]}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, each pair in processes of its own, and print the result; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="reference", help="default: reference")
    parser.add_argument("--operations", type=int, default=1, help="operations of the model (default: 1)")
    parser.add_argument("--pairs", type=int, default=15, help="process pairs (default: 15, a minute)")
    parser.add_argument("--rounds", type=int, default=100, help="of each pair (default: 100)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        print(json.dumps(measure(arguments.device, arguments.operations, arguments.rounds)))
        return 0
    options = [f"--{name}={getattr(arguments, name)}" for name in ("device", "operations", "rounds")]
    found = [_measured_pair(options) for _ in range(arguments.pairs)]
    report: dict[str, Any] = {name: getattr(arguments, name) for name in ("device", "operations", "pairs", "rounds")}
    for name in found[0]:
        report[name] = interval(each[name] for each in found)
    print(json.dumps(report, indent=2))
    return 0


def _measured_pair(options: Sequence[str]) -> dict[str, float]:
    """Return the medians of a new process pair."""
    with tempfile.TemporaryDirectory() as folder:
        paths = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        added = {"NNFMQ_TRACE": str(Path(folder, "trace.json")), "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, __file__, "--measure", *options]
        done = subprocess.run(command, env=os.environ | added, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
