"""Write the man pages of `nnfmq` and each of its commands, from their parsers and the table of settings.

    python tools/man_pages.py FOLDER

setup.py calls this when it builds a wheel, which installs the pages in share/man/man1. Nothing but the standard library
and the package itself is imported, because nothing else is installed then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from nnfmq.base import settings
from nnfmq.cli import COMMANDS, EXIT_STATUSES
from nnfmq.cli.command_tree import Argument, CommandHelp, command_tree, one_line

SECTION = 1
_FILES = {
    "/etc/nnfmq/nnfmq.toml": "settings of all users",
    "$XDG_CONFIG_HOME/nnfmq/nnfmq.toml": "settings of this user, which replace those of all users; "
    "by default in ~/.config",
}


def page_names() -> list[str]:
    """Return the names of the files: nnfmq.1, and one for each command, such as nnfmq-run.1."""
    return [f"{'-'.join(('nnfmq', *words))}.{SECTION}" for words in ((), *((name,) for name in COMMANDS))]


def pages(version: str) -> dict[str, str]:
    """Return the text of each page by the name of its file."""
    top = command_tree()
    texts = [_page(node, version) for node in (top, *top.commands)]
    return dict(zip(page_names(), texts, strict=True))


def write(folder: Path, version: str) -> list[Path]:
    """Write all pages to `folder`, which is created; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(version).items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in page_names()]


def _page(node: CommandHelp, version: str) -> str:
    name = "-".join(node.words)
    lines = [
        f'.TH {_roff(name.upper())} {SECTION} "" "nnfmq {_roff(version)}" "nnfmq manual"',
        ".nh",  # no hyphen in names of commands
        ".ad l",
        ".SH NAME",
        f"{_roff(name)} \\- {_roff(node.summary or node.description)}",
        ".SH SYNOPSIS",
        *_usage(node),
        ".SH DESCRIPTION",
        _roff(node.description),
        *_arguments(node),
        *_commands(node),
        *_examples(node, ".SH EXAMPLES"),
        ".SH EXIT STATUS",
        *(line for status, text in EXIT_STATUSES.items() for line in _item(f"\\fB{status}\\fR", text)),
        *(_environment() if len(node.words) == 1 else ()),
        ".SH SEE ALSO",
        _see_also(node),
    ]
    return "\n".join(lines) + "\n"


def _usage(node: CommandHelp) -> Iterator[str]:
    rest = node.usage.removeprefix(node.name).strip()
    yield f"\\fB{_roff(node.name)}\\fR {_roff(rest)}".strip()


def _arguments(node: CommandHelp, heading: str = ".SH") -> Iterator[str]:
    if node.arguments or node.options:
        yield f"{heading} OPTIONS" if heading == ".SH" else ".PP"
    for argument in (*node.arguments, *node.options):
        yield from _item(_title(argument), argument.help)


def _title(argument: Argument) -> str:
    flags = ", ".join(f"\\fB{_roff(flag)}\\fR" for flag in argument.flags)
    value = f"\\fI{_roff(argument.metavar)}\\fR" if argument.metavar else ""
    return f"{flags} {value}".strip()


def _commands(node: CommandHelp) -> Iterator[str]:
    """Yield a list of commands that have a page of their own, or the sections of subcommands."""
    if node.commands:
        yield ".SH COMMANDS"
    for command in node.commands:
        if len(node.words) == 1:
            yield from _item(f"\\fB{_roff('-'.join(command.words))}\\fR({SECTION})", command.summary)
            continue
        yield f'.SS "{_roff(command.name)}"'
        yield from _usage(command)
        yield ".PP"
        yield _roff(command.description or command.summary)
        yield from _arguments(command, ".SS")
        yield from _examples(command, ".PP")


def _examples(node: CommandHelp, heading: str) -> Iterator[str]:
    """Yield the lines of the examples: indented lines stay as they are, others become paragraphs."""
    if node.examples:
        yield heading
    lines = [line for line in node.examples.splitlines() if line != "examples:"]
    for is_literal, group in groupby(lines, lambda line: line.startswith(" ")):
        if is_literal:
            yield from (".nf", *(_roff(line.removeprefix("  ")) for line in group), ".fi")
        else:
            yield from (_roff(line) if line else ".PP" for line in group)


def _environment() -> Iterator[str]:
    yield ".SH ENVIRONMENT"
    yield "\\fBnnfmq\\-config\\fR(1) prints the values that are in effect."
    for setting in settings.table().values():
        yield from _item(f"\\fB{_roff(setting.variable)}\\fR", f"{setting.meaning} (default: {setting.default_text})")
    yield ".SH FILES"
    yield "Keys are the names of variables without NNFMQ_, in lower case."
    for path, meaning in _FILES.items():
        yield from _item(f"\\fI{_roff(path)}\\fR", meaning)


def _see_also(node: CommandHelp) -> str:
    names = [command.words for command in node.commands] if len(node.words) == 1 else [("nnfmq",)]
    return ",\n".join(f".BR {_roff('-'.join(words))} ({SECTION})" for words in names)


def _item(title: str, text: str) -> list[str]:
    return [".TP", title, _roff(one_line(text))]


def _roff(text: str) -> str:
    """Return plain text as roff: with no character that has a meaning in it."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    options = parser.parse_args(arguments)
    from importlib import metadata

    for path in write(options.folder, metadata.version("nnfmq")):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
