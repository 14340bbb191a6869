"""The cost of trace points and of the statistics: a burst's latency with the trace absent, off, on, and uncounted.

    python tools/trace_bench.py --pairs 30

Off, the functions of the hot path find that nothing records. Absent, they do not even look: their source is compiled
without the statements that do. Uncounted, the trace is off, and the driver does not count executions. One process pair,
an embedded driver and its client, is switched to all states in each round, so that other load affects all of them. The
figures are medians over process pairs, with the 95 % interval of the median, because two pairs differ by more than the
costs. As the driver, the program reads one byte for each switch, the number of the state, and sends it back.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import inspect
import json
import math
import operator
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from bench_support import call_in_child

from nnfmq.base.channel import Channel
from nnfmq.base.processes import child_environment
from nnfmq.hal.types import LifeTime, Model, Operand, OperandType, Operation, OperationType, Subgraph

# ---- the switch


STATES = ("absent", "off", "on", "uncounted")
_NOTHING = ("self._trace", "TRACING.recorder", "WORKER_TRACE.switch[0]")
"""What is None, or 0, while nothing records."""


class _WithoutTrace(ast.NodeTransformer):
    """Removes what depends on an expression of `_NOTHING`, or on a variable that has its value."""

    def __init__(self) -> None:
        self._names = set(_NOTHING)

    def _is_nothing(self, node: ast.AST) -> bool:
        return ast.unparse(node) in self._names

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        if self._is_nothing(node.value):
            self._names.add(ast.unparse(node.targets[0]))
            return None
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if self._is_nothing(node.left) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            return ast.Constant(isinstance(node.ops[0], ast.Is))
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        are_false = [self._is_nothing(each) or ast.unparse(each) == "False" for each in node.values]
        is_false = any(are_false) if isinstance(node.op, ast.And) else all(are_false)
        return ast.Constant(False) if is_false else node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if self._is_nothing(node.test):
            return node.orelse
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node


class _WithoutStatistics(ast.NodeTransformer):
    """Removes the calls that count an execution."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if ast.unparse(node).startswith("self._recorder.add(") else node


def _changed_code(function: FunctionType, change: ast.NodeTransformer) -> CodeType:
    """Return the code of a function whose source was changed."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    changed = ast.fix_missing_locations(change.visit(tree))
    names: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(changed, function.__code__.co_filename, "exec", flags), function.__globals__, names)
    code: CodeType = names[function.__name__].__code__
    return code


def without_trace(function: FunctionType) -> CodeType:
    """Return the code of a function without its trace points.

    Raises:
        ValueError: If it has none, or some are left.
    """
    code = _changed_code(function, _WithoutTrace())
    traced = {"_trace", "TRACING", "WORKER_TRACE"}
    if not traced & {*function.__code__.co_names} or traced & {*code.co_names}:
        raise ValueError(f"{function.__qualname__}: its trace points are not those that this tool knows")
    return code


def without_statistics(function: FunctionType) -> CodeType:
    """Return the code of a function that does not count what it executes.

    Raises:
        ValueError: If the function itself does not either.
    """
    code = _changed_code(function, _WithoutStatistics())
    if code.co_code == function.__code__.co_code:
        raise ValueError(f"{function.__qualname__} counts nothing")
    return code


class _Variants(NamedTuple):
    function: FunctionType
    usual: CodeType
    others: dict[str, CodeType]  # by state


class TraceSwitch:
    """Switches functions of this process; `record` is called with whether slices are to be recorded.

    `traced` are the functions with trace points, `counting` those that count executions.
    """

    def __init__(
        self, traced: Sequence[FunctionType], record: Callable[[bool], object], counting: Sequence[FunctionType] = ()
    ) -> None:
        self._variants = [_Variants(each, each.__code__, {"absent": without_trace(each)}) for each in traced]
        self._variants += [_Variants(each, each.__code__, {"uncounted": without_statistics(each)}) for each in counting]
        self._record = record

    def set(self, state: str) -> None:
        """Switch to one of STATES. Each switch makes the interpreter adapt to the code again, whatever the state is."""
        for function, usual, others in self._variants:
            function.__code__ = others.get(state, usual)
        self._record(state == "on")


def client_functions() -> list[FunctionType]:
    """Return the functions of a burst's execution that have trace points."""
    from nnfmq.client.burst.controller import Burst

    functions: list[Any] = [Burst._execute]
    return functions


def driver_functions() -> list[FunctionType]:
    """Return the functions of the driver that have trace points and run for each execution over a burst."""
    from nnfmq.driver.execution.burst import BurstServer
    from nnfmq.engines.compiled.executor import CompiledPartition
    from nnfmq.engines.execution import BoundSteps

    functions: list[Any] = [BurstServer._receive_and_handle, BoundSteps.run, CompiledPartition.__call__]
    return functions


def counting_functions() -> list[FunctionType]:
    """Return the functions of the driver that count the executions over a burst."""
    from nnfmq.driver.execution.burst import BurstServer

    functions: list[Any] = [BurstServer._handle]
    return functions


def _obey(commands: socket.socket) -> None:
    """Switch this process as the commands say, until the client has exited. The first comes after its StartTrace."""
    from nnfmq.driver.process.trace import WORKER_TRACE
    from nnfmq.observe.trace_points import TRACING

    command = commands.recv(1)
    recorder, records = TRACING.recorder, WORKER_TRACE.switch

    def record(is_on: bool) -> None:
        TRACING.recorder, WORKER_TRACE.switch = (recorder, records) if is_on else (None, (0,))

    switch = TraceSwitch(driver_functions(), record, counting_functions())
    while command:
        switch.set(STATES[command[0]])
        commands.sendall(command)
        command = commands.recv(1)


def run_driver(control_fd: int, commands_fd: int) -> None:
    """Be an embedded driver at these descriptors. Never returns."""
    from nnfmq.driver.process import embedded, embedded_session

    run_session = vars(embedded_session)["run_session"]

    def run(*arguments: Any) -> None:  # after the compile server was forked, which needs a process with one thread
        threading.Thread(target=_obey, args=(socket.socket(fileno=commands_fd),), daemon=True).start()
        run_session(*arguments)

    vars(embedded_session)["run_session"] = run
    embedded.main(control_fd)


# ---- the program


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
    from nnfmq.lab import placement

    with ExitStack() as stack:
        commands = stack.enter_context(_switched_driver())
        client = stack.enter_context(nnfmq.connect(embedded=True, wait_ready=True))
        prepared = stack.enter_context(client.device(device).prepare(_model(operations), preference="sustained_speed"))
        burst: Any = stack.enter_context(prepared.burst(polling_window_us=_POLL_US))
        cpus = placement.choose("apart", 0)
        placement.pin_process(0, cpus.client)
        placement.pin_process(client.driver_pid, cpus.driver)
        trace = burst._trace
        switch = TraceSwitch(client_functions(), lambda is_on: setattr(burst, "_trace", trace if is_on else None))
        burst.inputs[0][...] = 1
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
    """Let embedded drivers be this program with --driver; yield the socket for its commands."""
    from nnfmq.client.connection import embedded

    own, peer = socket.socketpair()
    usual, program = embedded.start_embedded_driver, __file__

    def started(variables: Mapping[str, str]) -> tuple[Channel, subprocess.Popen[bytes]]:
        client_end, driver_end = Channel.pair()
        with driver_end:
            fds = [driver_end.fileno(), peer.fileno()]
            command = [sys.executable, program, "--driver", *map(str, fds)]
            environment = child_environment(variables)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment)
        return client_end, process

    with own, peer:
        embedded.start_embedded_driver = started
        try:
            yield own
        finally:
            embedded.start_embedded_driver = usual


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
    parser.add_argument("--driver", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.driver:
        run_driver(*arguments.driver)
    asked = arguments.device, arguments.operations, arguments.rounds
    found = [_measured_pair(*asked) for _ in range(arguments.pairs)]
    report: dict[str, Any] = {name: getattr(arguments, name) for name in ("device", "operations", "pairs", "rounds")}
    for name in found[0]:
        report[name] = interval(each[name] for each in found)
    print(json.dumps(report, indent=2))
    return 0


def _measured_pair(device: str, operations: int, rounds: int) -> dict[str, float]:
    """Return the medians of a new process pair."""
    with tempfile.TemporaryDirectory() as folder:
        trace = {"NNFMQ_TRACE": str(Path(folder, "trace.json"))}
        found: dict[str, float] = call_in_child(measure, device, operations, rounds, environment=trace)
    return found


if __name__ == "__main__":
    import trace_bench  # by its name, by which child processes import it

    sys.exit(trace_bench.main())
