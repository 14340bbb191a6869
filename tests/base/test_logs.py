"""The lines of the log: their form in a terminal, in systemd's journal and elsewhere, and what stderr cannot take."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator

import pytest

from nnfmq.base import logs
from nnfmq.base.logs import LineFormatter, LoggedClient, StderrHandler, about
from nnfmq.hal.errors import InvalidArgument

CLIENT = LoggedClient(4712, 1000, "camera loop.py", 4713)
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


pytestmark = pytest.mark.usefixtures("configured_logs")


def record(text: str, *values: object, level: int = logging.INFO, **of: object) -> logging.LogRecord:
    made = logging.LogRecord("nnfmq.supervisor", level, __file__, 1, text, values, None)
    made.__dict__.update(of)
    return made


def failed() -> logging.LogRecord:
    try:
        raise ValueError("two\nlines\x1b[2J")
    except ValueError as error:
        made = record("it failed", level=logging.ERROR)
        made.exc_info = (type(error), error, error.__traceback__)
        return made


def test_a_line_has_time_level_logger_process_client_and_model() -> None:
    line = LineFormatter().format(record("connected %d", 1, **about(CLIENT, "digits")))
    assert re.fullmatch(
        TIME + rf" INFO nnfmq\.supervisor\[{os.getpid()}\]: connected 1 "
        r'client=4712 uid=1000 program="camera loop\.py" worker=4713 model=digits',
        line,
    )


def test_in_JSON_they_are_members_of_an_object() -> None:
    found = json.loads(LineFormatter(is_json=True).format(record("connected %d", 1, **about(CLIENT, "digits"))))
    assert re.fullmatch(TIME, found.pop("time"))
    assert found == {
        "level": "info",
        "logger": "nnfmq.supervisor",
        "pid": os.getpid(),
        "message": "connected 1",
        "client": {"pid": 4712, "uid": 1000, "program": "camera loop.py", "worker": 4713},
        "model": "digits",
    }


def test_a_line_of_the_journal_has_a_priority_and_no_time() -> None:
    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
    lines = [LineFormatter(has_priority=True).format(record("x", level=level)) for level in levels]
    assert [line[:3] for line in lines] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    assert lines[1] == f"<6>INFO nnfmq.supervisor[{os.getpid()}]: x"
    assert all(line.startswith("<3>") for line in LineFormatter(has_priority=True).format(failed()).splitlines())


def test_an_exception_is_a_member_in_JSON() -> None:
    found = json.loads(LineFormatter(is_json=True).format(failed()))
    first, *_, last = found["exception"].splitlines()
    assert first == "Traceback (most recent call last):"
    assert "\x1b" not in found["exception"]
    assert last == r"lines\x1b[2J"


def test_no_line_of_an_exception_in_a_text_begins_as_a_line_of_the_log_does() -> None:
    _, *lines = LineFormatter().format(failed()).splitlines()
    assert all(line.startswith("  ") and line.isprintable() for line in lines)
    assert (lines[0], lines[-1]) == ("  Traceback (most recent call last):", r"  lines\x1b[2J")


@pytest.mark.parametrize(
    "text", ["one\ntwo", "bell\x07", "\x1b[31mred", "\x85next", "\u2028line", "\x7f\x9b2J", "\u202e", "\U000e0001"]
)
def test_a_client_cannot_begin_a_line_or_command_a_terminal(text: str) -> None:
    line = LineFormatter().format(record("model %s", text, **about(LoggedClient(1, 1, text), text)))
    assert line.isprintable()
    for has_priority in (False, True):
        made = LineFormatter(is_json=True, has_priority=has_priority).format(record("%s", text, **about(model=text)))
        assert made.isprintable()
        found = json.loads(made.removeprefix("<6>"))
        assert (found["message"], found["model"]) == (text, text)


def test_of_a_client_in_another_PID_namespace_a_line_has_the_user_and_the_worker() -> None:
    line = LineFormatter().format(record("x", **about(LoggedClient(None, 1000, worker=7))))
    assert line.endswith(": x uid=1000 worker=7")


# ----------------------------------------------------------------------------------------------------------------------
# Stderr.


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Yield the two ends of a pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_what_nobody_reads_is_left_out_and_counted_and_blocks_nobody(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    handler = StderrHandler(writing)
    handler.setFormatter(LineFormatter())
    for number in range(300):
        handler.emit(record("%d %s", number, "x" * 1000))
    before = [int(line.split(": ")[1].split()[0]) for line in _lines(reading)]
    assert before == list(range(len(before))) and len(before) < 100
    handler.emit(record("it goes on"))
    omission, last = _lines(reading)
    assert f"{300 - len(before)} lines before this one are left out" in omission
    assert last.endswith(": it goes on")


def _lines(fd: int) -> list[str]:
    return os.read(fd, 1 << 20).decode().splitlines()


def test_a_line_that_is_longer_than_a_pipe_takes_at_once_is_written(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    handler = StderrHandler(writing)
    handler.emit(record("x" * 20_000))
    assert _lines(reading) == ["x" * 20_000]


def test_a_closed_stderr_costs_the_lines(pipe: tuple[int, int]) -> None:
    StderrHandler(99_999).emit(record("x"))


# ----------------------------------------------------------------------------------------------------------------------
# Settings.


def level_of(name: str) -> str:
    return logging.getLevelName(logging.getLogger(name).getEffectiveLevel())


def test_levels_are_for_all_loggers_or_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_LOG_LEVEL", "error,caching=debug")
    logs.configure()
    assert (level_of("nnfmq.supervisor"), level_of("nnfmq.caching")) == ("ERROR", "DEBUG")
    monkeypatch.setenv("NNFMQ_LOG_LEVEL", "debug")
    logs.apply_levels()
    assert (level_of("nnfmq.supervisor"), level_of("nnfmq.caching")) == ("DEBUG", "DEBUG")
    monkeypatch.delenv("NNFMQ_LOG_LEVEL")
    logs.apply_levels()
    assert (level_of("nnfmq.supervisor"), level_of("nnfmq.caching")) == ("INFO", "INFO")
    logs.configure(is_embedded=True)
    assert level_of("nnfmq.supervisor") == "WARNING"


@pytest.mark.parametrize("text", ["loud", "caching=loud", "=debug", "caching=", "a b=debug"])
def test_an_unknown_level_is_invalid(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_LOG_LEVEL", text)
    with pytest.raises(InvalidArgument, match="debug, info, warning or error"):
        logs.configure()
