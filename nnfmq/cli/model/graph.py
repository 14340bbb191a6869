"""`nnfmq model dot` and `nnfmq model svg`: the graph of a model as text or as a picture."""

from __future__ import annotations

import argparse
import sys

from nnfmq.cli.model.inspection import InspectedModel, read_inspected
from nnfmq.cli.model.plan import plan_of

__all__ = ["execute"]


def execute(arguments: argparse.Namespace) -> int:
    """Read the model and write its graph; return the exit status."""
    text = _graph(arguments, read_inspected(arguments))
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


def _graph(arguments: argparse.Namespace, inspected: InspectedModel) -> str:
    from nnfmq.graphs.graph_dump import graph_lines
    from nnfmq.graphs.picture import operation_graph

    plan = plan_of(arguments, inspected.model)
    if arguments.action == "svg":
        from nnfmq.graphs.picture import graph_svg

        return graph_svg(operation_graph(inspected.model, plan))
    if arguments.operations:
        return operation_graph(inspected.model, plan)
    return "".join(f"{line}\n" for line in graph_lines(inspected.name, inspected.model, plan))
