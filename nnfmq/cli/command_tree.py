"""The commands of `nnfmq` as data, read from their parsers: what completion scripts, man pages and the site show.

The metavar of a value decides how it is completed. Its parts are separated by `|`. A part in lower case is a word that
can be given (`embedded`). A part with FILE, PATH or SOCKET, or with a suffix (`MODEL.tflite`), is a file. One with DIR
or FOLDER is a folder. Anything else, such as N, is not completed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nnfmq.cli import COMMANDS, command_parser, main_parser

__all__ = ["Argument", "CommandHelp", "ValueType", "command_help", "command_tree", "nodes", "one_line"]

_FILE = re.compile(r"FILE|PATH|SOCKET|\.\w")
_FOLDER = re.compile(r"DIR|FOLDER")


class ValueType(Enum):
    """The type of an option's or argument's value, by which it is completed."""

    NONE = "none"  # the option is a flag
    FILE = "file"
    FOLDER = "folder"
    WORDS = "words"  # one of `Argument.words`
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Argument:
    """An option, or, without `flags`, a positional argument. `words` are values that can be given literally."""

    flags: tuple[str, ...]
    metavar: str
    help: str
    value: ValueType
    words: tuple[str, ...]
    is_repeated: bool
    is_optional: bool

    @property
    def title(self) -> str:
        """The flags and the value's name, as in a list of options."""
        return f"{', '.join(self.flags)} {self.metavar}".strip()


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """The help of one command; `words` are its name, as in ("nnfmq", "queue", "read")."""

    words: tuple[str, ...]
    summary: str
    description: str
    usage: str
    examples: str
    options: tuple[Argument, ...]
    arguments: tuple[Argument, ...]
    commands: tuple[CommandHelp, ...]

    @property
    def name(self) -> str:
        """The words, separated by spaces."""
        return " ".join(self.words)


def command_tree() -> CommandHelp:
    """Return the help of `nnfmq` with that of all commands. Imports the modules of all commands, but nothing heavy."""
    commands = tuple(command_help(name) for name in COMMANDS)
    return _described(main_parser(), ("nnfmq",), "", commands)


def command_help(name: str) -> CommandHelp:
    """Return the help of one command of `COMMANDS`."""
    parser = command_parser(name)
    return _described(parser, ("nnfmq", name), COMMANDS[name], tuple(_subcommands(parser, ("nnfmq", name))))


def nodes(top: CommandHelp) -> Iterator[CommandHelp]:
    """Yield `top`, then all of its commands and their subcommands."""
    yield top
    for command in top.commands:
        yield from nodes(command)


def one_line(text: str) -> str:
    """Return `text` with every run of white space as one space."""
    return " ".join(text.split())


def _described(
    parser: argparse.ArgumentParser, words: tuple[str, ...], summary: str, commands: tuple[CommandHelp, ...]
) -> CommandHelp:
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    arguments = [_argument(parser, action) for action in shown if not isinstance(action, argparse._SubParsersAction)]
    return CommandHelp(
        words,
        summary,
        one_line(parser.description or ""),
        one_line(parser.format_usage().removeprefix("usage: ")),
        (parser.epilog or "").strip(),
        tuple(argument for argument in arguments if argument.flags),
        tuple(argument for argument in arguments if not argument.flags),
        commands,
    )


def _subcommands(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[CommandHelp]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {entry.dest: entry.help or "" for entry in action._choices_actions}
            for name, subparser in action.choices.items():
                inner = (*words, name)
                yield _described(subparser, inner, summaries.get(name, ""), tuple(_subcommands(subparser, inner)))


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> Argument:
    metavar = "" if action.nargs == 0 else _metavar(action)
    value, words = _value(action, metavar)
    expanded = parser._get_formatter()._expand_help(action) if action.help else ""
    is_repeated = action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction)
    is_optional = bool(action.option_strings) or action.nargs in ("?", "*")
    return Argument(
        tuple(action.option_strings), metavar, one_line(expanded), value, words, is_repeated, is_optional
    )  # fmt: skip


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.metavar is not None:
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _value(action: argparse.Action, metavar: str) -> tuple[ValueType, tuple[str, ...]]:
    if not metavar:
        return ValueType.NONE, ()
    choices: Any = action.choices
    parts = metavar.split("|")
    words = tuple(map(str, choices)) if choices else tuple(part for part in parts if part == part.lower())
    if any(_FOLDER.search(part) for part in parts):
        return ValueType.FOLDER, words
    if any(_FILE.search(part) for part in parts if part != part.lower()):
        return ValueType.FILE, words
    return (ValueType.WORDS if words else ValueType.OTHER), words
