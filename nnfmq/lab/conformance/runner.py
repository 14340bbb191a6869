"""Run many test models and yield the results in the order of the sources, whatever runs concurrently.

A source is a file, or a batch of random graphs, which are generated where they run. A random graph that fails is
written to a file, which is a valid source.

With one job everything runs in this process. With more, each job is a process with its own driver, if it uses one. It
gets sources, and sends the result of each test model. A job exits when the connection closes, so no job outlives this
process. Results of later sources are held here until the earlier sources are complete; they contain outcomes, not
models.
"""

from __future__ import annotations

import math
import queue
import re
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from nnfmq.hal.errors import GeneralFailure
from nnfmq.lab.child_processes import BenchmarkFailed, ChildEnded, FunctionProcess, started_child
from nnfmq.lab.conformance.cases import ConformanceResult, run_test
from nnfmq.lab.conformance.driver_targets import ALL_PATHS, DRIVER_PATHS, Driver
from nnfmq.lab.conformance.random_graphs import Batch
from nnfmq.lab.conformance.runtime_targets import RUNTIME_PATHS, RuntimeTarget, arrangement
from nnfmq.lab.conformance.stepwise import StepwiseEngine
from nnfmq.lab.conformance.targets import CompilingEngine, ExecutionTarget, Interpreter
from nnfmq.lab.conformance.testmodels import FormatError, Line, dump, lines, read, read_at

__all__ = ["Settings", "chosen", "count", "open_target", "run_sources"]


# ----------------------------------------------------------------------------------------------------------------------
# The names of the execution paths, and the target of each.


_ENGINES = {"interpreter": Interpreter, "compiled": CompilingEngine, "compiled-steps": StepwiseEngine}
PATHS = (*_ENGINES, *DRIVER_PATHS, ALL_PATHS, *RUNTIME_PATHS)


def open_target(path: str, device: str, connect_to: str | None, partition: str = "") -> ExecutionTarget:
    """Return the target of an execution path, which connects when first used. The caller closes it."""
    if path in _ENGINES:
        return _ENGINES[path]()
    if path in RUNTIME_PATHS:
        return RuntimeTarget(path, arrangement(partition, device, connect_to))
    return Driver(device, connect_to, path)


# ----------------------------------------------------------------------------------------------------------------------
# Run many test models and yield the results in the order of the sources, whatever runs concurrently.


Source = Path | Batch


@dataclass(frozen=True, slots=True)
class Settings:
    """Execution path, device, driver (as in --connect), and the expression that selects tests by name.

    `partition` says how a runtime divides models, see `runtime_targets.arrangement`. `dump_to` is the folder for random
    graphs that fail; if empty, they are not written.
    """

    path: str = "interpreter"
    device: str = "reference"
    connect_to: str | None = None
    pattern: str = ""
    dump_to: str = ""
    partition: str = ""

    def open_target(self) -> ExecutionTarget:
        """Return the target, which connects when first used. The caller closes it."""
        return open_target(self.path, self.device, self.connect_to, self.partition)


def chosen(source: Source, pattern: str) -> Iterator[tuple[int, Line]]:
    """Yield the test models of a source whose name matches the expression, with line numbers or seeds."""
    search = re.compile(pattern)
    if isinstance(source, Batch):
        return source.lines(search)
    return ((number, line) for number, line in lines(source) if search.search(line["name"]))


def count(sources: Sequence[Source], pattern: str) -> int:
    """Return the number of test models that will run. Reads all files, but generates no graphs. Raises FormatError."""
    search = re.compile(pattern)
    return sum(
        len(source.seeds(search)) if isinstance(source, Batch) else sum(1 for _ in chosen(source, pattern))
        for source in sources
    )


def run_sources(sources: Sequence[Source], settings: Settings, jobs: int) -> Generator[ConformanceResult, None, None]:
    """Yield the result of each test model, in order. Closing the iterator ends the run and its processes.

    Raises FormatError, and the errors of connecting to the driver and its device.
    """
    if jobs == 1:
        return _run_here(sources, settings)
    return _run_in_jobs(sources, settings, min(jobs, len(sources)))


def _run_here(sources: Sequence[Source], settings: Settings) -> Generator[ConformanceResult, None, None]:
    with closing(settings.open_target()) as target:
        _ = target.feature_level  # raises here if the device does not exist: that is not a failed test
        for source in sources:
            yield from _run_source(source, settings, target)


def _run_source(source: Source, settings: Settings, target: ExecutionTarget) -> Iterator[ConformanceResult]:
    for number, line in chosen(source, settings.pattern):
        if not isinstance(source, Batch):
            yield run_test(read_at(source, number, line), target)
            continue
        result = run_test(read(line), target)
        yield replace(result, dumped=dump(line, settings.dump_to)) if result.has_failed else result


# ------------------------------------------------------------------------------------------------ jobs

_JobReply = ConformanceResult | BaseException | None


def _run_in_jobs(sources: Sequence[Source], settings: Settings, jobs: int) -> Generator[ConformanceResult, None, None]:
    with closing(settings.open_target()) as target:
        _ = target.feature_level
    replies: queue.SimpleQueue[tuple[int, _JobReply]] = queue.SimpleQueue()
    work = iter(enumerate(sources))
    lock = threading.Lock()
    with ExitStack() as stack:
        for _ in range(jobs):
            process = stack.enter_context(started_child(_serve, settings, name="a job failed"))
            thread = threading.Thread(target=_feed, args=(process, work, lock, replies), daemon=True)
            stack.callback(thread.join)
            stack.callback(process.kill)  # runs before the join, so that the thread finds its pipe closed
            thread.start()
        yield from _in_order(replies, len(sources))


def _feed(
    process: FunctionProcess,
    work: Iterator[tuple[int, Source]],
    lock: threading.Lock,
    replies: queue.SimpleQueue[tuple[int, _JobReply]],
) -> None:
    """Send sources to a job, and put its results into the queue; None ends a source."""
    while True:
        with lock:
            number, source = next(work, (-1, Path()))
        if number < 0:
            return
        try:
            for result in _results_of(process, source):
                replies.put((number, result))
        except (FormatError, GeneralFailure) as error:
            replies.put((number, error))
            return
        replies.put((number, None))


def _results_of(process: FunctionProcess, source: Source) -> Iterator[ConformanceResult]:
    last = "no test"
    process.send(source)
    try:
        while (reply := process.receive(math.inf)) is not None:
            result = msgspec.msgpack.decode(reply, type=ConformanceResult)
            last = result.name
            yield result
    except ChildEnded:
        raise GeneralFailure(f"a job died in {_label(source)} after {last}; --jobs 1 shows why") from None
    except BenchmarkFailed as error:
        raise GeneralFailure(f"{error}, in {_label(source)} after {last}; --jobs 1 shows why") from None


def _label(source: Source) -> str:
    return source.class_name if isinstance(source, Batch) else str(source)


def _in_order(replies: queue.SimpleQueue[tuple[int, _JobReply]], file_count: int) -> Iterator[ConformanceResult]:
    waiting: list[list[ConformanceResult]] = [[] for _ in range(file_count)]
    ended = [False] * file_count
    due = 0
    while due < file_count:
        number, reply = replies.get()
        if isinstance(reply, BaseException):
            raise reply
        if reply is None:
            ended[number] = True
        else:
            waiting[number].append(reply)
        while due < file_count:
            yield from waiting[due]
            waiting[due] = []
            if not ended[due]:
                break
            due += 1


def _serve(connection: Any, settings: Settings) -> None:
    """Main loop of a job: run each source that it gets, and send the results, and None at the end.

    Results are encoded with msgspec: dill takes 0.5 ms for one, a quarter of what a small test does.
    """
    with closing(settings.open_target()) as target:
        while True:
            source = connection.recv()
            try:
                for result in _run_source(source, settings, target):
                    connection.send(msgspec.msgpack.encode(result))
            except FormatError as error:
                connection.send(error)
            else:
                connection.send(None)
