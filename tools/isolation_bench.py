"""Measure how well one driver separates its clients: silent connections, killed clients, and a neighbour's bursts.

    python tools/isolation_bench.py                                          # 100 kills in each phase: half an hour
    python tools/isolation_bench.py --sections kills --phases idle,copying --kills 10 --json

`connections` opens 2,000 connections that send nothing, from one process, while 100 clients connect. `kills` kills
clients while the driver copies a pool, decodes a large message, compiles, computes on either device, or waits, and
measures the time to the exit of the worker and to the return of the memory. `neighbour` measures a client's bursts,
client and worker on one CPU, while everything else does the same things on another CPU. The machine should do nothing
else meanwhile. At the end, also on Ctrl-C, all processes are killed and all files removed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_program import model_file, parse, parser_for, positive, run, some_of
from bench_targets import format_metric, print_targets
from isolation_actions import PHASES, PhaseJob, write_message
from isolation_sections import MIB, IsolationPlan, connections, kills, neighbour

from nnfmq.cli.console import console, table
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.listening_driver import started_daemon
from nnfmq.measure.load_report import cpu_model

SECTIONS: dict[str, Callable[[IsolationPlan], Any]] = {
    "connections": connections,
    "kills": kills,
    "neighbour": neighbour,
}
COMPILED = "models/mobilenet_v2_1.0_224_quant.tflite"
_MEMORY_MIB, _MEMORY_PER_MESSAGE, _MEMORY_PER_POOL = 1024, 64, 4  # that the driver may take: enough for the phases
_PRELOADED = ["numpy", "nnfmq.runtime.client", "nnfmq.runtime.connect", "nnfmq.runtime.burst_controller",
              "nnfmq.importers.tflite"]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status as `bench_program.run`."""
    options = parse(_parser(), argv)
    return run(options, measure, _print, "isolation_bench")


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(__doc__)
    parser.add_argument("--sections", type=some_of(SECTIONS), default=tuple(SECTIONS), metavar="NAME,...",
                        help=", ".join(SECTIONS))  # fmt: skip
    parser.add_argument("--phases", type=some_of(PHASES), default=tuple(PHASES), metavar="NAME,...",
                        help=", ".join(PHASES))  # fmt: skip
    parser.add_argument("--kills", type=positive, default=100, help="in each phase (default: 100)")
    parser.add_argument("--silent", type=positive, default=2000, help="silent connections (default: 2000)")
    parser.add_argument("--connects", type=positive, default=100, help="of clients that send a hello (default: 100)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one trial of the neighbour (default: 3)")
    parser.add_argument("--rounds", type=positive, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--pool-mib", type=positive, default=1024, help="pool of phase copying (default: 1024)")
    parser.add_argument("--message-mib", type=positive, default=64, help="message of phase decoding (default: 64)")
    parser.add_argument("--model", type=Path, help=f"of phase compiling (default: {COMPILED} in $NNFMQ_DATA)")
    parser.add_argument("--limit", type=positive, default=120, metavar="S", help="time limit of each step in seconds")
    return parser


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the report, as --json prints it. `folder` is for the driver's files.

    Raises:
        BenchmarkFailed: If the driver or a client fails, or a step takes longer than its limit.
    """
    load = os.getloadavg()
    message = folder / "message"
    if "decoding" in options.phases and set(options.sections) & {"kills", "neighbour"}:
        _say(f"encoding a model of {options.message_mib} MiB")
        write_message(message, options.message_mib * MIB)
    memory_mib = str(max(_MEMORY_MIB, _MEMORY_PER_MESSAGE * options.message_mib, _MEMORY_PER_POOL * options.pool_mib))
    environment = {"NNFMQ_CACHE_MIB": "0", "NNFMQ_CLIENT_MEMORY_MIB": memory_mib, "NNFMQ_MEMORY_MIB": memory_mib}
    with started_daemon(folder, environment) as daemon:
        job = PhaseJob("", daemon.socket, options.pool_mib * MIB, message, _model(options), options.limit)
        plan = IsolationPlan(
            daemon, job, options.phases, options.kills, options.silent, options.connects, options.seconds,
            options.rounds, options.limit, _forkserver(), _say,
        )  # fmt: skip
        found = {name: SECTIONS[name](plan) for name in options.sections}
        log = daemon.log.read_text().splitlines()
    missed = [target["target"] for target in targets_of(found) if target["met"] is False]
    return {"conditions": _conditions(options, load), **found, "missed": missed, "log": log[-20:]}


def _model(options: argparse.Namespace) -> Path:
    """Return the model of phase compiling; an empty path if nothing needs it and it is not there."""
    is_needed = "compiling" in options.phases and bool(set(options.sections) & {"kills", "neighbour"})
    try:
        return model_file(options, COMPILED, "phase compiling")
    except BenchmarkFailed:
        if is_needed:
            raise
        return Path()


def _forkserver() -> Any:
    """Return a context of multiprocessing whose processes have imported the client already."""
    # The forkserver imports from the current directory otherwise: in a source tree that is not what is installed.
    os.environ["PYTHONSAFEPATH"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _conditions(options: argparse.Namespace, load: tuple[float, float, float]) -> dict[str, Any]:
    return {
        "cpu": cpu_model(), "cpus_allowed": sorted(os.sched_getaffinity(0)), "kernel": platform.release(),
        "python": platform.python_version(), "rounds": options.rounds, "kills": options.kills,
        "pool_mib": options.pool_mib, "message_mib": options.message_mib,
        "load_before": [round(value, 2) for value in load],
    }  # fmt: skip


def targets_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the targets of all sections."""
    rows = [row for name in SECTIONS if name in found for row in _rows(found[name])]
    return [target for row in rows for target in row["targets"]]


def _rows(section: Any) -> list[dict[str, Any]]:
    return section if isinstance(section, list) else [section]


# ---- printing


def _say(text: str) -> None:
    print(f"isolation_bench: {text}", file=sys.stderr, flush=True)


def _print(report: dict[str, Any], no_color: bool) -> None:
    screen = console(no_color, at_least=120)
    printers: dict[str, Callable[[Any], Any]] = {
        "connections": _connections_table,
        "kills": _kills_table,
        "neighbour": _neighbour_table,
    }
    for name, print_table in printers.items():
        if name in report:
            screen.print(name, style="bold")
            screen.print(print_table(report[name]))
            print_targets(screen, [target for row in _rows(report[name]) for target in row["targets"]])
    for name, value in report["conditions"].items():
        screen.print(f"{name}: {value}")


def _times(found: dict[str, float] | None, unit: str, names: Sequence[str]) -> list[str]:
    return [format_metric(found[name] if found else None, unit if found else "") for name in names]


def _connections_table(found: dict[str, Any]) -> Any:
    rows = table("connects", ">count", ">failed", ">p50", ">p99", ">max")
    for text, name, errors in (("alone", "alone_ms", 0), ("beside silent connections", "beside_ms", found["failed"])):
        count = found[name]["count"] if found[name] else 0
        rows.add_row(text, str(count), str(errors), *_times(found[name], "ms", ("p50", "p99", "max")))
    return rows


def _kills_table(found: list[dict[str, Any]]) -> Any:
    heads = (">kills", ">work s", "status", ">exit p50", ">p99", ">max", ">memory MiB", ">returned p99", ">max")
    rows = table("phase", *heads)
    for row in found:
        exits = _times(row["exit_ms"], "ms", ("p50", "p99", "max"))
        memory = _times(row["memory_ms"], "ms", ("p99", "max"))
        used = f"{row['used_bytes'] / MIB:.0f}"
        rows.add_row(row["phase"], str(row["kills"]), f"{row['work_s']:.2f}", row["status"], *exits, used, *memory)
    return rows


def _neighbour_table(found: list[dict[str, Any]]) -> Any:
    rows = table("beside", ">repetitions", "status", ">alone p50", ">p99", ">beside p50", ">p99", ">p99.9")
    for row in found:
        alone = _times(row["alone_us"], "µs", ("p50", "p99"))
        beside = _times(row["beside_us"], "µs", ("p50", "p99", "p99.9"))
        rows.add_row(row["phase"], str(row["repetitions"]), row["status"], *alone, *beside)
    return rows


if __name__ == "__main__":
    sys.exit(main())
