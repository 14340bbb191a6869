"""The log of a driver's child processes: the records that a child writes to its stderr, and the lines of its parent.

No child has a descriptor of the driver's log, which it could shorten, overwrite, or write to in the name of another
one. Its stdout and stderr are a pipe, or a file, that its parent reads: the supervisor that of a worker, of the compile
server and of the model repository; the compile server that of its processes; the repository that of its imports. The
child writes records there (`RecordHandler`), between which there may be any text, of C libraries for instance:

    MAGIC, the number of bytes that follow (2 bytes, little-endian), the msgpack of a `_Record`

The parent (`ChildLog`) believes none of it: it checks each record as it checks any other message, and what is none is
text. It passes on what is left as records of its own log, with the process and the client that the child really has. A
line has a bounded length, a child's lines a bounded rate, and the next one says how many were left out.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from nnfmq.base.logs import LoggedClient, Rate, StderrHandler, apply_levels, is_enabled, use_handler
from nnfmq.base.verbose_log import TAGS, vlog_is_on

__all__ = [
    "CHILD_BURST",
    "LINE_BYTES_MAX",
    "MAGIC",
    "RECORD_BYTES_MAX",
    "ChildLog",
    "RecordHandler",
    "configure_child",
    "send_records",
]

MAGIC: Final = b"\0nnfmq\x1e"
RECORD_BYTES_MAX: Final = 32 * 1024
LINE_BYTES_MAX: Final = 4096
"""Of a line of text that is no record; a longer one comes in pieces."""
CHILD_BURST: Final = 1000
"""Lines of a child that are passed on in `logs.INTERVAL_S`."""
_LENGTH_BYTES = 2
_HEADER_BYTES = len(MAGIC) + _LENGTH_BYTES
_AGE_S_MAX = 600.0  # of a record: an import's come when it has ended
_TEXT_BYTES_MAX, _MODEL_BYTES_MAX, _NAME_CHARACTERS_MAX = 16 * 1024, 1024, 100
_Level: TypeAlias = Literal[10, 20, 30, 40, 50]  # debug, info, warning, error, critical
_LEVELS: Final[tuple[_Level, ...]] = (50, 40, 30, 20, 10)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_OURS = re.compile(r"nnfmq(?:\..*)?")
_VERBOSE = {f"nnfmq.vlog.{tag}": tag for tag in TAGS}


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record of a child's log. `client` is whom the line is about, if the child says so and has no client itself."""

    level: _Level
    logger: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,100}\Z")]
    created_s: float
    text: str
    exception: str
    model: str
    client: LoggedClient | None


_decoder = msgspec.msgpack.Decoder(_Record)


# ----------------------------------------------------------------------------------------------------------------------
# The child.


class RecordHandler(StderrHandler):
    """Writes what this process logs to its stderr, as records for its parent. Does not block."""

    def encoded(self, record: logging.LogRecord) -> bytes:
        """Return the bytes of a record. What is too long is cut: a text at its end, an exception at its begin."""
        exception = record.exc_text or ""
        if record.exc_info:
            exception = logging.Formatter().formatException(record.exc_info)
        made = _Record(
            next((level for level in _LEVELS if level <= record.levelno), _LEVELS[-1]),
            _NOT_IN_NAMES.sub("_", record.name)[:_NAME_CHARACTERS_MAX] or "root",
            record.created,
            _cut(record.getMessage(), _TEXT_BYTES_MAX),
            "",
            _cut(getattr(record, "model", ""), _MODEL_BYTES_MAX),
            getattr(record, "client", None),
        )
        left = (
            RECORD_BYTES_MAX - _HEADER_BYTES - len(msgspec.msgpack.encode(made)) - 2
        )  # the length takes up to 3 bytes
        data = msgspec.msgpack.encode(msgspec.structs.replace(made, exception=_cut(exception, left, from_end=True)))
        return MAGIC + len(data).to_bytes(_LENGTH_BYTES, "little") + data


def send_records() -> None:
    """Write the log of this process to its stderr from now on, as records for its parent."""
    use_handler(RecordHandler())


def configure_child() -> None:
    """Write the log of this process, which has executed Python again, as records, with the levels of the settings.

    Raises:
        InvalidArgument: If a setting is not valid.
    """
    send_records()
    apply_levels()


def _cut(text: str, bytes_max: int, *, from_end: bool = False) -> str:
    data = text.encode("utf-8", "backslashreplace")
    left = data if len(data) <= bytes_max else data[-bytes_max:] if from_end else data[:bytes_max]
    return left.decode("utf-8", "ignore")


# ----------------------------------------------------------------------------------------------------------------------
# Its parent.


class ChildLog:
    """Passes on the output of a child to the log of this process. Used by one thread.

    `child` is what lines call the process: "a worker". `pid` is the process of its records; 0 until it is known.
    `client` is that of a worker, whatever its records say. With `names_clients` the child's records, which are about
    several, say whom they are about.
    """

    def __init__(self, child: str, *, names_clients: bool = False) -> None:
        self.pid = 0
        self.client: LoggedClient | None = None
        self._child = child
        self._names_clients = names_clients
        self._pending = b""  # a line without its end, and after it perhaps a record without its end
        self._rate = Rate(CHILD_BURST)

    def write(self, data: bytes) -> None:
        """Pass on the lines and records that end in `data`, which the child has written next."""
        self._pending = self._pass_on(self._pending + data, is_end=False)

    def end(self) -> None:
        """Pass on the rest: the child writes no more. Idempotent."""
        rest = self._pass_on(self._pending, is_end=True)
        self._pending = b""
        self._pass_text(rest)
        if self._rate.omitted:
            omitted, self._rate = self._rate.omitted, Rate(CHILD_BURST)
            self._log(logging.WARNING, f"{self._child} wrote {omitted} lines more, which are left out")

    def _pass_on(self, data: bytes, *, is_end: bool) -> bytes:
        """Pass on complete lines and records, and return the rest; at the end nothing follows that completes one."""
        position, line = 0, b""  # a line may have records within it
        while True:
            begin = data.find(MAGIC, position)
            *lines, line = (line + data[position : len(data) if begin < 0 else begin]).split(b"\n")
            for each in lines:
                self._pass_text(each)
            while len(line) > LINE_BYTES_MAX:
                self._pass_text(line[:LINE_BYTES_MAX])
                line = line[LINE_BYTES_MAX:]
            if begin < 0:
                return line
            end, found = _record_at(data, begin)
            if end > len(data) and not is_end:
                return line + data[begin:]
            if found is None:
                line += MAGIC
                position = begin + len(MAGIC)
            else:
                self._pass_record(found)
                position = end

    def _pass_text(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if text and self._may_pass(limits=True):
            self._log(logging.WARNING, f"{self._child} wrote to stderr: {text}")

    def _pass_record(self, found: _Record) -> None:
        if _OURS.fullmatch(found.logger) and not is_enabled(found.logger, found.level):
            return
        if not self._may_pass(limits=not _is_for_debugging(found)):
            return
        made = self._made(found.logger, found.level, found.text)
        made.process = self.pid
        made.exc_text = found.exception or None
        now_s = made.created
        if now_s - _AGE_S_MAX <= found.created_s <= now_s:
            made.created, made.msecs = found.created_s, found.created_s % 1 * 1000
        client = None if self.client is None else self.client._replace(worker=None)
        if self._names_clients:
            client = found.client
        made.__dict__.update(client=client, model=found.model)
        logging.getLogger().handle(made)

    def _may_pass(self, *, limits: bool) -> bool:
        """Count a line, and return whether it is passed on; say before how many were not."""
        omitted = self._rate.take() if limits else 0
        if omitted:
            self._log(logging.WARNING, f"{self._child} wrote {omitted} lines before this one that are left out")
        return omitted is not None

    def _log(self, level: int, text: str) -> None:
        """Log a line of this process about the child."""
        made = self._made("nnfmq.stderr", level, text)
        made.__dict__.update(client=self.client)
        if is_enabled(made.name, level):
            logging.getLogger().handle(made)

    @staticmethod
    def _made(logger: str, level: int, text: str) -> logging.LogRecord:
        return logging.LogRecord(logger, level, "", 0, text, (), None)


def _record_at(data: bytes, begin: int) -> tuple[int, _Record | None]:
    """Return where the record ends that begins here, perhaps beyond `data`; and the record, None if it is none."""
    content = begin + _HEADER_BYTES
    length = int.from_bytes(data[begin + len(MAGIC) : content], "little")
    if len(data) < content or length > RECORD_BYTES_MAX:
        return content, None
    end = content + length
    if len(data) < end:
        return end, None
    try:
        return end, _decoder.decode(memoryview(data)[content:end])
    except msgspec.DecodeError:
        return end, None


def _is_for_debugging(found: _Record) -> bool:
    """Return whether the settings of this process ask for such lines, of which there may be many."""
    tag = _VERBOSE.get(found.logger)
    if tag is not None:
        return vlog_is_on(tag)
    return found.level < logging.INFO and _OURS.fullmatch(found.logger) is not None
