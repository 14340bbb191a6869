"""Measure models on nnfmq, LiteRT, ONNX Runtime and OpenVINO, and the overhead of a burst: all sections in one run.

Every runner has a separate process, their trials are interleaved, and only one runner computes at any time. The times
include writing the input and reading the output, for all runners. A baseline that is not installed is reported as
missing. The machine should do nothing else meanwhile. docs/explanation/performance.md describes the method.

    python tools/model_bench.py --models FOLDER --json > performance.json    # most of an hour
    python tools/model_bench.py --models FOLDER --sections models,cost --only mobilenet_v1_0.25_128_quant
    python tools/model_bench.py --models FOLDER --quick
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_targets import format_metric, outcome_text
from model_bench_metrics import MODELS, TAIL_RATIOS, ModelBenchmark, format_threads, targets_of
from model_bench_scheduler import progress
from model_bench_suites import (
    NEEDS_TWO_CPUS,
    SECTIONS,
    BenchmarkPlan,
    client_cpu_set,
    compute_cpus,
    count_trials,
    polling_windows,
    thread_counts,
)

from nnfmq.cli.console import at_least_one, console, print_json, table
from nnfmq.hal.errors import NnfmqError
from nnfmq.installed_version import installed_version
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed
from nnfmq.measure.load_report import cpu_model

PACKAGES = ("ai-edge-litert", "onnxruntime", "openvino", "onnx", "llvmlite", "numpy")
QUICK_DIVISOR = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status.

    0: measured; 1: failed, or --check-targets or --require-all found something; 2: wrong usage; 130: interrupted.
    """
    arguments = _parser().parse_args(argv)
    try:
        report = measure(arguments)
    except (BenchmarkFailed, NnfmqError, OSError) as error:
        print(f"model_bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if arguments.json:
        print_json(report)
    else:
        _print(report, arguments.no_color)
    is_missed = arguments.check_targets and report["missed"]
    is_missing = arguments.require_all and report["not_compared"]
    return 1 if is_missed or is_missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--models", metavar="FOLDER", type=Path, default=Path(os.environ.get("NNFMQ_DATA", ".")) / "models",
        help="folder of the .tflite files (default: `models` in $NNFMQ_DATA)",
    )  # fmt: skip
    names = ", ".join(model.name for model in MODELS)
    parser.add_argument("--only", type=_models, default=MODELS, metavar="NAME,...", help=f"measure only these: {names}")
    every = tuple(SECTIONS)
    parser.add_argument(
        "--sections", type=_sections, default=every, metavar="NAME,...", help=f"measure only these: {', '.join(every)}"
    )
    parser.add_argument("--rounds", type=at_least_one, help="interleaved rounds (default: 5, --quick: 1)")
    parser.add_argument(
        "--quick", action="store_true", help="a hundredth of the steps: a smoke test, not a measurement"
    )
    parser.add_argument("--limit", type=at_least_one, default=120, metavar="S", help="time limit of a trial in seconds")
    parser.add_argument("--check-targets", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("--require-all", action="store_true", help="exit status 1 if something is not compared")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-color", action="store_true")
    return parser


def _models(text: str) -> tuple[ModelBenchmark, ...]:
    known = {model.name: model for model in MODELS}
    return tuple(known[name] for name in _known(text, known, "model"))


def _sections(text: str) -> tuple[str, ...]:
    return _known(text, SECTIONS, "section")


def _known(text: str, known: Any, what: str) -> tuple[str, ...]:
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(text.split(","))


# ---- measuring


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the report, as --json prints it.

    Raises:
        BenchmarkFailed: If a runner fails.
    """
    load = os.getloadavg()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # idle threads of a BLAS would compete for the CPUs
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    divisor = QUICK_DIVISOR if arguments.quick else 1
    plan = BenchmarkPlan(arguments.models, arguments.only, rounds, divisor, arguments.limit, lambda _: None)
    chosen, skipped = _supported_sections(arguments.sections)
    with progress(sum(count_trials(name, plan) for name in chosen), arguments.no_color) as advance:
        plan = BenchmarkPlan(arguments.models, arguments.only, rounds, divisor, arguments.limit, advance)
        report: dict[str, Any] = {"conditions": _conditions(load, arguments.quick)}
        report |= {name: SECTIONS[name](plan) for name in chosen}
    missed = [f"{label}: {target['target']}" for label, target in targets_of(report) if target["met"] is False]
    missing = [
        f"{row['model']}: {runner}: {reason}"
        for section in ("models", "transformers")
        for row in report.get(section, [])
        for runner, reason in row["missing"].items()
    ]
    return report | {"missed": missed, "not_compared": [*skipped, *missing]}


def _supported_sections(sections: Sequence[str]) -> tuple[list[str], list[str]]:
    if cpu_pinning.two_cpus() is not None:
        return list(sections), []
    skipped = [f"{name}: only one CPU is allowed, and both ends poll" for name in sections if name in NEEDS_TWO_CPUS]
    return [name for name in sections if name not in NEEDS_TWO_CPUS], skipped


def _conditions(load: tuple[float, float, float], is_quick: bool) -> dict[str, Any]:
    from nnfmq.engines.compiled.target import host_target
    from nnfmq.queue import core

    threads = max(thread_counts())
    return {
        "cpu": cpu_model(),
        "target": host_target().name,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "core": core.core_name,
        "cpus_allowed": sorted(cpu_pinning.ALLOWED),
        "cpus_used": {
            format_threads(n): {"computing": compute_cpus(n), "client": client_cpu_set(n)} for n in thread_counts()
        },
        "client_shares_cpus": len(cpu_pinning.ALLOWED) <= threads,
        "polling_window": polling_windows(),
        "load_before": [round(value, 2) for value in load],
        "clock": "time.perf_counter_ns, around the step: write the input, execute, read the output",
        "quick": is_quick,
    }


# ---- printing


def _print(report: dict[str, Any], no_color: bool) -> None:
    screen = console(no_color, at_least=120)
    for name in SECTIONS:
        if name in report:
            screen.print(f"{name}", style="bold")
            _PRINTERS[name](screen, report[name])
    for name, value in report["conditions"].items():
        screen.print(f"{name}: {value}")
    screen.print(f"\ntargets missed: {'; '.join(report['missed']) or 'none'}")
    screen.print(f"not compared: {'; '.join(report['not_compared']) or 'nothing'}")


def _print_models(screen: Any, rows: Sequence[dict[str, Any]]) -> None:
    metrics = [column for name in ("p50", *TAIL_RATIOS) for column in (f">{name}", ">target", "")]
    ratios = table("model", "runner", ">threads", *metrics, "best p50")
    for row in (row for found in rows for row in found["comparisons"]):
        columns = [column for target in row["targets"] for column in _target_columns(target)]
        ratios.add_row(row["model"], row["subject"], str(row["threads"]), *columns, row["best_baseline"] or "-")
    screen.print(ratios)
    for row in rows:
        runners = table(row["model"], ">p50 µs", ">p99", ">p99.9", ">threads", ">difference", "API variant")
        for name, runner in row["runners"].items():
            times = [format_metric(runner[metric], "") for metric in ("p50", "p99", "p99.9")]
            runners.add_row(
                name, *times, str(runner["threads"]), f"{runner['output_difference']:.2g}", runner["api_variant"]
            )
        screen.print(runners)
        for runner, reason in row["missing"].items():
            screen.print(f"  {runner}: missing: {reason}")


def _target_columns(target: dict[str, Any]) -> tuple[str, str, str]:
    outcome = outcome_text(target)
    return format_metric(target["value"], target["unit"]), format_metric(target["limit"], target["unit"]), outcome


def _print_cost(screen: Any, rows: Sequence[dict[str, Any]]) -> None:
    made = table("model", ">threads", ">cost", ">target", "", ">burst µs", ">in process µs", ">transfer µs")
    for row in rows:
        times = (format_metric(row[name], "") for name in ("burst_us", "in_process_us", "transfer_us"))
        made.add_row(row["model"], str(row["threads"]), *_target_columns(row["targets"][0]), *times)
    screen.print(made)


def _print_compiling(screen: Any, rows: Sequence[dict[str, Any]]) -> None:
    made = table("burst of", "while this is compiled", ">p99 / unloaded", ">target", "", ">p99 µs", ">unloaded µs")
    for row in rows:
        times = (format_metric(row["metrics"][name]["p99"], "") for name in ("under_load", "unloaded"))
        made.add_row(row["model"], row["compiled"], *_target_columns(row["targets"][0]), *times)
    screen.print(made)


def _print_scaling(screen: Any, found: dict[str, Any]) -> None:
    for what in ("size", "channels"):
        made = table("operation", "type", f">{what}", ">burst µs", ">in process µs")
        for series in found[what]:
            for point in series["points"]:
                times = (format_metric(point[name], "") for name in ("burst_us", "in_process_us"))
                made.add_row(series["operation"], series["type"], str(point[what]), *times)
        screen.print(made)
    made = table("model", ">threads", ">burst µs", ">in process µs")
    for series in found["threads"]:
        for point in series["points"]:
            times = (format_metric(point[name], "") for name in ("burst_us", "in_process_us"))
            made.add_row(series["model"], str(point["threads"]), *times)
    screen.print(made)


def _print_roofline(screen: Any, found: dict[str, Any]) -> None:
    for name, ceiling in found["ceilings"].items():
        screen.print(f"  {name}: {'-' if ceiling is None else f'{ceiling / 1e9:.1f} G'}")
    made = table("model", ">operations M", ">MB", ">operations / byte", ">G operations / s", ">share of roofline")
    for row in found["models"]:
        share = "-" if row["roofline_share"] is None else f"{row['roofline_share']:.0%}"
        metrics = (row["operations"] / 1e6, row["bytes"] / 1e6, row["intensity"], row["operations_per_s"] / 1e9)
        made.add_row(row["model"], *(format_metric(value, "") for value in metrics), share)
    screen.print(made)


_PRINTERS: dict[str, Callable[[Any, Any], None]] = {
    "models": _print_models,
    "transformers": _print_models,
    "cost": _print_cost,
    "compiling": _print_compiling,
    "scaling": _print_scaling,
    "roofline": _print_roofline,
}

if __name__ == "__main__":
    sys.exit(main())
