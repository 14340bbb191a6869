"""The directive `cli`: usage, options and examples of one `nnfmq` command, generated from its argparse parser."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from nnfmq.cli import command_parser


class CommandReference(Directive):
    """`.. cli:: run` shows what `nnfmq run --help` shows, with a table for each group of options."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the command, then those of its subcommands."""
        return list(self._describe(command_parser(self.arguments[0]), is_top=True))

    def _describe(self, parser: argparse.ArgumentParser, *, is_top: bool) -> Iterator[nodes.Node]:
        if not is_top:
            yield nodes.rubric("", "", nodes.literal("", parser.prog))
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        yield nodes.literal_block("", usage, language="text")
        if parser.description and not is_top:
            yield nodes.paragraph("", parser.description)
        rows = [row for action in parser._actions for row in self._row(action)]
        if rows:
            yield _table(rows)
        if parser.epilog:
            yield nodes.literal_block("", parser.epilog.strip(), language="text")
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for subparser in dict.fromkeys(action.choices.values()):
                    yield from self._describe(subparser, is_top=False)

    def _row(self, action: argparse.Action) -> Iterator[tuple[str, str]]:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction) or action.help == argparse.SUPPRESS:
            return
        value = (
            ""
            if action.nargs == 0
            else str(action.metavar or "|".join(map(str, action.choices or [action.dest.upper()])))
        )
        name = ", ".join(action.option_strings) or value
        yield (
            (f"{name} {value}".strip() if action.option_strings else name),
            (action.help or "") % {"default": action.default},
        )


def _table(rows: list[tuple[str, str]]) -> nodes.table:
    body = nodes.tbody()
    for name, text in rows:
        cells = (nodes.paragraph("", "", nodes.literal("", name)), nodes.paragraph("", text))
        body += nodes.row("", *(nodes.entry("", cell) for cell in cells))
    group = nodes.tgroup("", nodes.colspec(colwidth=35), nodes.colspec(colwidth=65), body, cols=2)
    return nodes.table("", group)


def setup(app: Any) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    importlib.import_module("nnfmq.cli")
    app.add_directive("cli", CommandReference)
    return {"parallel_read_safe": True}
