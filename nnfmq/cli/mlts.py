"""`nnfmq mlts`: Android's Machine Learning Test Suite, its scoring benchmark (`bench`) and its crash tests (`crash`).

This module declares the options of the actions; `mlts_bench` and `mlts_crash` run them and print the results. Exit
status 1 means that a limit is exceeded, or that a crash test has another outcome than expected.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from nnfmq.base import settings
from nnfmq.cli.console import at_least_one, from_zero, new_file, pattern, seconds
from nnfmq.cli.parser import CommandAction, add_actions

EXAMPLES = """\
examples:
  nnfmq mlts bench --data mlts-models --html bench.html
  nnfmq mlts bench --only 'quant_topk' --photos 100 --csv bench.csv
  nnfmq mlts crash                             # each test 10 s on each device
  nnfmq mlts crash --device compiled --duration mlts --html crash.html
  nnfmq mlts crash --self-test                 # are crashes and hangs noticed?

`nnfmq mlts ACTION --help` describes one action.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `mlts`, and their options."""
    add_actions(parser, _ACTIONS)


def execute(arguments: argparse.Namespace) -> int:
    """Run the action; return the exit status."""
    module = importlib.import_module(f"nnfmq.cli.mlts_{arguments.action}")
    status: int = module.execute(arguments)
    return status


def _for_bench(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    parser.add_argument(
        "--duration", metavar="S", type=seconds, default=10.0, help="seconds of each measurement (default: 10)"
    )
    parser.add_argument("--warm-up", metavar="S", type=seconds, default=2.0, help="seconds before it (default: 2)")
    parser.add_argument("--photos", metavar="N", type=at_least_one, help="only the first N photos")
    parser.add_argument(
        "--litert", choices=("default", "reference", "none"), default="default",
        help="LiteRT's kernels: its default ones, the reference kernels, or do not run it",
    )  # fmt: skip
    parser.add_argument(
        "--connect", metavar="PATH|embedded",
        help="the socket of a driver (default: a private one, which has no program cache)",
    )  # fmt: skip


def _for_crash(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    parser.add_argument(
        "--duration", metavar="S|mlts", type=_duration, default=10.0,
        help="seconds of each test, or `mlts` for the minutes that MLTS takes (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--grace", metavar="S", type=seconds, default=20.0,
        help="a test that takes this much longer hangs (default: 20)",
    )  # fmt: skip
    parser.add_argument(
        "--connect", metavar="PATH", help="the socket of a driver that runs already (default: a new one for each test)"
    )
    parser.add_argument("--log", metavar="FILE", type=Path, help="the log of that driver, to find crashes in it")
    parser.add_argument("--seed", metavar="N", type=from_zero, default=0, help="first seed of random graphs")
    parser.add_argument("--dump", metavar="DIR", type=Path, help="folder for random graphs that fail, and for the logs")
    parser.add_argument("--self-test", action="store_true", help="test this suite: failures that it must notice")
    parser.add_argument("--list", action="store_true", help="list the tests, and run none")


def _common(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"  # the generated usage fills half of the screen
    default = settings.DATA.value()
    parser.add_argument(
        "--data", metavar="DIR", type=Path, default=Path(default) / "models" if default else None,
        help="folder of MLTS's models (default: $NNFMQ_DATA/models)",
    )  # fmt: skip
    parser.add_argument("--only", metavar="REGEX", type=pattern, default="", help="only tests whose name matches")
    parser.add_argument(
        "--device", metavar="NAME", action="append", default=[], help="only this device; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--csv", metavar="FILE", type=new_file, help="write the results as CSV")
    parser.add_argument("--html", metavar="FILE", type=new_file, help="write the results as an HTML page")


def _duration(text: str) -> float | None:
    return None if text == "mlts" else seconds(text)


_ACTIONS = {
    "bench": CommandAction(
        "measure accuracy, latency, compilation and start of MLTS's models beside LiteRT",
        (
            "nnfmq mlts bench --data mlts-models --html bench.html",
            "nnfmq mlts bench --only tts_float --litert none --json",
            "nnfmq mlts bench --photos 100 --litert reference --device compiled",
        ),
        _for_bench,
    ),
    "crash": CommandAction(
        "run MLTS's crash tests on every device of a driver",
        (
            "nnfmq mlts crash --device compiled --duration 60 --dump failed",
            "nnfmq mlts crash --only random --seed 1000",
            "nnfmq mlts crash --connect /run/nnfmq.sock --log driver.log",
        ),
        _for_crash,
    ),
}
