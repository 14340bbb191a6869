"""`nnfmq model`: look at a model file, draw it, and validate it by the HAL's rules.

This module declares the options of the actions and writes graphs; `model.show` and `model.validate` perform the other
actions. Besides .tflite and .onnx files they read test models of the HAL's suite (.jsonl, .jsonl.gz).
"""

from __future__ import annotations

import argparse
import sys

from nnfmq.cli.console import add_connect_argument, new_file
from nnfmq.cli.model_file import add_model_arguments
from nnfmq.cli.parser import CommandAction, add_actions

EXAMPLES = """\
examples:
  nnfmq model show mobilenet.tflite
  nnfmq model show mobilenet.tflite --device compiled --device reference
  nnfmq model svg mobilenet.tflite -o mobilenet.svg
  nnfmq model validate model.onnx

`nnfmq model ACTION --help` describes one action.
"""

_PLANNED = "plan for this device only; may be repeated (default: all devices)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `model`, and their options."""
    add_actions(parser, _ACTIONS)


def execute(arguments: argparse.Namespace) -> int:
    """Perform the action; return the exit status."""
    if arguments.action == "show":
        from nnfmq.cli.model.show import show

        return show(arguments)
    if arguments.action == "validate":
        from nnfmq.cli.model.validate import validate

        return validate(arguments)
    text = _graph(arguments)
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


def _graph(arguments: argparse.Namespace) -> str:
    """Return the graph of a model in Graphviz's language, or as a picture."""
    from nnfmq.cli.model.inspection import plan_of, read_drawn
    from nnfmq.graphs.graph_dump import graph_lines
    from nnfmq.graphs.picture import graph_svg, operation_graph

    inspected = read_drawn(arguments)
    plan = plan_of(arguments, inspected.model)
    if arguments.action == "svg":
        return graph_svg(operation_graph(inspected.model, plan))
    if arguments.operations:
        return operation_graph(inspected.model, plan)
    return "".join(f"{line}\n" for line in graph_lines(inspected.name, inspected.model, plan))


# ---- options


def _for_show(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_plan(parser, "ask this device which operations it supports, and plan for it; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _for_dot(parser: argparse.ArgumentParser) -> None:
    _for_svg(parser)
    parser.add_argument(
        "--operations", action="store_true", help="a shorter graph: operations with their shapes, and no constants"
    )


def _for_svg(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=new_file, help="write to FILE (default: stdout)")
    _add_plan(parser, _PLANNED)


def _for_validate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] MODEL.tflite"
    add_model_arguments(parser)
    parser.add_argument("--test", metavar="NAME", help="this test model of a .jsonl file")


def _add_plan(parser: argparse.ArgumentParser, device_help: str) -> None:
    parser.add_argument("--plan", action="store_true", help="with the plan: which device executes which operations")
    parser.add_argument("--device", metavar="NAME", action="append", default=[], help=device_help)
    add_connect_argument(parser)


_ACTIONS = {
    "show": CommandAction(
        "print inputs, outputs, operations, sizes, and the devices that support them",
        (
            "nnfmq model show mobilenet.tflite",
            "nnfmq model show mobilenet.tflite --device compiled --json",
            "nnfmq model show mobilenet.tflite --plan",
            "nnfmq model show detector.onnx --shape 4x320x320x3",
        ),
        _for_show,
    ),
    "dot": CommandAction(
        "print the graph of a model in Graphviz's language",
        (
            "nnfmq model dot mobilenet.tflite -o mobilenet.dot   # NNAPI's graph dump",
            "nnfmq model dot mobilenet.tflite --operations       # without constants",
        ),
        _for_dot,
    ),
    "svg": CommandAction(
        "draw the graph of a model",
        (
            "nnfmq model svg mobilenet.tflite -o mobilenet.svg",
            "nnfmq model svg mobilenet.tflite --plan -o plan.svg",
            "nnfmq model svg add.jsonl.gz --test add -o add.svg",
        ),
        _for_svg,
    ),
    "validate": CommandAction(
        "print every rule of the HAL that a model violates",
        ("nnfmq model validate mobilenet.tflite", "nnfmq model validate add.jsonl.gz --json"),
        _for_validate,
    ),
}
