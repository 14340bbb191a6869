"""Run many test models: files in, results out, in the order of the files whatever ran at the same time.

With one job everything runs in this process. With more, each job is a process of its own (`python -m
nnfmq.conformance.running`), with its own driver where there is one: it takes the name of a file on stdin and answers
with a line of JSON for each test model, then an empty line. A job ends when its stdin does, so nothing outlives this
process. Results of files that are not due yet wait here; they are verdicts, not models.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from nnfmq.conformance.cases import Result, run_test
from nnfmq.conformance.targets import Target, open_target
from nnfmq.conformance.testmodels import BadFormat, Line, lines, read_at
from nnfmq.hal.errors import GeneralFailure

_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run: the execution path, the device, which driver (as --connect says), and which tests by name."""

    path: str = "interpreter"
    device: str = "reference"
    connect_to: str | None = None
    pattern: str = ""


class _Bad(msgspec.Struct, tag="bad", frozen=True):
    """A job's answer where a file is not in the format."""

    message: str


class _Ran(msgspec.Struct, tag="ran", frozen=True):
    """A job's answer for one test model."""

    result: Result


def chosen(path: Path, pattern: str) -> Iterator[tuple[int, Line]]:
    """Yield the test models of a file whose name the regular expression finds, with their line numbers."""
    search = re.compile(pattern).search
    return ((number, line) for number, line in lines(path) if search(line["name"]))


def count(files: Sequence[Path], pattern: str) -> int:
    """Return how many test models will run; reads every line once, and raises BadFormat."""
    return sum(1 for path in files for _ in chosen(path, pattern))


def run_files(files: Sequence[Path], settings: Settings, jobs: int) -> Generator[Result, None, None]:
    """Yield the result of each test model, in order. Close the iterator to end early; it leaves nothing behind.

    Raises BadFormat, and what connecting to the driver or its device raises.
    """
    if jobs == 1:
        return _run_here(files, settings)
    return _run_in_jobs(files, settings, min(jobs, len(files)))


def _run_here(files: Sequence[Path], settings: Settings) -> Generator[Result, None, None]:
    with closing(open_target(settings.path, settings.device, settings.connect_to)) as target:
        _ = target.feature_level  # a device that does not exist is no failed test
        for path in files:
            yield from _run_file(path, settings, target)


def _run_file(path: Path, settings: Settings, target: Target) -> Iterator[Result]:
    for number, line in chosen(path, settings.pattern):
        yield run_test(read_at(path, number, line), target)


# ------------------------------------------------------------------------------------------------ jobs

_Answer = Result | BaseException | None


def _run_in_jobs(files: Sequence[Path], settings: Settings, jobs: int) -> Generator[Result, None, None]:
    with closing(open_target(settings.path, settings.device, settings.connect_to)) as target:
        _ = target.feature_level
    answers: queue.SimpleQueue[tuple[int, _Answer]] = queue.SimpleQueue()
    work = iter(enumerate(files))
    lock = threading.Lock()
    with ExitStack() as stack:
        for _ in range(jobs):
            process = stack.enter_context(_job(settings))
            thread = threading.Thread(target=_feed, args=(process, work, lock, answers), daemon=True)
            stack.callback(thread.join)
            stack.callback(process.kill)  # first, so that the thread finds its pipe closed
            thread.start()
        yield from _in_order(answers, len(files))


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
    work: Iterator[tuple[int, Path]],
    lock: threading.Lock,
    answers: queue.SimpleQueue[tuple[int, _Answer]],
) -> None:
    """Give a job one file after the other, and hand on what it answers; None ends a file."""
    while True:
        with lock:
            number, path = next(work, (-1, Path()))
        if number < 0:
            return
        try:
            for result in _asked(process, path):
                answers.put((number, result))
        except (BadFormat, GeneralFailure, OSError) as error:
            answers.put((number, error))
            return
        answers.put((number, None))


def _asked(process: subprocess.Popen[bytes], path: Path) -> Iterator[Result]:
    assert process.stdin is not None and process.stdout is not None
    last = "no test"
    with suppress(BrokenPipeError):  # a job that is gone answers nothing, and that says so
        process.stdin.write(os.fsencode(path) + b"\n")
        process.stdin.flush()
    while (line := process.stdout.readline()) != b"\n":
        if not line:
            raise GeneralFailure(f"a job died in {path} after {last}; --jobs 1 shows why")
        answer = msgspec.json.decode(line, type=_Bad | _Ran)
        if isinstance(answer, _Bad):
            raise BadFormat(answer.message)
        last = answer.result.name
        yield answer.result


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


def _work(settings: Settings, source: IO[bytes], sink: IO[bytes]) -> None:
    """Be a job: run each file that is named on `source`, and answer on `sink`."""
    with closing(open_target(settings.path, settings.device, settings.connect_to)) as target:
        for name in source:
            path = Path(os.fsdecode(name.rstrip(b"\n")))
            try:
                for result in _run_file(path, settings, target):
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
