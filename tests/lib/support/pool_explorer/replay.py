"""The behaviour of a thread as a tree: each node stops at one access, and each of its results is an edge.

A thread is a series of calls; what it remembers between them is its `progress`. Histories that lead to the same
progress continue as one. Within a call the node is the list of results so far.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.places import ROOT

__all__ = ["DONE", "Access", "Call", "Node", "Program", "SeededBug", "build"]

HEADER = ROOT / "nnfmq" / "engines" / "compiled" / "_thread_pool.h"
_HERE = Path(__file__).parent
_LIMIT_S = 60
_MOST_ACCESSES = 300  # of one call; more than any that ends

KINDS = ("done", "read", "write", "load", "store", "add", "exchange", "compare", "wait", "wake")
DONE = "done"
_ORDERS = {0: "relaxed", 2: "acquire", 3: "release", 4: "acq_rel", 5: "seq_cst"}


@dataclass(frozen=True)
class SeededBug:
    """One change to the header: `old`, which must be there exactly once, becomes `new`."""

    old: str
    new: str


class _Operation(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("kind", "place", "size", "operand", "expected", "order")]


@dataclass(frozen=True, slots=True)
class Access:
    """What a thread does next. `place` is the offset of a word in the pool, then in the data of the launches."""

    kind: str
    place: int
    size: int
    operand: int
    expected: int
    order: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of program.c."""

    function: str
    argument: int
    state: tuple[int, ...]


class Node:
    """A thread stopped at `access`; `result` is a finished call's."""

    __slots__ = ("access", "edges", "history", "progress")

    def __init__(self, progress: Any, history: tuple[int, ...], access: Access) -> None:
        self.progress, self.history, self.access = progress, history, access
        self.edges: dict[int, Node] = {}


@dataclass(frozen=True)
class Library:
    """The compiled program, for `workers` workers."""

    code: ctypes.CDLL
    workers: int
    pool_bytes: int

    def replay(self, call: Call, history: Sequence[int]) -> tuple[Access, tuple[int, ...]]:
        """Return the access that `call` makes after the results in `history`, and the call's state then."""
        state = (ctypes.c_int64 * 3)(*call.state)
        op = _Operation()
        self.code.explored_replay(
            ctypes.cast(getattr(self.code, call.function), ctypes.c_void_p), ctypes.c_int64(call.argument), state,
            (ctypes.c_int64 * (len(history) + 1))(*history), ctypes.c_int64(len(history)),
            ctypes.c_int64(self.workers), ctypes.byref(op),
        )  # fmt: skip
        kind, order = KINDS[op.kind], _ORDERS[op.order]
        return Access(kind, op.place, op.size, op.operand, op.expected, order), tuple(state)


def build(folder: Path, workers: int, spins: tuple[int, int, int], bugs: Sequence[SeededBug] = ()) -> Library:
    """Compile program.c with the header, changed by `bugs`, and load it. `folder` is for this build alone."""
    text = HEADER.read_text("utf-8")
    for bug in bugs:
        assert text.count(bug.old) == 1, f"{bug.old!r} is there {text.count(bug.old)} times: adapt the bug"
        text = text.replace(bug.old, bug.new)
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "_pause.h").write_text((ROOT / "nnfmq" / "_pause.h").read_text("utf-8"))
    (folder / "a" / "b" / "_thread_pool.h").write_text(text)
    (folder / "a" / "b" / "_core_division.h").write_text(HEADER.with_name("_core_division.h").read_text("utf-8"))
    compiler = [shutil.which("cc") or "cc", "-std=c11", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    names = ("IDLE", "BUSY", "AWAIT")
    options = [f"-DNNFMQ_POOL_{name}_SPINS={count}" for name, count in zip(names, spins, strict=True)]
    instrumented = ["-fsanitize=thread", "-I", str(folder / "a" / "b"), *options]
    for name, flags in (("program", instrumented), ("hooks", [])):
        _run([*compiler, *flags, "-c", str(_HERE / f"{name}.c"), "-o", str(folder / f"{name}.o")])
    target = folder / "explored.so"
    _run(
        [
            *compiler,
            "-shared",
            "-Wl,-z,defs",
            *(str(folder / f"{n}.o") for n in ("program", "hooks")),
            "-o",
            str(target),
        ]
    )
    code = ctypes.CDLL(str(target))
    return Library(code, workers, (ctypes.c_uint64 * 2).in_dll(code, "explored_sizes")[0])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


class Program:
    """A thread and its nodes created so far.

    `next_call` returns what it calls at a progress, None at the end; `fold` returns the progress after a call's result
    and state, or raises.
    """

    def __init__(
        self, name: str, library: Library, first: Any, next_call: Callable[[Any], Call | None],
        fold: Callable[[Any, int, tuple[int, ...]], Any],
    ) -> None:  # fmt: skip
        self.name, self._library, self._next_call, self._fold = name, library, next_call, fold
        self._beginnings: dict[Any, Node] = {}
        self.node_count = 0
        self.root = self._begin(first)

    def advance(self, node: Node, result: int) -> Node:
        """Return the node that follows `node` after `result`."""
        known = node.edges.get(result)
        if known is None:
            known = node.edges[result] = self._at(node.progress, (*node.history, result))
        return known

    def _begin(self, progress: Any) -> Node:
        if progress not in self._beginnings:
            self._beginnings[progress] = self._at(progress, ())
        return self._beginnings[progress]

    def _at(self, progress: Any, history: tuple[int, ...]) -> Node:
        call = self._next_call(progress)
        assert len(history) <= _MOST_ACCESSES, f"{self.name}: a call made more than {_MOST_ACCESSES} accesses"
        if call is None:
            self.node_count += 1
            return Node(progress, (), Access(DONE, -1, 0, 0, 0, "relaxed"))
        access, state = self._library.replay(call, history)
        if access.kind == DONE:
            return self._begin(self._fold(progress, access.operand, state))
        self.node_count += 1
        return Node(progress, history, access)
