"""Measure what a replica of Ray Serve costs: empty, with our driver, and with LiteRT inside; its time and its memory.

    python tools/ray_bench.py                                   # both sections: some minutes
    python tools/ray_bench.py --sections overhead --rounds 3 --requests 50 --json

`overhead`: one client sends one request after the other, over a deployment handle and over HTTP, to each deployment in
turn; a burst of the same model without Ray runs in turn with them. `memory`: PSS (proportional set size) of replicas
with a generated model of 100 MB. The cluster is one node at a loopback address. The deployments get the same input.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_program import model_file, parse, parser_for, positive, run, some_of
from bench_targets import print_targets
from ray_bench_memory import memory
from ray_bench_overhead import overhead
from ray_bench_serve import StartedServe
from ray_nodes import started_nodes, started_serve

from nnfmq.cli.console import console, table
from nnfmq.measure.load_report import cpu_model

MODEL = "models/mobilenet_v1_0.25_128_quant.tflite"
SECTIONS = ("overhead", "memory")
Report = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status as `bench_program.run`."""
    options = parse(_parser(), argv)
    return run(options, measure, _print, "ray_bench")


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(__doc__)
    parser.add_argument(
        "--sections", type=some_of(SECTIONS), default=SECTIONS, metavar="NAME,...", help=f"{', '.join(SECTIONS)}"
    )
    parser.add_argument("--model", type=Path, help=f"of section overhead (default: {MODEL} in $NNFMQ_DATA)")
    parser.add_argument("--rounds", type=positive, default=40, help="interleaved rounds (default: 40)")
    parser.add_argument("--requests", type=positive, default=100, help="of each round and transport (default: 100)")
    parser.add_argument("--replicas", type=positive, default=8, help="of section memory (default: 8)")
    parser.add_argument("--megabytes", type=positive, default=100, help="weights of section memory (default: 100)")
    parser.add_argument(
        "--settle", type=float, default=12.0, metavar="S",
        help="seconds between the first requests and the reading of memory: compile processes end 10 s after their "
        "last use (default: 12)",
    )  # fmt: skip
    return parser


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Return the report, as --json prints it. `folder` is for the files of Ray and of the driver.

    Raises:
        BenchmarkFailed: If a deployment returns something wrong, or the model is missing.
    """
    load = os.getloadavg()
    with started_nodes(folder) as nodes, started_serve(nodes) as port:
        started = StartedServe(nodes.addresses[0], port, folder)
        sections = {name: SECTION[name](options, started) for name in options.sections}
    targets = [target for section in sections.values() for target in section["targets"]]
    return {
        "conditions": _conditions(options, load), **sections,
        "targets": targets, "missed": [target["target"] for target in targets if target["met"] is False],
    }  # fmt: skip


SECTION: dict[str, Callable[[argparse.Namespace, StartedServe], Report]] = {
    "overhead": lambda options, started: overhead(
        started, model_file(options, MODEL, "section overhead"), options.rounds, options.requests
    ),
    "memory": lambda options, started: memory(started, options.replicas, options.megabytes, options.settle),
}


def _conditions(options: argparse.Namespace, load: tuple[float, ...]) -> Report:
    return {
        "rounds": options.rounds, "requests": options.requests, "replicas": options.replicas,
        "megabytes": options.megabytes, "ray": version("ray"), "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)), "kernel": platform.release(), "python": platform.python_version(),
        "load_before": [round(value, 2) for value in load],
    }  # fmt: skip


# ---- printing


def _print(report: Report, no_color: bool) -> None:
    screen = console(no_color, at_least=80)
    if "overhead" in report:
        _print_overhead(screen, report["overhead"])
    if "memory" in report:
        _print_memory(screen, report["memory"])
    if report["targets"]:
        print_targets(screen, report["targets"])
    for name, value in report["conditions"].items():
        screen.print(f"{name}: {value}")


def _print_overhead(screen: Any, section: Report) -> None:
    screen.print(f"µs of one request with {section['model']}", style="bold")
    rows = table("transport", "replica", ">p50", ">p99", ">p99.9", ">requests")
    for transport, candidates in section["transports"].items():
        for name, found in candidates.items():
            rows.add_row(
                transport, name, *(f"{found[each]:,.0f}" for each in ("p50", "p99", "p99.9")), str(found["count"])
            )
    screen.print(rows)


def _print_memory(screen: Any, section: Report) -> None:
    screen.print(f"MiB of {section['replicas']} replicas", style="bold")
    rows = table("replicas", "processes", ">count", ">PSS", ">Private_Dirty")
    for name, kinds in section["deployments"].items():
        for kind, found in kinds.items():
            rows.add_row(name, kind, str(found["count"]), f"{found['pss']:.1f}", f"{found['private_dirty']:.1f}")
    screen.print(rows)


if __name__ == "__main__":
    sys.exit(main())
