"""Measure round trips of a null model and of a real one through the driver process, in µs, with their percentiles.

The null model is one RESHAPE of one float, so its time is nnfmq's own overhead. Paths: `burst` (arrays in, new arrays
out), `in-place` (the burst's own shared arrays, no copies), `ordinary` (one control message per execution). Every
client is a separate process, and all clients begin each series together. Each round trip is recorded, as measured by
the application around the call. With --baselines, rounds of the null burst, of a C ping-pong and of a
multiprocessing.Pipe are interleaved. Each process has a time limit.

    python tools/latency_stress.py --placement apart --baselines
    python tools/latency_stress.py --clients 2 --only null --json
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_processes import receive_result, started_processes
from bench_program import positive
from latency_client import LatencyPlan, LatencySeries, client_main, compare_main

from nnfmq.cli.console import console, print_json, table
from nnfmq.hal.errors import NnfmqError
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.load_report import cpu_model
from nnfmq.measure.percentiles import PERCENTILES, distribution


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 if all was measured, 1 after a failure, 2 for wrong usage, 130 if interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        report = measure(_parse_plan(arguments), with_baselines=arguments.baselines)
    except (BenchmarkFailed, NnfmqError, OSError) as error:
        print(f"latency_stress: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        print_json(report)
    else:
        _print(report, arguments.no_color)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--connect", metavar="PATH|embedded", default="embedded", help="default: embedded")
    parser.add_argument("--device", default="reference")
    parser.add_argument("--model", type=Path, help="the real model (default: the packaged digits)")
    parser.add_argument("--only", choices=("null", "real"), help="measure only one of the two models")
    parser.add_argument(
        "--count", type=positive, default=10_000, help="executions of the null model per client and path"
    )
    parser.add_argument(
        "--real-count", type=positive, help="executions of the real model (default: --count, at most 2000)"
    )
    parser.add_argument("--warm-up", type=positive, default=500, help="round trips before the recorded ones")
    parser.add_argument(
        "--clients", type=int, choices=range(1, 5), default=1, help="concurrent client processes, 1 to 4"
    )
    parser.add_argument(
        "--placement",
        type=_placement,
        default="apart",
        metavar="apart|same|free",
        help="placement of client and driver on CPUs",
    )
    parser.add_argument("--window", type=int, metavar="US", help="polling window of client and embedded driver in µs")
    parser.add_argument("--baselines", action="store_true", help="interleave a C ping-pong and a multiprocessing.Pipe")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds of --baselines")
    parser.add_argument(
        "--limit", type=positive, default=300, metavar="S", help="time limit of each process in seconds"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-color", action="store_true")
    return parser


def _placement(text: str) -> str:
    name = text.removeprefix("cores=")
    if name not in cpu_pinning.PLACEMENTS:
        raise argparse.ArgumentTypeError(f"one of {', '.join(cpu_pinning.PLACEMENTS)}")
    return name


def _parse_plan(arguments: argparse.Namespace) -> LatencyPlan:
    real_count = arguments.real_count or min(arguments.count, 2000)
    return LatencyPlan(
        connect=arguments.connect,
        device=arguments.device,
        model=arguments.model,
        only=arguments.only,
        counts={"null": arguments.count, "real": real_count},
        warm_up=arguments.warm_up,
        clients=arguments.clients,
        placement=arguments.placement,
        window_us=arguments.window,
        rounds=arguments.rounds,
        limit_s=arguments.limit,
    )


def measure(plan: LatencyPlan, *, with_baselines: bool) -> dict[str, Any]:
    """Run the plan and return the report, as --json prints it. Blocks until it is done or plan.limit_s has passed.

    Raises:
        BenchmarkFailed: If a client process fails.
    """
    clients = _run_clients(plan)
    report = {
        "conditions": _conditions(plan) | clients[0][0],
        "series": [_merge(parts) for parts in zip(*(series for _, series in clients), strict=True)],
    }
    if with_baselines:
        with started_processes([(compare_main, (plan,))]) as connections:
            report["baselines"] = receive_result(connections[0], plan.limit_s)
    return report


def _conditions(plan: LatencyPlan) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": cpu_model(),
        "cpus_allowed": sorted(os.sched_getaffinity(0)),
        "placement": plan.placement,
        "cpus": [asdict(cpu_pinning.choose(plan.placement, number)) for number in range(plan.clients)],
        "connect": plan.connect,
        "clients": plan.clients,
        "warm_up": plan.warm_up,
        "clock": "time.perf_counter_ns",
    }


def _merge(parts: Sequence[LatencySeries]) -> dict[str, Any]:
    """Return one series of all clients together, for the report."""
    times = distribution(sample for part in parts for sample in part.samples_ns)
    return {
        "model": parts[0].model,
        "path": parts[0].path,
        "executions": sum(len(part.samples_ns) for part in parts),
        "latency_us": {name: value / 1000 for name, value in times.items()},
        "wall_s": max(part.wall_ns for part in parts) / 1e9,
        "client_cpu_s": sum(part.client_cpu_ns for part in parts) / 1e9,
        "driver_cpu_s": sum(part.driver_cpu_ns for part in parts) / 1e9,
    }


# ---- processes


def _run_clients(plan: LatencyPlan) -> list[tuple[dict[str, Any], list[LatencySeries]]]:
    """Return each client's conditions and series."""
    barrier = multiprocessing.get_context("spawn").Barrier(plan.clients)
    targets = [(client_main, (plan, number, barrier)) for number in range(plan.clients)]
    with started_processes(targets) as connections:
        return [receive_result(connection, plan.limit_s) for connection in connections]


# ---- printing


def _print(report: dict[str, Any], no_color: bool) -> None:
    screen = console(no_color, at_least=100)
    for name, value in report["conditions"].items():
        screen.print(f"{name}: {value}")
    rows = table("model", "path", *(f">{name} µs" for name in PERCENTILES), ">CPU s", ">driver")
    for series in report["series"]:
        times = [_format_us(series["latency_us"][name]) for name in PERCENTILES]
        cpu = [f"{series[name]:.2f}" for name in ("client_cpu_s", "driver_cpu_s")]
        rows.add_row(series["model"], series["path"], *times, *cpu)
    screen.print(rows)
    if "baselines" in report:
        _print_baselines(screen, report["baselines"])


def _format_us(time_us: float) -> str:
    return f"{time_us:,.1f}" if time_us < 1000 else f"{time_us:,.0f}"


def _print_baselines(screen: Any, found: dict[str, Any]) -> None:
    rows = table("candidate", ">median of p50, µs", ">p50 of each round, µs")
    for name, median_ns in found["median_ns"].items():
        rounds = "  ".join(f"{value / 1000:.2f}" for value in found["p50_ns"][name])
        rows.add_row(name, f"{median_ns / 1000:.2f}", rounds)
    screen.print(rows)
    over_c = f"{found['nnfmq_over_c']:.1f} times the C ping-pong" if found["nnfmq_over_c"] else found["missing"]
    screen.print(f"The null burst takes: {over_c}.")
    screen.print(f"A multiprocessing.Pipe takes: {found['pipe_over_nnfmq']:.1f} times the null burst.")


if __name__ == "__main__":
    sys.exit(main())
