"""The settings of nnfmq: the only code that reads its environment variables and configuration files.

Each constant is one setting, and `NAME.value()` its effective value. `tools/generate_docs.py` writes
docs/reference/configuration.md from this table, and `nnfmq config` prints it. To add a setting, declare it here, and
run that tool.

This module is imported by both sides at their start, so it imports little, and TOML only if there is a file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from nnfmq.hal.errors import InvalidArgument

__all__ = [
    "CONFIG_VARIABLE",
    "HOSTED",
    "LEVELS",
    "NAMES",
    "PATH",
    "PATTERN",
    "RUNTIME_NAMES",
    "SINK",
    "SWITCH",
    "TEXT",
    "UID_RANGE",
    "Change",
    "Effective",
    "Setting",
    "SettingType",
    "all_file_values",
    "candidates",
    "check_all",
    "choice",
    "file_values",
    "integer",
    "nearest",
    "reload",
    "seconds",
    "table",
    "unknown_variables",
    "use_file_values",
]


# ----------------------------------------------------------------------------------------------------------------------
# Values of configuration files, by key; a process reads the files once.
#
# * If `$NNFMQ_CONFIG` (or `nnfmq --config`) names a file, only that file is read. `/dev/null` reads none.
# * Otherwise `/etc/nnfmq/nnfmq.toml` is read, then `$XDG_CONFIG_HOME/nnfmq/nnfmq.toml` (by default `~/.config`), whose
#   values replace those of the first. Both may be missing.
#
# A file in the current directory is not read unless it is named: the author of a downloaded folder would otherwise
# choose the driver and its plug-ins. For the same reason a file must belong to this user or to root, and other users
# must not be able to write to it.


CONFIG_VARIABLE = "NNFMQ_CONFIG"
_SYSTEM_FILE = "/etc/nnfmq/nnfmq.toml"

FileValues = dict[str, tuple[object, str]]
"""Key → value, as TOML has it, and the path of its file."""


def candidates() -> tuple[str, ...]:
    """Return the absolute paths of the files that are read if they exist, in ascending order of precedence."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        return () if named == os.devnull else (os.path.abspath(named),)
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not folder.startswith("/"):
        folder = os.path.expanduser("~/.config")  # stays relative if the user has no home directory
    user_files = (f"{folder}/nnfmq/nnfmq.toml",) if folder.startswith("/") else ()
    return (_SYSTEM_FILE, *user_files)


def file_values(known_keys: frozenset[str]) -> FileValues:
    """Return the values of all files. Reads them at the first call, and for `reload`.

    Raises:
        InvalidArgument: If a file cannot be read, is not TOML, has an unknown key, or can be written by other users; or
            if a file that is named does not exist.
    """
    where = candidates(), bool(os.environ.get(CONFIG_VARIABLE))
    if where not in _files_read:
        _files_read[where] = _read_all(*where, known_keys)
    return _files_read[where]


def use_file_values(values: FileValues) -> None:
    """Use in this process what the files say in its parent, which read them earlier and perhaps as another user."""
    _files_read[candidates(), bool(os.environ.get(CONFIG_VARIABLE))] = values


_files_read: dict[tuple[tuple[str, ...], bool], FileValues] = {}  # by the arguments of `_read_all`


def _read_all(paths: tuple[str, ...], is_named: bool, known_keys: frozenset[str]) -> FileValues:
    values: FileValues = {}
    for path in paths:
        text = _read(path, is_named)
        if text is not None:
            values |= {key: (value, path) for key, value in _parse(path, text, known_keys).items()}
    return values


def _read(path: str, is_named: bool) -> bytes | None:
    """Return the content of a file; None if it does not exist and need not."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: a FIFO would block
    except OSError as error:
        if not is_named and not os.path.lexists(path):
            return None
        remedy = f"correct ${CONFIG_VARIABLE} or --config" if is_named else "make it readable or remove it"
        raise InvalidArgument(f"the configuration {path} cannot be read: {error.strerror}; {remedy}") from None
    with open(descriptor, "rb") as file:
        _check_owner(os.fstat(descriptor), path)
        return file.read()


def _check_owner(info: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise InvalidArgument(f"the configuration {path} is not a regular file; name a TOML file")
    if info.st_uid not in (os.getuid(), 0):
        raise InvalidArgument(
            f"the configuration {path} is not used: it belongs to uid {info.st_uid}, not to {os.getuid()} or root; "
            "copy it to a file of your own"
        )
    if info.st_mode & stat.S_IWOTH:
        raise InvalidArgument(
            f"the configuration {path} is not used: every user can write to it "
            f"(mode {stat.S_IMODE(info.st_mode):04o}); run chmod o-w {path}"
        )


def _parse(path: str, text: bytes, known_keys: frozenset[str]) -> dict[str, object]:
    import tomllib  # takes milliseconds, and most processes have no file

    try:
        values: dict[str, object] = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        reason = "its values are nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument(f"the configuration {path} is not valid TOML: {reason}") from None
    for key in sorted(values.keys() - known_keys):
        raise InvalidArgument(f"the configuration {path} has an unknown key {key!r}; {nearest(key, known_keys)}")
    return values


def nearest(name: str, known: frozenset[str]) -> str:
    """Return a hint for an unknown name: the most similar known one, or the command that lists all."""
    from difflib import get_close_matches

    by_lower_case = {one.lower(): one for one in sorted(known)}
    found = get_close_matches(name.lower(), by_lower_case, 1, 0.7)
    return f"did you mean {by_lower_case[found[0]]!r}?" if found else "`nnfmq config show` lists the known ones"


# ----------------------------------------------------------------------------------------------------------------------
# One setting: its name, type and default, and its effective value with the source of it.
#
# The environment takes precedence over configuration files, and these over the default. An option of a command, such as
# `nnfmq serve --memory`, takes precedence over all of them: it exports its value to the environment of the process
# (`Setting.export`), which child processes inherit. An empty variable counts as unset, unless the setting's type has an
# empty value.


_PREFIX = "NNFMQ_"
_TABLE: dict[str, Setting[Any]] = {}
ValueT = TypeVar("ValueT")


class SettingType(NamedTuple):  # a dataclass takes longer to import
    """A type of settings. The functions raise ValueError if a value is not of this type.

    `parse` converts the text of a variable. `to_text` converts a value of a file to such a text.
    """

    name: str
    allowed: str
    parse: Callable[[str], Any]
    to_text: Callable[[object], str]
    toml_example: str
    has_empty_value: bool = False


class Effective(NamedTuple, Generic[ValueT]):
    """The value that is in effect, its source, and for messages the variable or the key and file it comes from."""

    value: ValueT
    source: Literal["environment", "file", "default"]
    origin: str
    path: str | None = None


class Setting(Generic[ValueT]):
    """A setting, read from `variable`, and, if its name begins with NNFMQ_, by the rest of the name from files.

    `default` is None if the code that reads the setting computes it; then `default_text` describes it. `options` are
    those of commands that replace the setting. `reader` is the part of nnfmq that reads it. `reloads` says for whom a
    change of a file has an effect in a driver that runs; empty: it needs a restart.
    """

    __slots__ = ("default", "default_text", "key", "meaning", "options", "reader", "reloads", "type", "variable")

    def __init__(
        self,
        variable: str,
        of_type: SettingType,
        default: ValueT,
        *,
        reader: str,
        meaning: str,
        default_text: str = "",
        options: str = "",
        in_files: bool = True,
        reloads: Literal["", "at once", "for new clients"] = "",
    ) -> None:
        self.variable = variable
        self.type = of_type
        self.default = default
        self.reader = reader
        self.meaning = meaning
        self.default_text = default_text or str(default)
        self.options = options
        self.reloads = reloads
        self.key = variable.removeprefix(_PREFIX).lower() if in_files else None
        _TABLE[self.name] = self

    @property
    def name(self) -> str:
        """The key in files, or the variable if files cannot have it."""
        return self.key or self.variable

    def value(self) -> ValueT:
        """Return the effective value.

        Raises:
            InvalidArgument: If the variable's or the file's value is not allowed, or a file is not valid.
        """
        return self.effective().value

    def effective(self) -> Effective[ValueT]:
        """Return the effective value with its source. Raises as `value`."""
        text = os.environ.get(self.variable)
        if text or (text is not None and self.type.has_empty_value):
            return self._parsed(text, text, "environment", f"${self.variable}", None)
        if self.key is not None:
            value, path = file_values(_file_keys()).get(self.key, (None, ""))
            if value is not None:
                return self._parsed(value, None, "file", f"{self.key} in {path}", path)
        return Effective(self.default, "default", "the default")

    def _parsed(
        self, shown: object, text: str | None, source: Literal["environment", "file"], origin: str, path: str | None
    ) -> Effective[ValueT]:
        try:
            value = self.type.parse(self.type.to_text(shown) if text is None else text)
        except ValueError:
            remedy = "correct or unset it" if text is not None else "correct or remove it"
            raise InvalidArgument(
                f"{origin} is {shown!r}; allowed: {self.type.allowed}; {remedy} (`nnfmq config explain {self.name}`)"
            ) from None
        return Effective(value, source, origin, path)

    def export(self, text: str) -> None:
        """Set the value for this process and its future children, as an option of a command does."""
        os.environ[self.variable] = text

    @contextmanager
    def exported(self, text: str) -> Iterator[None]:
        """Set the value for this process and for children that it starts within the block."""
        previous = os.environ.get(self.variable)
        os.environ[self.variable] = text
        try:
            yield
        finally:
            del os.environ[self.variable]
            if previous is not None:
                os.environ[self.variable] = previous


def all_file_values() -> FileValues:
    """Return this process's settings from files, for `use_file_values` of a child. Raises as `file_values`."""
    return file_values(_file_keys())


def table() -> dict[str, Setting[Any]]:
    """Return all settings by name, in the order of their declaration."""
    return _TABLE


def unknown_variables() -> list[str]:
    """Return the variables of the environment that begin with NNFMQ_ and are not in the table: perhaps misspelt."""
    known = {setting.variable for setting in _TABLE.values()}
    return sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in known)


@cache  # the table is complete once this package is imported
def _file_keys() -> frozenset[str]:
    return frozenset(setting.key for setting in _TABLE.values() if setting.key is not None)


# ---- types ----


def _to_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _integer_to_text(value: object) -> str:
    if type(value) is not int:  # a bool is an int, too
        raise ValueError(value)
    return str(value)


def _path_to_text(value: object) -> str:
    path = os.path.expanduser(_to_text(value))
    if not path.startswith("/"):
        raise ValueError(path)
    return path


def _sink_to_text(value: object) -> str:
    text = _to_text(value)
    return text if text.startswith("unix:/") else _path_to_text(text)


def _seconds_to_text(value: object) -> str:
    if type(value) not in (int, float):
        raise ValueError(value)
    return str(value)


def _names_to_text(value: object) -> str:
    if not isinstance(value, list) or any("," in _to_text(name) for name in value):
        raise ValueError(value)
    return ",".join(value)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _runtimes(text: str) -> list[str]:
    names = _names(text)
    if not set(names) <= set(HOSTED):
        raise ValueError(text)
    return names


def _class_rules(text: str) -> list[str]:
    rules = _names(text)
    if any(not who or who.endswith("/") or name not in CLASSES for who, _, name in (r.rpartition("=") for r in rules)):
        raise ValueError(text)
    return rules


LEVELS = ("debug", "info", "warning", "error")
_LEVEL = re.compile(rf"(?:[\w.]+=)?(?:{'|'.join(LEVELS)})")


def _log_levels(text: str) -> list[str]:
    levels = _names(text)
    if not levels or not all(map(_LEVEL.fullmatch, levels)):
        raise ValueError(text)
    return levels


def _uids(text: str) -> list[str]:
    uids = _names(text)
    if not all(uid.isascii() and uid.isdecimal() for uid in uids):
        raise ValueError(text)
    return uids


def integer(minimum: int, maximum: int, unit: str) -> SettingType:
    """Return the type of an integer from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        is_short = text.isascii() and text.isdecimal() and len(text) <= len(str(maximum))
        if not is_short or not minimum <= int(text) <= maximum:
            raise ValueError(text)
        return int(text)

    return SettingType(
        f"integer, {unit}", f"{minimum} to {maximum}", parse, _integer_to_text, str(min(max(minimum, 512), maximum))
    )


def seconds(maximum: int) -> SettingType:
    """Return the type of a number of seconds from 0 to `maximum`, which need not be an integer."""

    def parse(text: str) -> float:
        if not 0 <= float(text) <= maximum:  # False for NaN
            raise ValueError(text)
        return float(text)

    return SettingType("number, s", f"0 to {maximum}", parse, _seconds_to_text, "2.5")


def choice(*names: str) -> SettingType:
    """Return the type of one of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return SettingType("name", ", ".join(names), parse, _to_text, f'"{names[0]}"')


_UID_MAX = 2**32 - 2  # -1 means: no change


def _uid_range(text: str) -> range:
    first, separator, last = text.partition("-")
    numbers = [int(word) for word in (first, last if separator else first) if word.isascii() and word.isdecimal()]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1] <= _UID_MAX:
        raise ValueError(text)
    return range(numbers[0], numbers[1] + 1)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _switch_to_text(value: object) -> str:
    if not isinstance(value, int):  # a bool is one
        raise ValueError(value)
    return str(int(value))


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(text) from error
    return text


PATH = SettingType("path", "any path; in files an absolute one, or one below ~", str, _path_to_text, '"~/nnfmq/file"')
NAMES = SettingType(
    "names", "names separated by commas, in files an array; empty: none", _names, _names_to_text,
    '["com.example.one", "com.example.two"]', has_empty_value=True,
)  # fmt: skip
HOSTED = ("litert", "onnxruntime", "openvino", "torch", "jax")
"""The names in `nnfmq.hal.hosted.RUNTIMES`, which takes longer to import."""
RUNTIME_NAMES = NAMES._replace(
    name="runtimes", allowed=f"some of {', '.join(HOSTED)}, separated by commas, in files an array; empty: none",
    parse=_runtimes, toml_example='["litert", "onnxruntime"]',
)  # fmt: skip
UID_RANGE = SettingType("range of uids", f"FIRST-LAST, of 1 to {_UID_MAX}", _uid_range, _to_text, '"60000-60063"')
SINK = SettingType(
    "path or socket", "a path, or unix:PATH; in files with an absolute PATH", str, _sink_to_text,
    '"unix:/run/telemetry.sock"',
)  # fmt: skip
SWITCH = SettingType("0 or 1", "0 and 1; in files true and false as well", _switch, _switch_to_text, "true")
PATTERN = SettingType("regular expression", "a regular expression of Python", _pattern, _to_text, '"gpu-.*"')
CLASSES = ("interactive", "normal", "batch")
CLASS_RULES = SettingType(
    "rules",
    "rules WHO=CLASS separated by commas, in files an array; WHO is a uid, a program's name or UID/PROGRAM, CLASS "
    f"{', '.join(CLASSES[:-1])} or {CLASSES[-1]}; empty: none", _class_rules, _names_to_text,
    '["1000=batch", "camera.py=interactive"]', has_empty_value=True,
)  # fmt: skip
UIDS = SettingType(
    "uids", "uids separated by commas, in files an array of texts; empty: none", _uids, _names_to_text,
    '["1000", "1001"]', has_empty_value=True,
)  # fmt: skip
LOG_LEVELS = SettingType(
    "levels",
    f"LEVEL for all loggers, and LOGGER=LEVEL for one below `nnfmq`, separated by commas, in files an array; LEVEL is "
    f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}", _log_levels, _names_to_text, '["info", "caching=debug"]',
)  # fmt: skip
TEXT = SettingType("text", "any text", str, _to_text, '"text"')


# ----------------------------------------------------------------------------------------------------------------------
# The settings of nnfmq: the only code that reads its environment variables and configuration files.


_MIB_MAX = 1 << 40  # sums of it still fit into 8 bytes
_WINDOW_MAX_US = 10**9
_MIB = integer(0, _MIB_MAX, "MiB")
_MICROSECONDS = integer(0, _WINDOW_MAX_US, "µs")
_DIRECTORY = "its folder `nnfmq`"
_VARIABLE_PATH = PATH._replace(allowed="any path")

SOCKET: Setting[str | None] = Setting(
    "NNFMQ_SOCKET", PATH, None, reader="client, driver",
    meaning="path of the driver's socket, in a directory in which no other user can replace it",
    default_text="`nnfmq.sock` in the runtime directory", options="--connect, nnfmq serve --socket",
)  # fmt: skip
CHECK_DIRECTORY: Setting[bool] = Setting(
    "NNFMQ_CHECK_DIRECTORY", SWITCH, True, reader="client, driver", default_text="1",
    meaning="0: do not check that no other user can replace the socket; for a folder that only the containers of a pod "
    "share",
)  # fmt: skip
CORE: Setting[str | None] = Setting(
    "NNFMQ_CORE", choice("compiled", "python"), None, reader="client, driver",
    meaning="implementation of queue, codec and thread pool; an error if it is not available",
    default_text="`compiled` if it is built",
)  # fmt: skip
TARGET: Setting[str | None] = Setting(
    "NNFMQ_TARGET",
    choice("amx", "avx512vnni", "avx512", "avx2", "sse4.1", "sse4.1-fma", "neon-i8mm", "neon-dotprod", "neon"), None,
    reader="driver", meaning="instruction set of compiled code; an error if this CPU lacks it",
    default_text="the best one of this CPU",
)  # fmt: skip
GUARD_PAGES: Setting[str | None] = Setting(
    "NNFMQ_GUARD_PAGES", choice("end", "begin"), None, reader="driver",
    meaning="where compiled code's operands are between pages that nothing may access, for debugging",
    default_text="none",
)  # fmt: skip
DEVICES: Setting[str | None] = Setting(
    "NNFMQ_DEVICES", PATH, None, reader="driver", meaning="TOML file that lists the devices",
    default_text="the packaged one", options="nnfmq serve --devices",
)  # fmt: skip
RUNTIMES: Setting[list[str] | None] = Setting(
    "NNFMQ_RUNTIMES", RUNTIME_NAMES, None, reader="driver", meaning="the runtimes that the driver hosts as devices",
    default_text="all installed", options="nnfmq serve --runtimes",
)  # fmt: skip
TRUSTED_FILES: Setting[list[str] | None] = Setting(
    "NNFMQ_TRUSTED_FILES", NAMES, None, reader="driver", reloads="for new clients",
    meaning="SHA-256, in hexadecimal, of model files and libraries that hosted runtimes may run code of",
    default_text="none",
)  # fmt: skip
EXTENSIONS: Setting[list[str] | None] = Setting(
    "NNFMQ_EXTENSIONS", NAMES, None, reader="driver", meaning="the extensions on offer",
    default_text="all installed", options="nnfmq serve --extensions",
)  # fmt: skip
MEMORY_MIB: Setting[int | None] = Setting(
    "NNFMQ_MEMORY_MIB", _MIB, None, reader="driver",
    meaning="memory that all clients together may take in the driver",
    default_text="a quarter of the machine's", options="nnfmq serve --memory",
)  # fmt: skip
CLIENT_MEMORY_MIB: Setting[int | None] = Setting(
    "NNFMQ_CLIENT_MEMORY_MIB", _MIB, None, reader="driver", reloads="for new clients",
    meaning="memory that one client may take in the driver", default_text="half of `memory_mib`",
)  # fmt: skip
PROCESS_CLIENTS: Setting[int] = Setting(
    "NNFMQ_PROCESS_CLIENTS", integer(1, 62, "clients"), 32, reader="driver", reloads="at once",
    meaning="how many of the driver's 62 clients may be of one process",
)  # fmt: skip
CLIENT_CLASS: Setting[str | None] = Setting(
    "NNFMQ_CLIENT_CLASS", choice(*CLASSES), None, reader="client",
    meaning="the class that clients of this process ask a driver for: who goes first beside other clients",
    default_text="the driver decides", options="nnfmq run --class",
)  # fmt: skip
CLIENT_CLASSES: Setting[list[str] | None] = Setting(
    "NNFMQ_CLIENT_CLASSES", CLASS_RULES, None, reader="driver", reloads="for new clients",
    meaning="the classes of clients; the first rule for a client's uid or program decides, and no client gets a higher "
    "class by asking", default_text="normal for all",
)  # fmt: skip
INTERACTIVE_UIDS: Setting[list[str] | None] = Setting(
    "NNFMQ_INTERACTIVE_UIDS", UIDS, None, reader="driver", reloads="for new clients",
    meaning="the users whose clients get the class interactive by asking, if no rule is about them",
    default_text="the driver's own and root",
)  # fmt: skip
CLIENT_MODELS: Setting[int] = Setting(
    "NNFMQ_CLIENT_MODELS", integer(1, 1 << 20, "models"), 10_000, reader="driver", reloads="for new clients",
    meaning="how many prepared models one client may have",
)  # fmt: skip
CLIENT_BURSTS: Setting[int] = Setting(
    "NNFMQ_CLIENT_BURSTS", integer(1, 4096, "bursts"), 256, reader="driver", reloads="for new clients",
    meaning="how many bursts over queues one client may have; each has a thread of the client's worker",
)  # fmt: skip
CLIENT_CALLS: Setting[int] = Setting(
    "NNFMQ_CLIENT_CALLS", integer(1, 1 << 16, "calls"), 256, reader="driver", reloads="for new clients",
    meaning="how many calls of one client may wait or run; executions over queues are not among them",
)  # fmt: skip
CLIENT_THREADS: Setting[int] = Setting(
    "NNFMQ_CLIENT_THREADS", integer(1, 1 << 16, "threads"), 2048, reader="driver", reloads="for new clients",
    meaning="how many threads the bursts and open files of hosted runtimes of one client may have",
)  # fmt: skip
CLIENT_OBJECTS: Setting[int] = Setting(
    "NNFMQ_CLIENT_OBJECTS", integer(1, 1 << 20, "objects"), 10_000, reader="driver", reloads="for new clients",
    meaning="how many objects of each other kind one client may have: reusable and fenced executions, buffers, AIDL "
    "bursts",
)  # fmt: skip
HTTP_CONNECTIONS: Setting[int] = Setting(
    "NNFMQ_HTTP_CONNECTIONS", integer(1, 1 << 20, "connections"), 256, reader="server",
    meaning="how many connections a process that serves HTTP with `LimitedConnection` has at a time",
)  # fmt: skip
HTTP_HEADER_S: Setting[float] = Setting(
    "NNFMQ_HTTP_HEADER_S", seconds(86400), 10.0, reader="server",
    meaning="how long a connection of HTTP may take for the header of a request; with `LimitedConnection`",
)  # fmt: skip
REQUESTS_MIB: Setting[int] = Setting(
    "NNFMQ_REQUESTS_MIB", integer(1, 1 << 20, "MiB"), 1024, reader="gateway",
    meaning="memory that the requests in progress of a gateway may take, for each of its protocols",
)  # fmt: skip
GRPC_CALLS: Setting[int] = Setting(
    "NNFMQ_GRPC_CALLS", integer(1, 1 << 20, "calls"), 64, reader="gateway",
    meaning="how many calls of gRPC a gateway serves at a time; each may send a message of its share of `requests_mib`",
)  # fmt: skip
USER: Setting[str | None] = Setting(
    "NNFMQ_USER", TEXT._replace(name="account", allowed="the name of an account", toml_example='"nnfmq"'), None,
    reader="driver", meaning="the account to which a driver changes that root has started",
    default_text="that of the process", options="nnfmq serve --user",
)  # fmt: skip
WORKER_UIDS: Setting[range | None] = Setting(
    "NNFMQ_WORKER_UIDS", UID_RANGE, None, reader="driver", options="nnfmq serve --worker-uids",
    meaning="uids, and gids with the same numbers, of which each worker has one of its own: what a driver needs to "
    "serve several users", default_text="none: workers run as the driver does, and it serves one user",
)  # fmt: skip
ALLOW_USERS: Setting[list[str]] = Setting(
    "NNFMQ_ALLOW_USERS", NAMES._replace(
        name="accounts", allowed="names or uids, separated by commas, in files an array of texts; `*`: all",
        toml_example='["ann", "1001"]',
    ), [], reader="driver", options="nnfmq serve --allow-user",
    meaning="the users whose clients are served, beside the driver's own account and root",
    default_text="none",
)  # fmt: skip
ALLOW_GROUPS: Setting[list[str]] = Setting(
    "NNFMQ_ALLOW_GROUPS", NAMES._replace(
        name="groups", allowed="names or gids, separated by commas, in files an array of texts",
        toml_example='["video", "1001"]',
    ), [], reader="driver", options="nnfmq serve --allow-group",
    meaning="the groups whose members' clients are served", default_text="none",
)  # fmt: skip
USER_CLIENTS: Setting[int | None] = Setting(
    "NNFMQ_USER_CLIENTS", integer(1, 64, "clients"), None, reader="driver", reloads="at once",
    meaning="how many clients of a driver that serves several users may be of one of them",
    default_text="half of all that it serves",
)  # fmt: skip
USER_MEMORY_MIB: Setting[int | None] = Setting(
    "NNFMQ_USER_MEMORY_MIB", _MIB, None, reader="driver",
    meaning="memory that the clients of one user may take in a driver that serves several",
    default_text="half of `memory_mib`",
)  # fmt: skip
USER_MODELS: Setting[int] = Setting(
    "NNFMQ_USER_MODELS", integer(1, 1 << 24, "models"), 20_000, reader="driver",
    meaning="how many prepared models the clients of one user may have in a driver that serves several",
)  # fmt: skip
USER_THREADS: Setting[int] = Setting(
    "NNFMQ_USER_THREADS", integer(1, 1 << 20, "threads"), 4096, reader="driver",
    meaning="how many threads the bursts and open files of hosted runtimes of one user may have in a driver that "
    "serves several",
)  # fmt: skip
IMPORT_MEMORY_MIB: Setting[int] = Setting(
    "NNFMQ_IMPORT_MEMORY_MIB", _MIB, 1024, reader="driver",
    meaning="private memory that the import of one model version may take, with what it reads of its files",
)  # fmt: skip
SANDBOX: Setting[str] = Setting(
    "NNFMQ_SANDBOX", choice("on", "required", "off"), "on", reader="driver",
    meaning="what workers, compile processes and imports are kept from; `required`: a driver does not start where the "
    "kernel lacks a part", options="nnfmq serve --sandbox",
)  # fmt: skip
WORKER_START: Setting[str | None] = Setting(
    "NNFMQ_WORKER_START", choice("fork", "exec"), None, reader="driver", options="nnfmq serve --worker-start",
    meaning="how the driver starts a worker. `fork`: as a copy of itself, in milliseconds; `exec`: as a program, whose "
    "addresses tell nothing of those in other processes",
    default_text="`fork`; of a driver that serves several users `exec`",
)  # fmt: skip
SANDBOX_NODES: Setting[list[str] | None] = Setting(
    "NNFMQ_SANDBOX_NODES", NAMES, None, reader="driver",
    meaning="device nodes that workers may open and control, as runtimes do for a GPU; with some, they may make memory "
    "executable, too", default_text="those that devices declare",
)  # fmt: skip
CACHE_MIB: Setting[int] = Setting(
    "NNFMQ_CACHE_MIB", _MIB, 512, reader="driver",
    meaning="compiled models kept on disk, and those that clients share; 0 keeps none",
)  # fmt: skip
COMPILE_PROCESSES: Setting[int | None] = Setting(
    "NNFMQ_COMPILE_PROCESSES", integer(1, 1024, "processes"), None, reader="driver",
    meaning="how many processes of the driver compile at a time; clients that wait take turns",
    default_text="one for each CPU",
)  # fmt: skip
COMPILE_MEMORY_MIB: Setting[int] = Setting(
    "NNFMQ_COMPILE_MEMORY_MIB", integer(16, _MIB_MAX, "MiB"), 1024, reader="driver",
    meaning="memory that one compile process may take; its client is charged with what it has taken",
)  # fmt: skip
COMPILE_TIME_S: Setting[int] = Setting(
    "NNFMQ_COMPILE_TIME_S", integer(1, 86_400, "s"), 120, reader="driver",
    meaning="CPU time that a compile process may take for one part of a model; a model has up to 128 parts",
)  # fmt: skip
COMPILE_AFTER_EXIT_S: Setting[float] = Setting(
    "NNFMQ_COMPILE_AFTER_EXIT_S", seconds(3600), 60.0, reader="driver", reloads="for new clients",
    meaning="how long a process may compile a model for the cache whose client has left; 0: a compilation ends with "
    "its client",
)  # fmt: skip
EXECUTION_LIMIT_S: Setting[float] = Setting(
    "NNFMQ_EXECUTION_LIMIT_S", seconds(86400), 600.0, reader="driver", reloads="for new clients",
    meaning="how long one execution may take before its worker is ended; 0: no limit",
)  # fmt: skip
DRAIN_S: Setting[float] = Setting(
    "NNFMQ_DRAIN_S", seconds(3600), 5.0, reader="driver", reloads="for new clients",
    meaning="how long a driver that ends waits for the calls and bursts in progress; 0: it ends at once",
)  # fmt: skip
MODELS: Setting[str | None] = Setting(
    "NNFMQ_MODELS", PATH, None, reader="driver", meaning="directory of the models that are served by name",
    default_text="none", options="nnfmq serve --models",
)  # fmt: skip
BURST_CONTROLLER_POLLING_WINDOW: Setting[int] = Setting(
    "NNFMQ_BURST_CONTROLLER_POLLING_WINDOW", _MICROSECONDS, 50, reader="client",
    meaning="how long a burst's client polls for a result before it sleeps",
)  # fmt: skip
BURST_SERVER_POLLING_WINDOW: Setting[int] = Setting(
    "NNFMQ_BURST_SERVER_POLLING_WINDOW", _MICROSECONDS, 50, reader="driver", reloads="for new clients",
    meaning="how long a burst's driver polls for a request before it sleeps",
)  # fmt: skip
PARTITION: Setting[int] = Setting(
    "NNFMQ_PARTITION", integer(0, 2, "mode"), 1, reader="client",
    meaning="models whose devices the application does not choose: 0, all on the CPU device; 1, divided among devices, "
    "and executed by the CPU device if these fail; 2, divided among devices without this fallback",
)  # fmt: skip
CPU_ONLY: Setting[bool] = Setting(
    "NNFMQ_CPU_ONLY", SWITCH, False, reader="client", default_text="0",
    meaning="models whose devices the application does not choose are executed by the CPU device",
)  # fmt: skip
ENABLED_DEVICES: Setting[str] = Setting(
    "NNFMQ_ENABLED_DEVICES", PATTERN, "(?!sample-).*", reader="client",
    meaning="names of the devices that are used without being named by the application; by default all but the sample "
    "devices",
)  # fmt: skip
STRICT_SLICING: Setting[bool] = Setting(
    "NNFMQ_STRICT_SLICING", SWITCH, False, reader="client", default_text="0",
    meaning="1: ask devices only about parts of a model that pass the validation for their interface version",
)  # fmt: skip
COMPILE_NOTICE: Setting[bool] = Setting(
    "NNFMQ_COMPILE_NOTICE", SWITCH, True, reader="client", default_text="1",
    meaning="0: write nothing to stderr while a model is compiled",
)  # fmt: skip
SYNC_EXEC_CPU: Setting[bool] = Setting(
    "NNFMQ_SYNC_EXEC_CPU", SWITCH, False, reader="client", default_text="0",
    meaning="1: asynchronous executions on the CPU device are done when the call returns",
)  # fmt: skip
SYNC_EXEC_RUNTIME: Setting[bool] = Setting(
    "NNFMQ_SYNC_EXEC_RUNTIME", SWITCH, False, reader="client", default_text="0",
    meaning="1: asynchronous executions on any device are done when the call returns",
)  # fmt: skip
TELEMETRY: Setting[str | None] = Setting(
    "NNFMQ_TELEMETRY", SINK, None, reader="client",
    meaning="file, or socket of a collector, to which telemetry is written", default_text="none is written",
)  # fmt: skip
TELEMETRY_INTERVAL_S: Setting[float] = Setting(
    "NNFMQ_TELEMETRY_INTERVAL_S", seconds(86_400), 1.0, reader="client",
    meaning="the least time between two lines of telemetry",
)  # fmt: skip
VLOG: Setting[str] = Setting(
    "NNFMQ_VLOG",
    TEXT._replace(
        name="tags",
        allowed="`all`, `1`, or, separated by spaces, commas or colons: "
        "compilation, cpuexe, driver, execution, manager, memory, model",
        toml_example='"compilation,execution"',
    ), "", reader="client, driver", meaning="tags of which the verbose log has lines", default_text="none",
)  # fmt: skip

LOG_LEVEL: Setting[list[str] | None] = Setting(
    "NNFMQ_LOG_LEVEL", LOG_LEVELS, None, reader="driver", reloads="for new clients", options="nnfmq serve --log-level",
    meaning="from which level on a driver logs", default_text="`info`, of an embedded driver `warning`",
)  # fmt: skip
LOG_FORMAT: Setting[str | None] = Setting(
    "NNFMQ_LOG_FORMAT", choice("text", "json"), None, reader="driver", options="nnfmq serve --log-format",
    meaning="the form of the lines that a driver logs",
    default_text="`text` on a terminal, in systemd's journal, and of an embedded driver; otherwise `json`",
)  # fmt: skip
PERF_MAP: Setting[bool] = Setting(
    "NNFMQ_PERF_MAP", SWITCH, False, reader="driver", default_text="0", reloads="for new clients",
    meaning="1: each worker writes the names and addresses of its compiled kernels to `/tmp/perf-PID.map`, where perf "
    "looks for them, until it ends",
)  # fmt: skip

TRACE: Setting[str | None] = Setting(
    "NNFMQ_TRACE", _VARIABLE_PATH._replace(allowed="any path, in which %p is the pid, or `socket:PATH`"), None,
    reader="client", in_files=False, meaning="file to which the trace of this process is written when it exits",
    default_text="no trace", options="nnfmq trace -o",
)  # fmt: skip
RECORD: Setting[str | None] = Setting(
    "NNFMQ_RECORD", _VARIABLE_PATH, None, reader="client", in_files=False,
    meaning="file to which the executions of this process are recorded; FILE.PID if it exists",
    default_text="nothing is recorded", options="nnfmq record -o",
)  # fmt: skip
RECORD_TENSORS: Setting[str] = Setting(
    "NNFMQ_RECORD_TENSORS", choice("0", "1"), "1", reader="client", in_files=False,
    meaning="0: record without inputs and outputs", options="nnfmq record --no-tensors",
)  # fmt: skip
RECORD_LIMIT_BYTES: Setting[int | None] = Setting(
    "NNFMQ_RECORD_LIMIT_BYTES", integer(4096, 1 << 50, "bytes"), None, reader="client", in_files=False,
    meaning="size that a recording does not exceed", default_text="no limit",
    options="nnfmq record --limit-bytes",
)  # fmt: skip
CONFIG: Setting[str | None] = Setting(
    CONFIG_VARIABLE, _VARIABLE_PATH, None, reader="client, driver, commands", in_files=False,
    meaning="the only configuration file to read; `/dev/null`: none",
    default_text="`/etc/nnfmq/nnfmq.toml` and that of the user", options="nnfmq --config",
)  # fmt: skip
DATA: Setting[str | None] = Setting(
    "NNFMQ_DATA", _VARIABLE_PATH, None, reader="commands", in_files=False, options="nnfmq mlts bench --data",
    meaning="folder of test data; its folder `models` has MLTS's models", default_text="none",
)  # fmt: skip
XDG_CONFIG_HOME: Setting[str | None] = Setting(
    "XDG_CONFIG_HOME", _VARIABLE_PATH, None, reader="client, driver, commands", in_files=False,
    meaning=f"{_DIRECTORY} has the user's configuration file", default_text="`~/.config`",
)  # fmt: skip
XDG_RUNTIME_DIR: Setting[str | None] = Setting(
    "XDG_RUNTIME_DIR", _VARIABLE_PATH, None, reader="client, driver", in_files=False,
    meaning=f"{_DIRECTORY} is the runtime directory", default_text="`/run/user/UID`",
)  # fmt: skip
TMPDIR: Setting[str | None] = Setting(
    "TMPDIR", _VARIABLE_PATH, None, reader="client, driver", in_files=False,
    meaning="its folder `nnfmq-UID` is the runtime directory if there is no `/run/user/UID`", default_text="`/tmp`",
)  # fmt: skip
XDG_STATE_HOME: Setting[str | None] = Setting(
    "XDG_STATE_HOME", _VARIABLE_PATH, None, reader="driver", in_files=False,
    meaning=f"{_DIRECTORY} stores the key that signs caches", default_text="`~/.local/state`",
)  # fmt: skip
XDG_CACHE_HOME: Setting[str | None] = Setting(
    "XDG_CACHE_HOME", _VARIABLE_PATH, None, reader="driver", in_files=False,
    meaning=f"{_DIRECTORY} stores compiled models", default_text="`~/.cache`",
)  # fmt: skip
JOURNAL_STREAM: Setting[str | None] = Setting(
    "JOURNAL_STREAM", TEXT._replace(allowed="DEVICE:INODE, as systemd sets it"), None, reader="driver", in_files=False,
    meaning="if it is that of stderr, lines of the log begin with their priority, for systemd's journal",
    default_text="unset",
)  # fmt: skip
NO_COLOR: Setting[str | None] = Setting(
    "NO_COLOR", TEXT, None, reader="commands", in_files=False,
    meaning="plain text if it is not empty", default_text="unset", options="--no-color",
)  # fmt: skip


class Change(NamedTuple):
    """A setting that has another value in the configuration files than before."""

    setting: Setting[Any]
    before: Any
    now: Any


def reload() -> list[Change]:
    """Read the configuration files again; return the settings that have other values there.

    Those that need a restart keep theirs in this process and its children.

    Raises:
        InvalidArgument: As `check_all`; then all settings keep their values.
    """
    before = {setting: setting.value() for setting in _TABLE.values()}
    old_files, old = dict(_files_read), file_values(_file_keys())
    _files_read.clear()
    try:
        check_all()
    except InvalidArgument:
        _files_read.update(old_files)
        raise
    found = [Change(setting, value, setting.value()) for setting, value in before.items() if setting.value() != value]
    values = file_values(_file_keys())
    for key in {change.setting.key for change in found if not change.setting.reloads and change.setting.key}:
        values.pop(key, None)
        values.update({key: old[key]} if key in old else {})
    return found


def check_all() -> None:
    """Check every setting, so that a driver reports an invalid one when it starts, not to some later client.

    Raises:
        InvalidArgument: If a value is not allowed, or a configuration file is not valid.
    """
    for setting in table().values():
        setting.value()
