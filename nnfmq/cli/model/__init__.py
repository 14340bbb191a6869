"""`nnfmq model`: look at a model file, draw it, and validate it by the HAL's rules.

This module declares the options of the actions; `model.show`, `model.graph` and `model.validate` perform them. Besides
.tflite and .onnx files they read test models of the HAL's suite (.jsonl, .jsonl.gz).
"""

from __future__ import annotations

import argparse
import importlib

from nnfmq.cli.console import new_file
from nnfmq.cli.model.plan import add_plan_arguments
from nnfmq.cli.model_file import add_model_arguments

EXAMPLES = """\
examples:
  nnfmq model show mobilenet.tflite
  nnfmq model show mobilenet.tflite --device compiled --device reference
  nnfmq model svg mobilenet.tflite -o mobilenet.svg
  nnfmq model validate model.onnx

`nnfmq model ACTION --help` describes one action.
"""

_ACTION_EXAMPLES = {
    "show": (
        "show mobilenet.tflite",
        "show mobilenet.tflite --device compiled --json",
        "show mobilenet.tflite --plan",
        "show detector.onnx --shape 4x320x320x3",
    ),
    "dot": (
        "dot mobilenet.tflite -o mobilenet.dot   # NNAPI's graph dump",
        "dot mobilenet.tflite --operations       # without constants",
    ),
    "svg": (
        "svg mobilenet.tflite -o mobilenet.svg",
        "svg mobilenet.tflite --plan -o plan.svg",
        "svg add.jsonl.gz --test add -o add.svg",
    ),
    "validate": ("validate mobilenet.tflite", "validate add.jsonl.gz --json"),
}
_SUMMARIES = {
    "show": "print inputs, outputs, operations, sizes, and the devices that support them",
    "dot": "print the graph of a model in Graphviz's language",
    "svg": "draw the graph of a model",
    "validate": "print every rule of the HAL that a model violates",
}
_PLANNED = "plan for this device only; may be repeated (default: all devices)"
_MODULES = {"show": "show", "dot": "graph", "svg": "graph", "validate": "validate"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `model`, and their options."""
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    declare = {"show": _for_show, "dot": _for_dot, "svg": _for_svg, "validate": _for_validate}
    for name, summary in _SUMMARIES.items():
        examples = "\n".join(["examples:", *(f"  nnfmq model {example}" for example in _ACTION_EXAMPLES[name])])
        action = actions.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=examples, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        action.usage = f"nnfmq model {name} [options] MODEL.tflite"
        action.add_argument("--no-color", action="store_true", default=argparse.SUPPRESS, help="plain text")
        add_model_arguments(action)
        action.add_argument("--test", metavar="NAME", help="this test model of a .jsonl file")
        declare[name](action)


def execute(arguments: argparse.Namespace) -> int:
    """Perform the action; return the exit status."""
    module = importlib.import_module(f"nnfmq.cli.model.{_MODULES[arguments.action]}")
    status: int = module.execute(arguments)
    return status


def _for_show(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser, "ask this device which operations it supports, and plan for it; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _for_dot(parser: argparse.ArgumentParser) -> None:
    _add_output(parser)
    add_plan_arguments(parser, _PLANNED)
    parser.add_argument(
        "--operations", action="store_true", help="a shorter graph: operations with their shapes, and no constants"
    )


def _for_svg(parser: argparse.ArgumentParser) -> None:
    _add_output(parser)
    add_plan_arguments(parser, _PLANNED)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", type=new_file, help="write to FILE (default: stdout)")


def _for_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
