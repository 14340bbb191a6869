"""An embedded driver, and a client's burst, whose trace and statistics can be switched. For `trace_bench.py`.

The trace is on, off, or absent. Off, the functions of the hot path find that nothing records. Absent, they do not even
look: their source is compiled without the statements that do. Uncounted, the trace is off, and the driver does not
count executions. So one process pair can show the cost of each. As a program it is the driver:

    python tools/trace_switch.py CONTROL_FD COMMANDS_FD

It reads one byte for each switch from COMMANDS_FD, the number of the state, and sends it back when it has switched.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

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
    from nnfmq.runtime.burst_controller import Burst

    functions: list[Any] = [Burst._execute]
    return functions


def driver_functions() -> list[FunctionType]:
    """Return the functions of the driver that have trace points and run for each execution over a burst."""
    from nnfmq.engines.compiled.executor import CompiledPartition
    from nnfmq.engines.execution import BoundSteps
    from nnfmq.service.burst_server import BurstServer

    functions: list[Any] = [BurstServer._receive_and_handle, BoundSteps.run, CompiledPartition.__call__]
    return functions


def counting_functions() -> list[FunctionType]:
    """Return the functions of the driver that count the executions over a burst."""
    from nnfmq.service.burst_server import BurstServer

    functions: list[Any] = [BurstServer._handle]
    return functions


def _obey(commands: socket.socket) -> None:
    """Switch this process as the commands say, until the client has exited. The first comes after its StartTrace."""
    from nnfmq.observe.trace_points import TRACING
    from nnfmq.service.worker_trace import WORKER_TRACE

    command = commands.recv(1)
    recorder, records = TRACING.recorder, WORKER_TRACE.switch

    def record(is_on: bool) -> None:
        TRACING.recorder, WORKER_TRACE.switch = (recorder, records) if is_on else (None, (0,))

    switch = TraceSwitch(driver_functions(), record, counting_functions())
    while command:
        switch.set(STATES[command[0]])
        commands.sendall(command)
        command = commands.recv(1)


def main(argv: Sequence[str]) -> None:
    """Be an embedded driver at the descriptors in `argv`. Never returns."""
    from nnfmq.service import embedded_main, embedded_session

    control_fd, commands_fd = map(int, argv)
    run_session = vars(embedded_session)["run_session"]

    def run(*arguments: Any) -> None:  # after the compile server was forked, which needs a process with one thread
        threading.Thread(target=_obey, args=(socket.socket(fileno=commands_fd),), daemon=True).start()
        run_session(*arguments)

    vars(embedded_session)["run_session"] = run
    embedded_main.main(control_fd)


if __name__ == "__main__":
    main(sys.argv[1:])
