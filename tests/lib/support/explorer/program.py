"""The behaviour of a thread as a tree: each node stops at one operation, and each of its results is an edge.

A thread is a series of calls on its queues; `progress` is its whole state between them, so histories that lead to the
same progress continue as one. Within a call the node is the list of results so far. Nodes are created on first use, by
running the Python core from the call's beginning; following an existing edge is a dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from nnfmq.hal.errors import NnfmqError
from support.explorer.instrumented_runtime import Machine, Op, ProcessQueues, Run, Stopped

Call = Callable[[ProcessQueues], object]
MAX_STEPS = 120  # of one call; far more than any that ends

END: Op = ("end",)


class Violation(AssertionError):
    """A schedule under which the queue violates its specification."""

    def __init__(self, what: str, schedule: tuple[str, ...] = ()) -> None:
        super().__init__("\n  ".join([what, *schedule]))
        self.what, self.schedule = what, schedule


@dataclass(frozen=True)
class Thread:
    """One thread: `next_call` names what it does at a progress (None = nothing more), `fold` takes the result in.

    `fold` raises Violation for a result that may not be. A thread that is not `needed` may be left over at the end.
    One that `reads` payload may see it old, in the model that allows that.
    """

    name: str
    process: str
    next_call: Callable[[Any], Call | None]
    fold: Callable[[Any, Any], Hashable]
    first: Hashable = 0
    has_deadline: bool = False
    is_watched: bool = False
    needed: bool = True
    reads: bool = False


class Node:
    """A thread stopped at `op`."""

    __slots__ = ("edges", "history", "number", "op", "progress")

    def __init__(self, number: int, progress: Any, history: tuple[Any, ...], op: Op) -> None:
        self.number, self.progress, self.history, self.op = number, progress, history, op
        self.edges: dict[Any, Node] = {}

    def __repr__(self) -> str:
        return f"#{self.number} at {self.op}"


class Program:
    """A thread and its nodes created so far."""

    def __init__(self, machine: Machine, thread: Thread, defers: bool) -> None:
        self.machine, self.thread, self.defers = machine, thread, defers
        self.node_count = 0
        self._beginnings: dict[Any, Node] = {}
        self.root = self._begin(thread.first)

    def advance(self, node: Node, result: Any) -> Node:
        """Return the node that follows `node` after `result`."""
        known = node.edges.get(result)
        if known is None:
            known = node.edges[result] = self._run(node.progress, (*node.history, result))
        return known

    def _begin(self, progress: Any) -> Node:
        if progress not in self._beginnings:
            self._beginnings[progress] = self._run(progress, ())
        return self._beginnings[progress]

    def _run(self, progress: Any, history: tuple[Any, ...]) -> Node:
        call = self.thread.next_call(progress)
        if call is None:
            return self._node(progress, (), END)
        if len(history) > MAX_STEPS:
            raise Violation(f"{self.thread.name}: a call took more than {MAX_STEPS} steps")
        run = self.machine.run = Run(history, self.thread.has_deadline)
        try:
            result = self._result(call, run)
        except Stopped:
            assert run.waits_for is not None
            return self._node(progress, history, run.waits_for)
        return self._begin(self.thread.fold(progress, result))

    def _result(self, call: Call, run: Run) -> object:
        try:
            result = call(ProcessQueues(self.machine, self.thread.process, self.thread.is_watched))
        except NnfmqError as error:
            return error
        if self.defers and run.copies:
            values = run.perform(("resolve",))
            return bytes(values[number] for number in result) if isinstance(result, bytes) else result
        return result

    def _node(self, progress: Any, history: tuple[Any, ...], op: Op) -> Node:
        self.node_count += 1
        return Node(self.node_count, progress, history, op)
