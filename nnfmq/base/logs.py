"""The log of nnfmq's processes: its format, where it goes, its levels, and a limit of its rate.

All modules log through `logging`, below the logger `nnfmq`. In an application these lines go to the application's
handlers. A driver calls `configure`: from then on what it logs goes to stderr, one line for each record, with time,
level, logger, process, and, where it is about one, the client and the model. What its child processes log comes to it
as records (`log_records`).

    2026-11-29T20:03:47.123Z INFO nnfmq.supervisor[4711]: client connected client=4712 uid=1000 program=camera.py

That is the form for terminals and for systemd's journal, where a line begins with `<6>`, its priority, instead of the
time, which the journal has. Anywhere else a line is a JSON object. Texts come in part from clients: what cannot be
printed is escaped, and lines of an exception are indented, so no client begins a line.

A log that nobody reads stops no process: lines that stderr does not take at once are left out, and the next one says
how many.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from nnfmq.base import settings

__all__ = [
    "BURST",
    "INTERVAL_S",
    "LIMITS",
    "LineFormatter",
    "LoggedClient",
    "Rate",
    "RateLimit",
    "StderrHandler",
    "about",
    "apply_levels",
    "configure",
    "is_enabled",
    "rate_limited",
    "use_handler",
    "write_unless_handled",
]


# ----------------------------------------------------------------------------------------------------------------------
# What a line is about.


class LoggedClient(NamedTuple):
    """A client in the log.

    Attributes:
        pid: Its process; None if that is in another PID namespace.
        uid: Its user.
        program: The name of its program; empty if it is unknown.
        worker: The process that serves it; None if there is none.
    """

    pid: int | None
    uid: int
    program: str = ""
    worker: int | None = None


def about(client: LoggedClient | None = None, model: str = "") -> dict[str, object]:
    """Return the argument `extra` of a call of a logger, whose line names the client and the model."""
    return {"client": client, "model": model}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the subjects of a record: `client`, a dict, and `model`, if they are known."""
    client, model = getattr(record, "client", None), getattr(record, "model", "")
    found: dict[str, object] = {}
    if client is not None:
        found["client"] = {name: value for name, value in client._asdict().items() if value not in (None, "")}
    if model:
        found["model"] = model
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The format.


_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_PLAIN = re.compile(r"[\w./:@%+-]+")


class LineFormatter(logging.Formatter):
    """Makes a line of a record, and with `is_json` a JSON object; with `has_priority` for systemd's journal."""

    def __init__(self, *, is_json: bool = False, has_priority: bool = False) -> None:
        super().__init__()
        self._is_json = is_json
        self._has_priority = has_priority

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end; the text of an exception follows on lines of its own, except in JSON."""
        text = self._json(record) if self._is_json else self._text(record)
        if not self._has_priority:
            return text
        prefix = f"<{_PRIORITIES.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in text.splitlines())

    def _text(self, record: logging.LogRecord) -> str:
        found = _fields(record)
        client = found.pop("client", {})
        assert isinstance(client, dict)
        flat = {"client" if name == "pid" else name: value for name, value in client.items()} | found
        words = "".join(f" {name}={_quoted(value)}" for name, value in flat.items())
        time_and_space = "" if self._has_priority else f"{_time(record)} "
        line = f"{record.levelname} {record.name}[{record.process}]: {_escaped(record.getMessage())}{words}"
        exception = "".join(f"\n  {each}" for each in self._exception(record).splitlines())
        return time_and_space + line + exception

    def _json(self, record: logging.LogRecord) -> str:
        import json  # only where the log is no terminal

        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **_fields(record),
        }
        exception = self._exception(record)
        if exception:
            line["exception"] = exception
        text = json.dumps(line, ensure_ascii=False)
        return text if text.isprintable() else "".join(c if c.isprintable() else _json_escape(c) for c in text)

    def _exception(self, record: logging.LogRecord) -> str:
        """Return the text of the exception: of one of another process it is all there is."""
        text = self.formatException(record.exc_info) if record.exc_info else record.exc_text or ""
        return "\n".join(map(_escaped, text.splitlines()))


def _time(record: logging.LogRecord) -> str:
    """Return the time in UTC: no process needs files of the time zone, and a sandbox has none."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _json_escape(character: str) -> str:
    """Return how a string of JSON has a character: as its units of UTF-16."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _quoted(value: object) -> str:
    text = _escaped(str(value))
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# ----------------------------------------------------------------------------------------------------------------------
# Where it goes.


_STDERR = 2


class StderrHandler(logging.Handler):
    """Writes lines to a descriptor, by default that of stderr. Does not block: see the module's text. Borrows `fd`."""

    def __init__(self, fd: int = _STDERR) -> None:
        super().__init__()
        self._fd = fd
        self._omitted = 0
        self._is_within_line = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, if it can be written now."""
        try:
            data = self.encoded(record)
            if self._omitted:
                data = self.encoded(self._omission(record)) + data
        except Exception:  # noqa: BLE001  as every handler of logging: a wrong format must not end the caller
            self.handleError(record)
            return
        self._omitted = 0 if self._write(data) else self._omitted + 1

    def encoded(self, record: logging.LogRecord) -> bytes:
        """Return the bytes of a record that are written."""
        return f"{self.format(record)}\n".encode("utf-8", "backslashreplace")

    def _omission(self, record: logging.LogRecord) -> logging.LogRecord:
        text = "%d lines before this one are left out: they were not read in time"
        return logging.LogRecord(record.name, logging.WARNING, "", 0, text, (self._omitted,), None)

    def _write(self, data: bytes) -> bool:
        """Write pieces that a pipe takes completely if it takes any, so that no call blocks. Return whether all are."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        left = memoryview(b"\n" + data if self._is_within_line else data)
        try:
            while left and poll.poll(0):
                left = left[os.write(self._fd, left[: select.PIPE_BUF]) :]
        except OSError:  # closed, or nobody can read it any more
            return False
        self._is_within_line = bool(left) and len(left) < len(data)
        return not left


class _UnhandledHandler(logging.Handler):
    """Writes a line to what `sys.stderr` is at that time, unless the application has handlers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line."""
        if not logging.getLogger().handlers and not logging.getLogger("nnfmq").handlers:
            print(self.format(record), file=sys.stderr, flush=True)


def write_unless_handled(logger: logging.Logger) -> None:
    """Write what `logger` gets from INFO on to stderr while the process has no handlers of its own. Idempotent."""
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _UnhandledHandler) for handler in logger.handlers):
        logger.addHandler(_UnhandledHandler())


def configure(*, is_embedded: bool = False) -> None:
    """Write the log of this process to stderr, as the settings say. Idempotent.

    An embedded driver has the terminal or file of its application, so without settings it logs warnings as text.

    Raises:
        InvalidArgument: If a setting is not valid.
    """
    chosen, is_journal = settings.LOG_FORMAT.value(), _is_journal(_STDERR)
    default = "text" if is_embedded or is_journal or os.isatty(_STDERR) else "json"
    handler = StderrHandler()
    handler.setFormatter(LineFormatter(is_json=(chosen or default) == "json", has_priority=is_journal))
    use_handler(handler)
    _Levels.default = "warning" if is_embedded else "info"
    apply_levels()


def use_handler(handler: logging.Handler) -> None:
    """Give the log of this process, and Python's warnings, to this handler alone."""
    logging.getLogger().handlers[:] = [handler]
    logging.captureWarnings(True)


def _is_journal(fd: int) -> bool:
    """Return whether `fd` is the stream that systemd has connected to its journal."""
    stream = settings.JOURNAL_STREAM.value()
    try:
        found = os.fstat(fd)
    except OSError:  # it is closed
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


# ----------------------------------------------------------------------------------------------------------------------
# The levels.


class _Levels:
    default = "info"
    set_by_name: Mapping[str, int] = MappingProxyType({})


def apply_levels() -> None:
    """Give nnfmq's loggers the levels of the setting, in a process that has called `configure`."""
    found = [text.rpartition("=") for text in settings.LOG_LEVEL.value() or ()]
    levels = {f"nnfmq.{name}" if name else "nnfmq": level for name, _, level in found}
    for name in _Levels.set_by_name:
        logging.getLogger(name).setLevel(logging.NOTSET)
    _Levels.set_by_name = {
        name: getattr(logging, level.upper()) for name, level in ({"nnfmq": _Levels.default} | levels).items()
    }
    for name, level in _Levels.set_by_name.items():
        logging.getLogger(name).setLevel(level)


def is_enabled(name: str, level: int) -> bool:
    """Return whether lines of the logger of this name are written, which need not exist: it is not made."""
    found = logging.getLogger().manager.loggerDict
    while name:
        logger = found.get(name)
        if isinstance(logger, logging.Logger):
            return logger.isEnabledFor(level)
        name = name.rpartition(".")[0]
    return logging.getLogger().isEnabledFor(level)


# ----------------------------------------------------------------------------------------------------------------------
# A limit of the rate, because clients and compromised workers can cause lines.
#
# Of each kind of line, which is a format string, BURST are logged in INTERVAL_S; the next one after that says how many
# were left out. So nothing of a client may be in a format string. All lines of a child process are one kind.


BURST, INTERVAL_S = 20, 5.0


class Rate:
    """Passes `burst` lines in INTERVAL_S, and counts the others."""

    __slots__ = ("_begin_s", "_burst", "_count")

    def __init__(self, burst: int) -> None:
        self._burst = burst
        self._begin_s = float("-inf")
        self._count = 0

    @property
    def omitted(self) -> int:
        """How many lines were left out, of which no line has told yet."""
        return max(self._count - self._burst, 0)

    def take(self) -> int | None:
        """Return how many lines were left out before this one; None if this one is, too."""
        now_s = time.monotonic()
        if now_s < self._begin_s + INTERVAL_S:
            self._count += 1
            return 0 if self._count <= self._burst else None
        omitted, self._begin_s, self._count = self.omitted, now_s, 1
        return omitted


class RateLimit(logging.Filter):
    """Passes BURST lines of a kind in INTERVAL_S. Thread-safe. Lines for debugging pass."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, Rate] = {}
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Forget what was logged."""
        with self._lock:
            self._kinds.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged; the first one after others were left out says how many."""
        if record.levelno < logging.INFO:
            return True
        with self._lock:
            omitted = self._kinds.setdefault(str(record.msg), Rate(BURST)).take()
        if omitted is None:
            return False
        if omitted:
            record.msg, record.args = f"{record.getMessage()}; {omitted} more before this one", ()
        return True


LIMITS: dict[str, RateLimit] = {}
"""Those of this process, by the names of their loggers."""


def rate_limited(name: str) -> logging.Logger:
    """Return the logger of this name, limited in rate. Idempotent."""
    logger = logging.getLogger(name)
    if name not in LIMITS:
        logger.addFilter(LIMITS.setdefault(name, RateLimit()))
    return logger
