"""The output of a child process, and the lines of its parent: records, text between them, and forged records."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import msgspec
import pytest

from nnfmq.base.log_records import CHILD_BURST, LINE_BYTES_MAX, MAGIC, RECORD_BYTES_MAX, ChildLog, RecordHandler
from nnfmq.base.logs import INTERVAL_S, LineFormatter, LoggedClient, about

CLIENT = LoggedClient(4712, 1000, "camera.py", 4713)
PID = 4713

pytestmark = pytest.mark.usefixtures("configured_logs")


class Log(logging.Handler):
    """Keeps what this process logs, as records and as lines of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        """The messages."""
        return [record.getMessage() for record in self.records]

    @property
    def lines(self) -> list[str]:
        """All lines as they are written."""
        return "\n".join(map(LineFormatter().format, self.records)).splitlines()


@pytest.fixture
def log() -> Log:
    """Return the handler of this process's log, whose level is `info`."""
    made = Log()
    logging.getLogger().handlers[:] = [made]
    logging.getLogger("nnfmq").setLevel(logging.INFO)
    return made


@pytest.fixture
def child() -> ChildLog:
    made = ChildLog("a worker")
    made.pid, made.client = PID, CLIENT
    return made


def record(text: str, *values: object, name: str = "nnfmq.models", **of: Any) -> logging.LogRecord:
    made = logging.LogRecord(name, of.pop("level", logging.INFO), __file__, 1, text, values, None)
    made.__dict__.update(of)
    return made


def encoded(text: str, *values: object, **of: Any) -> bytes:
    return RecordHandler().encoded(record(text, *values, **of))


def framed(content: bytes, length: int | None = None) -> bytes:
    return MAGIC + (len(content) if length is None else length).to_bytes(2, "little") + content


def forged(**changes: Any) -> bytes:
    """Return a record with other fields."""
    fields = {"level": 20, "logger": "nnfmq.models", "created_s": 0.0, "text": "forged", "exception": "", "model": ""}
    values = [*(fields | changes).values()]
    return framed(msgspec.msgpack.encode([*values, None] if "client" not in changes else values))


def test_a_record_has_the_level_logger_time_text_and_model_of_the_child(log: Log, child: ChildLog) -> None:
    made = record("prepared in %d s", 3, level=logging.ERROR, created=time.time() - 5, **about(model="digits"))
    child.write(RecordHandler().encoded(made))
    (found,) = log.records
    assert (found.name, found.levelno, found.getMessage()) == ("nnfmq.models", logging.ERROR, "prepared in 3 s")
    assert (found.created, found.__dict__["model"]) == (made.created, "digits")


def test_a_record_has_the_process_and_the_client_that_the_child_has(log: Log, child: ChildLog) -> None:
    child.write(encoded("x", process=1, **about(LoggedClient(1, 0, "another", 2))))
    (line,) = log.lines
    assert line.endswith(f" INFO nnfmq.models[{PID}]: x client=4712 uid=1000 program=camera.py")


def test_a_child_without_a_client_names_none_unless_it_serves_several(log: Log) -> None:
    other = LoggedClient(1, 0, "another", 2)
    for names_clients in (False, True):
        ChildLog("a child", names_clients=names_clients).write(encoded("x", **about(other)))
    assert [found.__dict__["client"] for found in log.records] == [None, other]


def test_text_between_records_and_within_a_line_is_logged_line_by_line(log: Log, child: ChildLog) -> None:
    data = b"one\n\ntw" + encoded("within") + b"o\r\n" + encoded("between") + b"last"
    child.write(data)
    child.end()
    assert [text for text in log.texts if "stderr" not in text] == ["within", "between"]
    lines = [found for found in log.records if "stderr" in found.getMessage()]
    assert [found.getMessage().removeprefix("a worker wrote to stderr: ") for found in lines] == ["one", "two", "last"]
    assert {(found.process, found.__dict__["client"]) for found in lines} == {(os.getpid(), CLIENT)}


def test_records_and_lines_are_the_same_wherever_a_read_ends(log: Log, child: ChildLog) -> None:
    data = b"one\ntw" + encoded("first") + b"o\n" + encoded("second") + MAGIC + b"\x05\0wrong\n"
    child.write(data)
    child.end()
    expected = log.texts
    assert len(expected) == 5
    for end in range(len(data)):
        log.records.clear()
        child.write(data[:end])
        child.write(data[end:])
        child.end()
        assert log.texts == expected


def test_a_record_without_its_end_is_text_when_the_child_has_died(log: Log, child: ChildLog) -> None:
    data = encoded("the end is missing")
    child.write(data[:-4])
    assert log.records == []
    child.end()
    (line,) = log.lines
    assert "a worker wrote to stderr: " in line and "the end is miss" in line and line.isprintable()
    assert log.records[0].levelno == logging.WARNING


WRONG = {
    "level": forged(level=99),
    "level of another type": forged(level="info"),
    "logger with a bracket": forged(logger="nnfmq.supervisor[1]: x"),
    "logger with a line's end": forged(logger="nnfmq\n"),
    "empty logger": forged(logger=""),
    "long logger": forged(logger="x" * 101),
    "text of another type": forged(text=1),
    "text without UTF-8": framed(msgspec.msgpack.encode([20, "nnfmq", 0.0, "?", "", "", None]).replace(b"?", b"\xff")),
    "field too many": framed(msgspec.msgpack.encode([20, "nnfmq", 0.0, "", "", "", None, 1])),
    "field too few": framed(msgspec.msgpack.encode([20, "nnfmq", 0.0, "", "", ""])),
    "bytes after it": framed(msgspec.msgpack.encode([20, "nnfmq", 0.0, "", "", "", None]) + b"x"),
    "pickle": framed(b"\x80\x04N."),
    "nothing": framed(b""),
    "giant": framed(b"x" * 100, RECORD_BYTES_MAX + 1),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_record_is_text_and_hides_nothing_after_it(data: bytes, log: Log, child: ChildLog) -> None:
    child.write(data + b"\n" + encoded("the next one"))
    assert log.texts[-1] == "the next one"
    assert all(text.startswith("a worker wrote to stderr: ") for text in log.texts[:-1]) and len(log.texts) > 1
    assert all(line.isprintable() for line in log.lines)


@pytest.mark.parametrize("created_s", [0.0, 1e300, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_replaced_by_that_of_the_parent(created_s: float, log: Log, child: ChildLog) -> None:
    before = time.time()
    child.write(forged(created_s=created_s))
    assert before <= log.records[0].created <= time.time()


@pytest.mark.parametrize("text", ["one\ntwo", "\x1b[2J", "\0", "\x9b31m", "\u202e"])
def test_nothing_that_a_child_writes_begins_a_line_or_commands_a_terminal(text: str, log: Log, child: ChildLog) -> None:
    line = "2026-11-29T20:03:47.123Z INFO nnfmq.supervisor[1]: forged"
    child.write(forged(text=f"{text}{line}", model=text, exception=f"{line}\n{text}\n{line}"))
    child.write(text.encode() + b"\r" + line.encode() + b"\n")
    assert all(found.isprintable() for found in log.lines)
    assert not any(found.startswith(line) for found in log.lines)


def test_a_line_of_text_comes_in_pieces_of_a_bounded_length(log: Log, child: ChildLog) -> None:
    child.write(b"x" * (2 * LINE_BYTES_MAX + 1))
    child.end()
    assert [text.count("x") for text in log.texts] == [LINE_BYTES_MAX, LINE_BYTES_MAX, 1]


def test_a_long_record_is_cut_an_exception_at_its_begin(log: Log, child: ChildLog) -> None:
    data = encoded("b" * 100_000, exc_text="é" * 100_000 + "the end")
    assert len(data) <= RECORD_BYTES_MAX
    child.write(data)
    assert log.texts[0].startswith("bbb")
    assert str(log.records[0].exc_text).endswith("ééthe end")


def test_a_child_logs_so_many_lines_in_a_time_and_the_next_one_has_the_number_of_the_others(
    log: Log, child: ChildLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("nnfmq.base.logs.time.monotonic", lambda: now_s)
    other = ChildLog("a worker")
    for number in range(CHILD_BURST):
        child.write(encoded("%d", number, name=f"nnfmq.n{number}") + b"text\n")  # a kind of its own each
    other.write(b"of another child\n")
    assert len(log.records) == CHILD_BURST + 1
    assert log.texts[-1].endswith("of another child")
    now_s += INTERVAL_S
    child.write(encoded("it goes on"))
    assert log.texts[-2:] == [f"a worker wrote {CHILD_BURST} lines before this one that are left out", "it goes on"]


def test_the_number_of_lines_that_are_left_out_is_logged_when_the_child_has_died(log: Log, child: ChildLog) -> None:
    child.write(b"x\n" * (CHILD_BURST + 7))
    child.end()
    child.end()
    assert log.texts[-1] == "a worker wrote 7 lines more, which are left out"
    assert len(log.records) == CHILD_BURST + 1


def test_lines_below_the_level_of_the_parent_are_not_passed_on_and_make_no_loggers(log: Log, child: ChildLog) -> None:
    child.write(forged(level=10, text="quiet") + forged(level=10, logger="nnfmq.caching", text="asked for"))
    assert log.texts == []
    logging.getLogger("nnfmq.caching").setLevel(logging.DEBUG)
    child.write(forged(level=10, text="quiet") + forged(level=10, logger="nnfmq.caching", text="asked for"))
    logging.getLogger("nnfmq.caching").setLevel(logging.NOTSET)
    assert log.texts == ["asked for"]
    child.write(forged(logger="nnfmq.a-logger-that-nobody-made"))
    assert "nnfmq.a-logger-that-nobody-made" not in logging.getLogger().manager.loggerDict


def test_lines_for_debugging_that_the_settings_ask_for_are_not_limited(log: Log, child: ChildLog) -> None:
    logging.getLogger("nnfmq").setLevel(logging.DEBUG)
    for _ in range(2 * CHILD_BURST):
        child.write(forged(level=10))
    assert len(log.records) == 2 * CHILD_BURST


def test_the_name_of_the_verbose_log_takes_no_limit_away_unless_it_is_on(log: Log, child: ChildLog) -> None:
    for _ in range(2 * CHILD_BURST):
        child.write(forged(logger="nnfmq.vlog.driver"))
    assert len(log.records) == CHILD_BURST
