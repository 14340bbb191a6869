"""Run many test models: sources in, results out, in the order of the sources whatever ran at the same time.

A source is a file, or a batch of random graphs, which are generated where they run; one that fails is dumped there, as
a file that is a source itself.
With one job everything runs in this process. With more, each job is a process of its own (`python -m
nnfmq.conformance.runner`), with its own driver where there is one: it takes a source on stdin, as a line of JSON, and
answers with a line of JSON for each test model, then an empty line. A job ends when its stdin does, so nothing outlives
this process. Results of sources that are not due yet wait here; they are verdicts, not models.
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

from nnfmq.conformance.cases import Result, run_test
from nnfmq.conformance.random_classes import Batch
from nnfmq.conformance.targets import Target, open_target
from nnfmq.conformance.testmodels import BadFormat, Line, lines, read, read_at
from nnfmq.hal.errors import GeneralFailure

Source = Path | Batch


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run: the execution path, the device, which driver (as --connect says), and which tests by name.

    `dump_to` is the folder for random graphs that fail; empty where there is none.
    """

    path: str = "interpreter"
    device: str = "reference"
    connect_to: str | None = None
    pattern: str = ""
    dump_to: str = ""


class _Task(msgspec.Struct, frozen=True):
    """What a job is asked to run: one of the two."""

    file: bytes | None = None
    graphs: Batch | None = None

    @classmethod
    def of(cls, source: Source) -> _Task:
        return cls(graphs=source) if isinstance(source, Batch) else cls(file=os.fsencode(source))

    @property
    def source(self) -> Source:
        assert self.file is not None or self.graphs is not None
        return Path(os.fsdecode(self.file)) if self.file is not None else self.graphs  # type: ignore[return-value]


class _Bad(msgspec.Struct, tag="bad", frozen=True):
    """A job's answer where a file is not in the format."""

    message: str


class _Ran(msgspec.Struct, tag="ran", frozen=True):
    """A job's answer for one test model."""

    result: Result


def chosen(source: Source, pattern: str) -> Iterator[tuple[int, Line]]:
    """Yield the test models of a source whose name the regular expression finds, with line numbers or seeds."""
    search = re.compile(pattern)
    if isinstance(source, Batch):
        return source.lines(search)
    return ((number, line) for number, line in lines(source) if search.search(line["name"]))


def count(sources: Sequence[Source], pattern: str) -> int:
    """Return how many test models will run; reads every line once, and raises BadFormat. Graphs are not generated."""
    search = re.compile(pattern)
    return sum(
        len(source.seeds(search)) if isinstance(source, Batch) else sum(1 for _ in chosen(source, pattern))
        for source in sources
    )


def run_sources(sources: Sequence[Source], settings: Settings, jobs: int) -> Generator[Result, None, None]:
    """Yield the result of each test model, in order. Close the iterator to end early; it leaves nothing behind.

    Raises BadFormat, and what connecting to the driver or its device raises.
    """
    if jobs == 1:
        return _run_here(sources, settings)
    return _run_in_jobs(sources, settings, min(jobs, len(sources)))


def _run_here(sources: Sequence[Source], settings: Settings) -> Generator[Result, None, None]:
    with closing(open_target(settings.path, settings.device, settings.connect_to)) as target:
        _ = target.feature_level  # a device that does not exist is no failed test
        for source in sources:
            yield from _run_source(source, settings, target)


def _run_source(source: Source, settings: Settings, target: Target) -> Iterator[Result]:
    for number, line in chosen(source, settings.pattern):
        if not isinstance(source, Batch):
            yield run_test(read_at(source, number, line), target)
            continue
        result = run_test(read(line), target)
        yield replace(result, dumped=_dump(line, settings.dump_to)) if result.has_failed else result


def _dump(line: Line, folder: str) -> str:
    """Write a test model as a file of its own; return where."""
    if not folder:
        return ""
    path = Path(folder) / f"{line['name']}.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="ascii")
    return str(path)


# ------------------------------------------------------------------------------------------------ jobs

_Answer = Result | BaseException | None


def _run_in_jobs(sources: Sequence[Source], settings: Settings, jobs: int) -> Generator[Result, None, None]:
    with closing(open_target(settings.path, settings.device, settings.connect_to)) as target:
        _ = target.feature_level
    answers: queue.SimpleQueue[tuple[int, _Answer]] = queue.SimpleQueue()
    work = iter(enumerate(sources))
    lock = threading.Lock()
    with ExitStack() as stack:
        for _ in range(jobs):
            process = stack.enter_context(_job(settings))
            thread = threading.Thread(target=_feed, args=(process, work, lock, answers), daemon=True)
            stack.callback(thread.join)
            stack.callback(process.kill)  # first, so that the thread finds its pipe closed
            thread.start()
        yield from _in_order(answers, len(sources))


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
            with suppress(BrokenPipeError):  # what it did not read is still in the buffer
                process.stdin.close()


def _feed(
    process: subprocess.Popen[bytes],
    work: Iterator[tuple[int, Source]],
    lock: threading.Lock,
    answers: queue.SimpleQueue[tuple[int, _Answer]],
) -> None:
    """Give a job one source after the other, and hand on what it answers; None ends a source."""
    while True:
        with lock:
            number, source = next(work, (-1, Path()))
        if number < 0:
            return
        try:
            for result in _asked(process, source):
                answers.put((number, result))
        except (BadFormat, GeneralFailure, OSError) as error:
            answers.put((number, error))
            return
        answers.put((number, None))


def _asked(process: subprocess.Popen[bytes], source: Source) -> Iterator[Result]:
    assert process.stdin is not None and process.stdout is not None
    last = "no test"
    with suppress(BrokenPipeError):  # a job that is gone answers nothing, and that says so
        process.stdin.write(msgspec.json.encode(_Task.of(source)) + b"\n")
        process.stdin.flush()
    while (line := process.stdout.readline()) != b"\n":
        if not line:
            raise GeneralFailure(f"a job died in {_label(source)} after {last}; --jobs 1 shows why")
        answer = msgspec.json.decode(line, type=_Bad | _Ran)
        if isinstance(answer, _Bad):
            raise BadFormat(answer.message)
        last = answer.result.name
        yield answer.result


def _label(source: Source) -> str:
    return source.class_name if isinstance(source, Batch) else str(source)


def _in_order(answers: queue.SimpleQueue[tuple[int, _Answer]], file_count: int) -> Iterator[Result]:
    waiting: list[list[Result]] = [[] for _ in range(file_count)]
    ended = [False] * file_count
    due = 0
    while due < file_count:
        number, answer = answers.get()
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            ended[number] = True
        else:
            waiting[number].append(answer)
        while due < file_count:
            yield from waiting[due]
            waiting[due] = []
            if not ended[due]:
                break
            due += 1


def _work(settings: Settings, requests: IO[bytes], sink: IO[bytes]) -> None:
    """Be a job: run each task of `requests`, and answer on `sink`."""
    with closing(open_target(settings.path, settings.device, settings.connect_to)) as target:
        for request in requests:
            task = msgspec.json.decode(request, type=_Task)
            try:
                for result in _run_source(task.source, settings, target):
                    _answer(sink, _Ran(result))
            except BadFormat as error:
                _answer(sink, _Bad(str(error)))
            sink.write(b"\n")
            sink.flush()


def _answer(sink: IO[bytes], answer: Any) -> None:
    sink.write(msgspec.json.encode(answer) + b"\n")
    sink.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the process that asked ends us
    _work(msgspec.json.decode(sys.argv[1], type=Settings), sys.stdin.buffer, sys.stdout.buffer)
