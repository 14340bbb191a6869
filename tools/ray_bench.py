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
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_targets import print_targets
from process_tree import adopt_orphans, end_descendants, interrupt_on_sigterm
from ray_bench_memory import memory
from ray_bench_overhead import overhead
from ray_bench_serve import StartedServe
from ray_nodes import started_nodes, started_serve

from nnfmq.cli.console import console, print_json, table
from nnfmq.hal.errors import NnfmqError
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.load_report import cpu_model

MODEL = "models/mobilenet_v1_0.25_128_quant.tflite"
SECTIONS = ("overhead", "memory")
Report = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 if all was measured, 1 after a failure or a missed target, 130 if interrupted."""
    options = _parser().parse_args(argv)
    adopt_orphans()
    interrupt_on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="nq-", ignore_cleanup_errors=True) as folder:
            report = measure(options, Path(folder))
    except (BenchmarkFailed, NnfmqError, OSError) as error:
        print(f"ray_bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        end_descendants()
    if options.json:
        print_json(report)
    else:
        _print(report, options.no_color)
    return 1 if options.check_targets and report["missed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--sections", type=_sections, default=SECTIONS, metavar="NAME,...", help=f"{', '.join(SECTIONS)}"
    )
    parser.add_argument("--model", type=Path, help=f"of section overhead (default: {MODEL} in $NNFMQ_DATA)")
    parser.add_argument("--rounds", type=_positive, default=40, help="interleaved rounds (default: 40)")
    parser.add_argument("--requests", type=_positive, default=100, help="of each round and transport (default: 100)")
    parser.add_argument("--replicas", type=_positive, default=8, help="of section memory (default: 8)")
    parser.add_argument("--megabytes", type=_positive, default=100, help="weights of section memory (default: 100)")
    parser.add_argument(
        "--settle", type=float, default=12.0, metavar="S",
        help="seconds between the first requests and the reading of memory: compile processes end 10 s after their "
        "last use (default: 12)",
    )  # fmt: skip
    parser.add_argument("--check-targets", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-color", action="store_true")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(SECTIONS):
        raise argparse.ArgumentTypeError(f"there are {', '.join(SECTIONS)}")
    return names


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
    "overhead": lambda options, started: overhead(started, _model(options), options.rounds, options.requests),
    "memory": lambda options, started: memory(started, options.replicas, options.megabytes, options.settle),
}


def _model(options: argparse.Namespace) -> Path:
    data = os.environ.get("NNFMQ_DATA")
    path: Path | None = options.model or (Path(data) / MODEL if data else None)
    if path is None or not path.is_file():
        raise BenchmarkFailed("section overhead needs --model FILE, or $NNFMQ_DATA with the models")
    return path


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
