"""The frame of every HTML report: head, style and body. A page has no scripts and loads nothing.

It is light or dark as the browser, wide tables scroll inside an element of the class `scroll`, and colours are
variables: `--line`, `--good`, `--bad`, `--bar`.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["html_page", "page"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a83; --bad: #d338; --bar: #3b7dd8; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; }
h1, h2, h3, li, p, dd, summary, figcaption { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .15rem .5rem; text-align: right; white-space: nowrap; }
td.text, th.text { text-align: left; }
@media (max-width: 40rem) { td.text, th.text { white-space: normal; } }
thead th { font-weight: 600; }
.good, .better { background: var(--good); } .bad, .worse { background: var(--bad); }
figure { margin: 0; } figcaption { font-size: .85rem; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: CanvasText; }
.grid { stroke: var(--line); fill: none; }
.charts { display: grid; gap: 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; font-size: .85rem; }
"""


def html_page(title: str, parts: Iterable[str], style: str = "") -> str:
    """Return a page. The title, which is also its heading, is text; the parts of the body are HTML.

    `style` has the rules of this page, which take precedence over the common ones.
    """
    heading = escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{heading}</title><style>{_STYLE}{style.lstrip()}</style></head><body>\n<h1>{heading}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


# ----------------------------------------------------------------------------------------------------------------------
# The page of both reports of `nnfmq mlts`.


_MLTS_STYLE = """
.scroll { margin: .5rem 0 1.5rem; }
th:first-child { text-align: left; }
.charts { grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); }
svg rect { fill: var(--bar); }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a page with a title, which is its heading, and the parts of its body, which are HTML."""
    return html_page(title, parts, _MLTS_STYLE)
