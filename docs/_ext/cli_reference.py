"""The directive `cli`: usage, options and examples of one `nnfmq` command, generated from its argparse parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from nnfmq.cli.command_tree import CommandHelp, command_help

_CODE = re.compile(r"`([^`]+)`|((?<![\w-])--[a-z][\w-]*)")


class CommandReference(Directive):
    """`.. cli:: run` shows what `nnfmq run --help` shows, with a table for each group of options."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the command, then those of its subcommands."""
        return list(self._describe(command_help(self.arguments[0]), is_top=True))

    def _describe(self, command: CommandHelp, *, is_top: bool) -> Iterator[nodes.Node]:
        if not is_top:
            yield nodes.rubric("", "", nodes.literal("", command.name))
        yield nodes.literal_block("", command.usage, language="text")
        if command.description and not is_top:
            yield nodes.paragraph("", "", *_with_code(command.description))
        arguments = (*command.arguments, *(option for option in command.options if "--help" not in option.flags))
        if arguments:
            yield _table([(argument.title, argument.help) for argument in arguments])
        if command.examples:
            yield nodes.literal_block("", command.examples, language="text")
        for subcommand in command.commands:
            yield from self._describe(subcommand, is_top=False)


def _table(rows: list[tuple[str, str]]) -> nodes.table:
    body = nodes.tbody()
    for name, text in rows:
        cells = (nodes.paragraph("", "", nodes.literal("", name)), nodes.paragraph("", "", *_with_code(text)))
        body += nodes.row("", *(nodes.entry("", cell) for cell in cells))
    group = nodes.tgroup("", nodes.colspec(colwidth=35), nodes.colspec(colwidth=65), body, cols=2)
    return nodes.table("", group)


def _with_code(text: str) -> Iterator[nodes.Node]:
    """Yield the text of a command's help; what is in backquotes, and options, as code."""
    end = 0
    for match in _CODE.finditer(text):
        yield nodes.Text(text[end : match.start()])
        yield nodes.literal("", match[1] or match[2])
        end = match.end()
    yield nodes.Text(text[end:])


def setup(app: Any) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    app.add_directive("cli", CommandReference)
    return {"parallel_read_safe": True}
