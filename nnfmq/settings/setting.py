"""One setting: its name, type and default, and its effective value with the source of it.

The environment takes precedence over configuration files, and these over the default. An option of a command, such as
`nnfmq serve --memory`, takes precedence over all of them: it exports its value to the environment of the process
(`Setting.export`), which child processes inherit. An empty variable counts as unset, unless the setting's type has an
empty value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from nnfmq.hal.errors import InvalidArgument
from nnfmq.settings.configuration_file import file_values

__all__ = [
    "NAMES",
    "PATH",
    "PATTERN",
    "SINK",
    "SWITCH",
    "TEXT",
    "Effective",
    "Setting",
    "SettingType",
    "choice",
    "integer",
    "seconds",
    "table",
    "unknown_variables",
]

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
    those of commands that replace the setting. `reader` is the part of nnfmq that reads it.
    """

    __slots__ = ("default", "default_text", "key", "meaning", "options", "reader", "type", "variable")

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
    ) -> None:
        self.variable = variable
        self.type = of_type
        self.default = default
        self.reader = reader
        self.meaning = meaning
        self.default_text = default_text or str(default)
        self.options = options
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


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _switch_to_text(value: object) -> str:
    if not isinstance(value, int):  # a bool is one
        raise ValueError(value)
    return str(int(value))


def _pattern(text: str) -> str:
    import re  # few processes have such a setting

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
SINK = SettingType(
    "path or socket", "a path, or unix:PATH; in files with an absolute PATH", str, _sink_to_text,
    '"unix:/run/telemetry.sock"',
)  # fmt: skip
SWITCH = SettingType("0 or 1", "0 and 1; in files true and false as well", _switch, _switch_to_text, "true")
PATTERN = SettingType("regular expression", "a regular expression of Python", _pattern, _to_text, '"gpu-.*"')
TEXT = SettingType("text", "any text", str, _to_text, '"text"')
