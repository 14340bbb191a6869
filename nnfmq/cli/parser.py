"""The parser of every command: errors that suggest what was probably meant, actions, the layout of `--help`."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nnfmq.hal.summaries import nearest

__all__ = ["NO_COLOR", "ArgumentParser", "CommandAction", "HelpFormatter", "add_actions", "sentence"]

NO_COLOR = "plain text, also by $NO_COLOR"
"""The help of --no-color."""
_MODEL_SUFFIXES = (".tflite", ".onnx")
_ENTRY = re.compile(r"\S+ {2,}")  # the first column of a listing


class ArgumentParser(argparse.ArgumentParser):
    """A parser of `nnfmq`. Its subparsers are of this class, too."""

    _topic: tuple[str, frozenset[str], frozenset[str]] | None = None

    def set_topic(self, option: str, own: Iterable[str], others: Iterable[str]) -> None:
        """Let --help show `own`, the names of arguments, only after `option`, and then none of `others`.

        All of them would not fit on a screen.
        """
        self._topic = option, frozenset(own), frozenset(others)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return the arguments. Ends with a usage error if some are not known."""
        words = sys.argv[1:] if args is None else list(args)
        if not any(action.nargs == argparse.REMAINDER for parser in self._parsers() for action in parser._actions):
            self._require_known(words)
        if self._topic is not None and not {"-h", "--help"}.isdisjoint(words):
            option, own, others = self._topic
            self._hide(others if option in words else own)
        found, unknown = self.parse_known_args(words, namespace)
        if unknown:
            where = "; options of a command follow its name" if self.prog == "nnfmq" else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{where}")
        return found

    def _hide(self, names: Container[str]) -> None:
        for action in self._actions:
            if action.dest in names:
                action.help = argparse.SUPPRESS

    def _require_known(self, words: Sequence[str]) -> None:
        """End with a usage error if a word is almost an option, before argparse complains of what it stands for."""
        known = {option for parser in self._parsers() for option in parser._option_string_actions}
        names = sorted(option.lstrip("-") for option in known if option.startswith("--"))
        for word in words:
            option = word.partition("=")[0]
            if word == "--":
                return
            if option.startswith("--") and option not in known:
                hint = nearest(option.lstrip("-"), names).replace("'", "'--", 1)
                if hint:
                    self.error(f"there is no option {option}{hint}")

    def _parsers(self) -> Iterator[argparse.ArgumentParser]:
        yield self
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        words = list(map(str, action.choices))
        if str(value).endswith(_MODEL_SUFFIXES):
            hint = f"; did you mean `nnfmq run {value} --input FILE`?" if self.prog == "nnfmq" else ""
        else:
            hint = nearest(value, words)
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint} (choose from {', '.join(words)})")


# ----------------------------------------------------------------------------------------------------------------------
# The actions of a command, such as `nnfmq queue create`.


class CommandAction(NamedTuple):
    """An action: its summary in --help, example command lines, and the function that declares its options."""

    summary: str
    examples: Sequence[str]
    declare: Callable[[argparse.ArgumentParser], None]


def add_actions(
    parser: argparse.ArgumentParser,
    actions: Mapping[str, CommandAction],
    parser_class: type[argparse.ArgumentParser] = ArgumentParser,
) -> None:
    """Declare the actions of a command, each with --no-color; the one that is given is `arguments.action`."""
    group = parser.add_subparsers(
        title="actions", dest="action", metavar="ACTION", required=True, parser_class=parser_class
    )
    for name, (summary, examples, declare) in actions.items():
        action = group.add_parser(
            name,
            help=summary,
            description=sentence(summary),
            epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        action.add_argument("--no-color", action="store_true", default=argparse.SUPPRESS, help=NO_COLOR)
        declare(action)


def sentence(summary: str) -> str:
    """Return a summary as a sentence."""
    return f"{summary[0].upper()}{summary[1:]}."


# ----------------------------------------------------------------------------------------------------------------------
# The layout of `--help`: prose and listings follow the width of the terminal, examples stay as they are.
#
# Lines of prose that follow each other are one paragraph. An example is a line that is indented. It is never wrapped,
# because a line break in it would be copied with it. If it does not fit, its comment comes on lines of its own before
# it.


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs of prose, wraps lines of listings (`name  summary`), and keeps indented lines."""

    def _format_usage(self, *arguments: Any, **keywords: Any) -> str:
        text = super()._format_usage(*arguments, **keywords)
        if max(map(len, text.splitlines()), default=0) <= self._width:
            return text
        one_line = " ".join(text.split())
        filled = textwrap.fill(
            one_line, self._width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        return f"{filled}\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        columns = width + len(indent)  # argparse has subtracted the indentation
        return "\n".join(_wrapped(line, columns, indent) for line in _paragraphs(text))


def _paragraphs(text: str) -> list[str]:
    """Return the lines, of which those of a paragraph of prose are joined."""
    found: list[str] = []
    is_prose = False
    for line in text.splitlines():
        was_prose, is_prose = is_prose, bool(line) and not line.startswith(" ") and not _ENTRY.match(line)
        if was_prose and is_prose:
            found[-1] += f" {line}"
        else:
            found.append(line)
    return found


def _wrapped(line: str, width: int, indent: str) -> str:
    if len(indent) + len(line) <= width:
        return indent + line
    if line.startswith(" "):
        example, mark, comment = line.partition("  # ")
        margin = indent + line[: len(line) - len(line.lstrip())]
        before = textwrap.fill(comment, width, initial_indent=f"{margin}# ", subsequent_indent=f"{margin}# ")
        return f"{before}\n{indent}{example.rstrip()}" if mark else indent + line
    entry = _ENTRY.match(line)
    hanging = indent + " " * (entry.end() if entry else 0)
    columns = max(width, len(hanging) + 11)
    return textwrap.fill(
        line, columns, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False, break_long_words=False
    )
