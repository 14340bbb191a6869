"""Run many test models and yield the results in the order of the sources, whatever runs concurrently.

A source is a file, or a batch of random graphs, which are generated where they run. A random graph that fails is
written to a file, which is a valid source.

With one job everything runs in this process. With more, each job is a process with its own driver, if it uses one:
`python -m nnfmq.lab.conformance.runner`. It receives sources on stdin, one line of JSON each, and replies with a line
of JSON for each test model and an empty line at the end. A job exits when its stdin closes, so no job outlives this
process. Results of later sources are held here until the earlier sources are complete; they contain outcomes, not
models.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from nnfmq.hal.errors import GeneralFailure
from nnfmq.lab.conformance.cases import ConformanceResult, run_test
from nnfmq.lab.conformance.driver_targets import ALL_PATHS, DRIVER_PATHS, Driver
from nnfmq.lab.conformance.random_graphs import Batch
from nnfmq.lab.conformance.runtime_targets import RUNTIME_PATHS, RuntimeTarget, arrangement
from nnfmq.lab.conformance.stepwise import StepwiseEngine
from nnfmq.lab.conformance.targets import CompilingEngine, ExecutionTarget, Interpreter
from nnfmq.lab.conformance.testmodels import FormatError, Line, lines, read, read_at

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


class _Task(msgspec.Struct, frozen=True):
    """A source that a job runs: exactly one of the two."""

    file: bytes | None = None
    graphs: Batch | None = None

    @classmethod
    def of(cls, source: Source) -> _Task:
        return cls(graphs=source) if isinstance(source, Batch) else cls(file=os.fsencode(source))

    @property
    def source(self) -> Source:
        assert self.file is not None or self.graphs is not None
        return Path(os.fsdecode(self.file)) if self.file is not None else self.graphs  # type: ignore[return-value]


class _InvalidFile(msgspec.Struct, tag="bad", frozen=True):
    """Reply of a job for a file that is not in the format."""

    message: str


class _TestDone(msgspec.Struct, tag="ran", frozen=True):
    """Reply of a job for one test model."""

    result: ConformanceResult


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
        yield replace(result, dumped=_dump(line, settings.dump_to)) if result.has_failed else result


def _dump(line: Line, folder: str) -> str:
    """Write a test model to a file and return its path; "" without a folder."""
    if not folder:
        return ""
    path = Path(folder) / f"{line['name']}.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="ascii")
    return str(path)


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
            process = stack.enter_context(_job(settings))
            thread = threading.Thread(target=_feed, args=(process, work, lock, replies), daemon=True)
            stack.callback(thread.join)
            stack.callback(process.kill)  # runs before the join, so that the thread finds its pipe closed
            thread.start()
        yield from _in_order(replies, len(sources))


@contextmanager
def _job(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-P", "-m", __name__, msgspec.json.encode(settings).decode()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # data that the job did not read is still in the buffer
                process.stdin.close()


def _feed(
    process: subprocess.Popen[bytes],
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
            for result in _send_task(process, source):
                replies.put((number, result))
        except (FormatError, GeneralFailure, OSError) as error:
            replies.put((number, error))
            return
        replies.put((number, None))


def _send_task(process: subprocess.Popen[bytes], source: Source) -> Iterator[ConformanceResult]:
    assert process.stdin is not None and process.stdout is not None
    last = "no test"
    with suppress(BrokenPipeError):  # the job has exited: reading its reply reports that
        process.stdin.write(msgspec.json.encode(_Task.of(source)) + b"\n")
        process.stdin.flush()
    while (line := process.stdout.readline()) != b"\n":
        if not line:
            raise GeneralFailure(f"a job died in {_label(source)} after {last}; --jobs 1 shows why")
        reply = msgspec.json.decode(line, type=_InvalidFile | _TestDone)
        if isinstance(reply, _InvalidFile):
            raise FormatError(reply.message)
        last = reply.result.name
        yield reply.result


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


def _work(settings: Settings, requests: IO[bytes], sink: IO[bytes]) -> None:
    """Main loop of a job: run each task of `requests`, and write the replies to `sink`."""
    with closing(settings.open_target()) as target:
        for request in requests:
            task = msgspec.json.decode(request, type=_Task)
            try:
                for result in _run_source(task.source, settings, target):
                    _send_reply(sink, _TestDone(result))
            except FormatError as error:
                _send_reply(sink, _InvalidFile(str(error)))
            sink.write(b"\n")
            sink.flush()


def _send_reply(sink: IO[bytes], reply: Any) -> None:
    sink.write(msgspec.json.encode(reply) + b"\n")
    sink.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent process ends this one
    _work(msgspec.json.decode(sys.argv[1], type=Settings), sys.stdin.buffer, sys.stdout.buffer)
