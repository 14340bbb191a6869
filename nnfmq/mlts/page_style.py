"""The frame of both HTML reports: head, style and body, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a83; --bad: #d338; --bar: #3b7dd8; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; }
h1, h2, h3, li, p { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .5rem 0 1.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .15rem .5rem; text-align: right; white-space: nowrap; }
th:first-child, td.text, th.text { text-align: left; }
.better, .good { background: var(--good); } .worse, .bad { background: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-size: .85rem; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } svg rect { fill: var(--bar); } svg text { font: 11px system-ui; fill: CanvasText; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a page with a title, which is its heading, and the parts of its body, which are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
