"""The operations of a model and what flows between them, in Graphviz's language and as SVG.

Unlike NNAPI's graph dump it has no constants: a box shows an operation, the shapes of its constant tensors of rank 2
and more, and the shapes of its outputs. IF and WHILE point to the subgraphs that they call. Classes (`op`, `io`,
`device0`) are for the style sheet of an SVG.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from nnfmq.graphs.graph_dump import COLOURS, StepCluster, StepClusters, file_names
from nnfmq.hal.errors import DeviceUnavailable
from nnfmq.hal.summaries import code_name
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, Subgraph
from nnfmq.planning.plan import ExecutionPlan, subgraph_of

__all__ = ["graph_svg", "operation_graph"]

_CONSTANTS = (LifeTime.CONSTANT_COPY, LifeTime.CONSTANT_REFERENCE)
_HEAD = (
    'bgcolor=transparent ranksep=0.18 nodesep=0.25 compound=true fontname="Helvetica,Arial,sans-serif"',
    'labeljust=l color="#888888" fontsize=9',
    'node [fontname="Helvetica,Arial,sans-serif" fontsize=11 shape=box style="rounded,filled" height=0.28 '
    'margin="0.1,0.03" fillcolor=white]',
    'edge [fontname="Helvetica,Arial,sans-serif" fontsize=9 arrowsize=0.6]',
)


def operation_graph(model: Model, plan: ExecutionPlan | None = None) -> str:
    """Return the graph; the steps of `plan` are clusters with the colours of their devices. The model must be valid."""
    clusters = StepClusters(plan)
    lines = ["digraph {", *(f"    {line}" for line in _HEAD)]
    for number in range(1 + len(model.referenced)):
        lines += _subgraph(model, number, clusters)
    return "\n".join([*lines, "}", ""])


def _subgraph(model: Model, number: int, clusters: StepClusters) -> Iterator[str]:
    subgraph, prefix = subgraph_of(model, number), f"s{number}_"
    if number:
        yield f'    subgraph cluster_s{number} {{ class="subgraph" style=dashed label="subgraph {number - 1}"'
    yield from _boundary(subgraph, prefix)
    files = list(dict.fromkeys(file_names(model).values()))
    for index, operation in enumerate(subgraph.operations):
        cluster = clusters.of(number, index)
        box = _box(subgraph, operation, f"{prefix}n{index}", index, cluster, files)
        yield f"    {_in_step(box, cluster)}"
    yield from _flow(subgraph, prefix)
    if number:
        yield "    }"
    yield from _calls(subgraph, prefix)


def _boundary(subgraph: Subgraph, prefix: str) -> Iterator[str]:
    for kind, indexes in (("input", subgraph.input_indexes), ("output", subgraph.output_indexes)):
        for position, index in enumerate(indexes):
            operand = subgraph.operands[index]
            label = f"{kind} {position}\\n{code_name(operand.type)} {_shape(operand.dimensions)}".rstrip()
            name = f"{prefix}{kind}{position}"
            yield f'    {name} [class=io label="{label}" fillcolor=black fontcolor=white]'


def _in_step(box: str, cluster: StepCluster) -> str:
    """Return the box, in the cluster of its step if there is one."""
    if not cluster.step:
        return box
    frame = f'class="step device{cluster.device}" margin=6 label="{cluster.label}"'
    return f"subgraph cluster_{cluster.step} {{ {frame} {box} }}"


def _box(
    subgraph: Subgraph, operation: Operation, node: str, index: int, cluster: StepCluster, files: Sequence[str]
) -> str:
    """Return the box of an operation; `files` are those of a hosted model."""
    look = ' class="op"'
    if cluster.device >= 0:
        number = min(cluster.device, len(COLOURS) - 1)
        look = f' class="op device{number}" fillcolor="{COLOURS[number]}"'
    operands = subgraph.operands
    shapes = (_shape(operands[i].dimensions) for i in operation.inputs if _is_weight(operands[i]))
    weights = ", ".join([*files, *shapes])
    results = ", ".join(_shape(operands[i].dimensions) for i in operation.outputs)
    details = " → ".join(part for part in (weights, results) if part)
    name = escape(code_name(operation.type))
    label = f'<{index}  <B>{name}</B>  <FONT POINT-SIZE="9">{escape(details)}</FONT>>'
    return f"{node} [label={label}{look}]"


def _is_weight(operand: Operand) -> bool:
    return operand.lifetime in _CONSTANTS and len(operand.dimensions) > 1


def _shape(dimensions: Sequence[int]) -> str:
    return "x".join(str(extent or "?") for extent in dimensions)


def _flow(subgraph: Subgraph, prefix: str) -> Iterator[str]:
    """Yield an edge from the producer of each value to each of its consumers."""
    sources = {index: f"{prefix}input{position}" for position, index in enumerate(subgraph.input_indexes)}
    for number, operation in enumerate(subgraph.operations):
        for index in dict.fromkeys(operation.inputs):
            if index in sources:
                yield f"    {sources[index]} -> {prefix}n{number}"
        sources |= dict.fromkeys(operation.outputs, f"{prefix}n{number}")
    for position, index in enumerate(subgraph.output_indexes):
        if index in sources:
            yield f"    {sources[index]} -> {prefix}output{position}"


def _calls(subgraph: Subgraph, prefix: str) -> Iterator[str]:
    """Yield a dashed edge from IF and WHILE to each subgraph that they call."""
    for number, operation in enumerate(subgraph.operations):
        for index in operation.inputs:
            operand = subgraph.operands[index]
            if operand.lifetime is LifeTime.SUBGRAPH:
                callee = operand.location.offset + 1
                yield f"    {prefix}n{number} -> s{callee}_n0 [class=call style=dashed lhead=cluster_s{callee}]"


# ----------------------------------------------------------------------------------------------------------------------
# graph_svg: a graph in Graphviz's language as SVG, light or dark as its page, drawn by the Graphviz in pygraphviz.


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
