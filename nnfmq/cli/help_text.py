"""The layout of `--help`: descriptions and listings follow the width of the terminal, examples stay as they are.

An example is a line that is indented. It is never wrapped, because a line break in it would be copied with it.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from typing import Any

__all__ = ["HelpFormatter"]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps lines of prose and of listings (`name  summary`), and keeps indented lines."""

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
        return "\n".join(_wrapped(line, columns, indent) for line in text.splitlines())


def _wrapped(line: str, width: int, indent: str) -> str:
    if line.startswith(" ") or len(indent) + len(line) <= width:
        return indent + line
    entry = re.match(r"\S+ {2,}", line)
    hanging = indent + " " * (entry.end() if entry else 0)
    return textwrap.fill(line, max(width, len(hanging) + 11), initial_indent=indent, subsequent_indent=hanging)
