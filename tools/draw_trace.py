"""Draw one request of a trace as SVG: its slices on the tracks of both threads, and the arrows between them.

The request is the one whose duration is the median of all. For docs/how-to/figures/trace.svg.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nnfmq.observe.chrome_trace import read_trace
from nnfmq.observe.trace_layout import STANDARD_NAMES
from nnfmq.observe.trace_model import Slice, Trace

_WIDTH, _LEFT, _ROW, _GAP = 960, 16, 26, 74
_EXECUTE = STANDARD_NAMES[3]
_COLOURS = {"LR": "#cfe0f5", "LI": "#e7e0f5", "LD": "#d8eedb", "LC": "#fbe7c2"}
_TEXT = 'font-family="system-ui, sans-serif" fill="#1f2d3d"'


def chosen(trace: Trace) -> list[Slice]:
    """Return the slices of the request with the median duration, on both of its threads.

    Raises:
        ValueError: If the trace has no requests of a client.
    """
    executions = sorted((one for one in trace.slices if one.name == _EXECUTE), key=lambda one: one.duration_ns)
    if not executions:
        raise ValueError("the trace has no burst requests of a client")
    execute = executions[len(executions) // 2]
    threads = {(one.pid, one.thread) for one in trace.slices if one.request == execute.request}
    return [
        one
        for one in trace.slices
        if (one.pid, one.thread) in threads
        and one.begin_ns >= execute.begin_ns
        and one.end_ns <= execute.end_ns
        and one.name != "[NN_LA_PO]application"
    ]


def draw(slices: Sequence[Slice]) -> str:
    """Return the SVG."""
    begin_ns, end_ns = slices[0].begin_ns, max(one.end_ns for one in slices)
    scale = (_WIDTH - 2 * _LEFT) / (end_ns - begin_ns)
    threads = list(dict.fromkeys((one.pid, one.thread) for one in slices))
    body: list[str] = []
    top = 14
    tops: dict[str, tuple[float, float, float]] = {}
    for number, thread in enumerate(threads):
        rows = list(_rows([one for one in slices if (one.pid, one.thread) == thread]))
        title = "application" if number == 0 else "worker"
        body.append(f'<text x="{_LEFT}" y="{top + 8}" font-size="13" font-weight="600" {_TEXT}>{title}</text>')
        for depth, one in rows:
            x, y = _LEFT + (one.begin_ns - begin_ns) * scale, top + 16 + depth * _ROW
            width = max(one.duration_ns * scale, 1.0)
            tops[one.name] = (x, y, width)
            body.append(_box(one, x, y, width))
        top += 16 + (1 + max(depth for depth, _ in rows)) * _ROW + _GAP
    body += _arrows(tops)
    body.append(
        f'<text x="{_WIDTH - _LEFT}" y="22" font-size="12" text-anchor="end" {_TEXT}>'
        f"{(end_ns - begin_ns) / 1000:,.1f} µs in all</text>"
    )
    height = top - _GAP + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">\n'
        '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 10 5 0 10z" fill="#607080"/></marker></defs>\n'
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _rows(slices: Sequence[Slice]) -> Iterator[tuple[int, Slice]]:
    """Yield each slice with the number of slices around it."""
    ends: list[int] = []
    for one in slices:
        while ends and ends[-1] <= one.begin_ns:
            ends.pop()
        yield len(ends), one
        ends.append(one.end_ns)


def _box(one: Slice, x: float, y: float, width: float) -> str:
    colour = _COLOURS.get(one.name[4:6], "#e8e8e8")
    label = one.name.partition("]")[2] or one.name
    text = html.escape(f"{label} {one.duration_ns / 1000:.1f} µs")
    title = html.escape(f"{one.name}: {one.duration_ns / 1000:.2f} µs")
    shown = next((words for words in (text, html.escape(label)) if 6.4 * len(words) + 6 < width), "")
    return (
        f'<g><title>{title}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" rx="3"'
        f' fill="{colour}" stroke="#8a99ab" stroke-width="0.7"/>'
        f'<text x="{x + 4:.1f}" y="{y + 15}" font-size="11" {_TEXT}>{shown}</text></g>'
    )


def _arrows(tops: dict[str, tuple[float, float, float]]) -> Iterator[str]:
    """Yield the arrows of the request and of its result."""
    write, wait, request = (tops.get(STANDARD_NAMES[number]) for number in (4, 5, 0))
    if write is None or wait is None or request is None:
        return
    below = _ROW - 4
    for (x1, y1), (x2, y2) in (
        ((write[0] + write[2], write[1] + below), (request[0], request[1])),
        ((request[0] + request[2], request[1]), (wait[0] + wait[2], wait[1] + below)),
    ):
        yield (
            f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}" stroke="#607080" stroke-width="1.4"'
            ' marker-end="url(#a)"/>'
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the trace that the arguments name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("trace", type=Path, help="JSON of `nnfmq trace`")
    parser.add_argument("svg", type=Path, help="the file to write")
    arguments = parser.parse_args(argv)
    arguments.svg.write_text(draw(chosen(read_trace(arguments.trace))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
