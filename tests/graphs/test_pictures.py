"""Graphviz, in pygraphviz, reads both graphs of a model and draws them as SVG."""

from __future__ import annotations

import io
import sys
from xml.etree import ElementTree

import pytest
from support.control_flow_models import branching, counting
from support.models import add_model
from support.small_models import with_constants

import nnfmq
from nnfmq.graphs.graph_dump import graph_dump
from nnfmq.graphs.picture import graph_svg, operation_graph
from nnfmq.hal.types import Model
from nnfmq.planning.plan import MAIN, ExecutionPlan, ExecutionStep

pygraphviz = pytest.importorskip("pygraphviz", reason="pygraphviz is not installed")
SVG = "{http://www.w3.org/2000/svg}"


def digits() -> Model:
    return nnfmq.load(nnfmq.example_path("digits.tflite")).model


def two_steps(model: Model) -> ExecutionPlan:
    """Return a plan that executes the first two operations on another device than the rest."""
    rest = tuple(range(2, len(model.main.operations)))
    steps = (ExecutionStep(0, MAIN, (0, 1), model, (), ()), ExecutionStep(1, MAIN, rest, model, (), ()))
    return ExecutionPlan(model, ('a "quoted" device', "<b>"), steps)


@pytest.mark.parametrize("model", [add_model(), branching(), counting(), digits()])
@pytest.mark.parametrize("has_plan", [False, True])
def test_UTL_6_graphviz_finds_each_operation_operand_and_edge(model: Model, has_plan: bool) -> None:
    plan = two_steps(model) if has_plan else None
    stream = io.StringIO()
    graph_dump("name", model, stream, plan)
    graph = pygraphviz.AGraph(string=stream.getvalue())
    subgraphs = (model.main, *model.referenced)
    nodes = sum(len(subgraph.operands) + len(subgraph.operations) for subgraph in subgraphs)
    edges = sum(len(one.inputs) + len(one.outputs) for subgraph in subgraphs for one in subgraph.operations)
    assert graph.number_of_nodes() == nodes
    assert graph.number_of_edges() == edges
    assert len(
        [one for one in graph.subgraphs() if one.name.startswith("cluster_s") and one.name[9:].isdigit()]
    ) == len(model.referenced)


def texts(svg: str) -> list[str]:
    return [" ".join("".join(one.itertext()).split()) for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_picture_has_a_box_for_each_operation_with_the_shapes_of_its_weights_and_outputs() -> None:
    found = "\n".join(texts(graph_svg(operation_graph(digits()))))
    for name in ("CONV_2D", "MAX_POOL_2D", "FULLY_CONNECTED", "SOFTMAX"):
        assert name in found
    assert "input 0\nTENSOR_FLOAT32 1x8x8x1" in found
    assert "output 0\nTENSOR_FLOAT32 1x10" in found
    weights = digits().main.operands[digits().main.operations[0].inputs[1]].dimensions
    assert f"{'x'.join(map(str, weights))} → 1x" in found


def test_a_picture_shows_the_steps_of_a_plan_and_their_devices() -> None:
    graph = operation_graph(digits(), two_steps(digits()))
    svg = graph_svg(graph)
    assert 'step 0: a "quoted" device' in texts(svg)
    assert "step 1: <b>" in texts(svg)
    classes = [one.get("class") for one in ElementTree.fromstring(svg).iter(f"{SVG}g")]
    assert classes.count("node op device0") == 2
    assert classes.count("node op device1") == len(digits().main.operations) - 2


def test_a_picture_shows_subgraphs_and_the_operations_that_call_them() -> None:
    svg = graph_svg(operation_graph(counting()))
    assert {"subgraph 0", "subgraph 1"} <= set(texts(svg))
    classes = [one.get("class") for one in ElementTree.fromstring(svg).iter(f"{SVG}g")]
    assert classes.count("edge call") == 2


def test_constants_are_not_in_a_picture() -> None:
    with nnfmq.Memory.create(64) as pool:
        model = with_constants(pool)
        graph = pygraphviz.AGraph(string=operation_graph(model))
    boundary = len(model.main.input_indexes) + len(model.main.output_indexes)
    assert graph.number_of_nodes() == boundary + len(model.main.operations)


def test_a_picture_is_light_or_dark_as_its_page() -> None:
    assert "@media (prefers-color-scheme: dark)" in graph_svg(operation_graph(add_model()))


def test_without_pygraphviz_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    with pytest.raises(nnfmq.DeviceUnavailable, match=r"pip install 'nnfmq\[graphs\]'"):
        graph_svg(operation_graph(add_model()))
