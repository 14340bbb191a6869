"""Makes docstrings, which are plain text with indented drawings, valid reStructuredText for autodoc.

Public classes of `nnfmq` that applications get from calls are shown without the arguments of their constructors.

The path of a page, such as docs/how-to/devices.md, becomes a link to it.

A paragraph that is followed by an indented block becomes its introduction, and the block is shown literally, unless it
is a list or a section of Google style ("Args:", "Raises:"), which napoleon formats.
"""

from __future__ import annotations

import re
from typing import Any

_SECTION = re.compile(r"^(Args|Raises|Returns|Yields|Attributes|Note|Example|Examples):\s*$")
_CONSTRUCTED = ("nnfmq.ModelBuilder", "nnfmq.Runtime")  # by applications; all others are returned to them
_ALIAS = re.compile(r"TypeAliasForwardRef\('_?(\w+)'\)")  # how Sphinx writes an alias in a union
_PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")
_LIST = re.compile(r"^\s*([-*]|\d+\.) ")


def mark_literal_blocks(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Insert `::` before each indented block of a docstring; changes `lines` in place."""
    marked: list[str] = []
    for number, line in enumerate(lines):
        before = lines[number - 1] if number else ""
        is_start = line.startswith("    ") and not before.strip() and not _LIST.match(line)
        if is_start and not _is_continued(marked):
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def _is_continued(lines: list[str]) -> bool:
    """Return True if the last line with text is indented, or ends a list item or a section's heading."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    return last.startswith("  ") or bool(_SECTION.match(last) or _LIST.match(last)) or last.endswith("::")


def link_pages(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Replace paths of pages by links; changes `lines` in place."""
    lines[:] = [_PAGE.sub(r":doc:`/\1`", line) for line in lines]


def simplify_signature(
    _app: Any, what: str, name: str, _object: Any, _options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Return no arguments for a public class of `nnfmq` that applications do not construct; aliases by their names."""
    if what == "class" and name.count(".") == 1 and name not in _CONSTRUCTED:
        return "", None
    return None if signature is None else (_ALIAS.sub(r"\1", signature), returned)


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("autodoc-process-docstring", mark_literal_blocks, priority=400)
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("autodoc-process-signature", simplify_signature)
    return {"parallel_read_safe": True}
