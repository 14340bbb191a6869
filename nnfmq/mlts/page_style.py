"""The page of both reports of `nnfmq mlts`."""

from __future__ import annotations

from collections.abc import Iterable

from nnfmq.html_page import html_page

_STYLE = """
.scroll { margin: .5rem 0 1.5rem; }
th:first-child { text-align: left; }
.charts { grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); }
svg rect { fill: var(--bar); }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a page with a title, which is its heading, and the parts of its body, which are HTML."""
    return html_page(title, parts, _STYLE)
