"""graph_svg: a graph in Graphviz's language as SVG, light or dark as its page, drawn by the Graphviz in pygraphviz."""

from __future__ import annotations

import re

from nnfmq.graphs.step_clusters import COLOURS
from nnfmq.hal.errors import DeviceUnavailable

__all__ = ["graph_svg"]

_DARK = ("#2f5f9e", "#9a5a1c", "#3d7a3d", "#7d4d96", "#9c4545", "#237b82", "#7d6a14", "#5a5a5a")
_DEVICES = "".join(f".device{i} > path {{ fill: {colour}; }}\n" for i, colour in enumerate(COLOURS))
_DARK_DEVICES = "".join(f".device{i} > path {{ fill: {colour}; }}\n" for i, colour in enumerate(_DARK))
_STYLE = f"""
svg {{ color-scheme: light dark; max-width: 100%; height: auto; }}
{_DEVICES}
.step > polygon {{ fill: none; }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6e6e6; }}
path, polygon {{ stroke: #9a9a9a; }}
.edge > polygon {{ fill: #9a9a9a; }}
.op > path {{ fill: #2a2a2a; }}
.io > path {{ fill: #e6e6e6; }} .io > text {{ fill: black; }}
{_DARK_DEVICES}
}}
"""


def graph_svg(graph: str) -> str:
    """Return a self-contained SVG of the graph.

    Raises:
        DeviceUnavailable: If pygraphviz, which contains Graphviz, is not installed. The text says how to install it.
    """
    try:
        import pygraphviz
    except ImportError:
        raise DeviceUnavailable(
            "drawing needs pygraphviz: pip install 'nnfmq[graphs]'; or pass the output of `nnfmq model dot` to Graphviz"
        ) from None
    drawn: bytes = pygraphviz.AGraph(string=graph).draw(format="svg", prog="dot")
    start = drawn.decode().index("<svg")
    return re.sub(r"(<svg[^>]*>)", rf"\1\n<style>{_STYLE}</style>", drawn.decode()[start:], count=1)
