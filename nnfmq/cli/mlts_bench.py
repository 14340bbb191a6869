"""`nnfmq mlts bench`: run MLTS's scoring benchmark, print its tables, write its reports."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from nnfmq.cli.console import console, error_console, print_json, table

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.lab.mlts.backends import Backend
    from nnfmq.lab.mlts.models import ScoringModel
    from nnfmq.lab.mlts.scoring import ScoringResult

_METRIC_NAMES = {
    "max_mel_cep_distortion": "distortion",
    "max_log_f0_error": "log F0",
    "max_phone_error_rate": "phone errors %",
}


def execute(arguments: argparse.Namespace) -> int:
    """Run the benchmark; return 1 if a test failed or exceeds a limit, 2 for wrong usage, else 0."""
    from nnfmq.driver.cache.programs import cache_disabled
    from nnfmq.lab.mlts.models import MODELS
    from nnfmq.lab.mlts.scoring import ScoringOptions, run_benchmark

    models = [model for model in MODELS if _matches(arguments.only, model.name)]
    if problem := _usage_problem(arguments, len(models)):
        print(f"nnfmq: error: {problem}", file=sys.stderr)
        return 2
    options = ScoringOptions(arguments.warm_up, arguments.duration, arguments.photos)
    results: list[list[ScoringResult]] = []
    with ExitStack() as stack:
        stack.enter_context(
            cache_disabled()
        )  # an embedded driver compiles, instead of reading what an earlier one left
        backends, missing = _backends(arguments)
        bar = stack.enter_context(progress_of_tests(arguments.no_color))

        def started(model: ScoringModel, backend: str) -> None:
            bar(len(results), len(models), f"{model.name} on {backend}")

        for found in run_benchmark(models, backends, arguments.data, options, started):
            results.append(found)
    _write(arguments, results, missing)
    return 1 if any(result.has_failed for test in results for result in test) else 0


def _matches(pattern: str, name: str) -> bool:
    import re

    return re.search(pattern, name) is not None


def _usage_problem(arguments: argparse.Namespace, count: int) -> str:
    if arguments.data is None:
        return "no models: give --data DIR, the folder of MLTS's models, or set $NNFMQ_DATA"
    if not arguments.data.is_dir():
        return f"there is no folder {arguments.data}; give --data DIR, the folder of MLTS's models"
    return "" if count else f"no test has a name that matches {arguments.only!r}"


def _backends(arguments: argparse.Namespace) -> tuple[list[Backend], str]:
    """Return LiteRT, if it is there, and the devices; and why LiteRT is missing."""
    from nnfmq.base.processes import allowed_cpus
    from nnfmq.lab.mlts.backends import DriverBackend, LiteRtBackend, chosen_devices, missing_reason

    target = "embedded" if arguments.connect is None else arguments.connect
    devices: list[Backend] = [DriverBackend(name, target) for name in chosen_devices(arguments.device, target)]
    if arguments.litert == "none":
        return devices, "LiteRT is not measured: --litert none"
    if missing := missing_reason():
        return devices, missing
    litert = LiteRtBackend(allowed_cpus(), reference_kernels=arguments.litert == "reference")
    return [litert, *devices], ""


def _write(arguments: argparse.Namespace, results: Sequence[Sequence[ScoringResult]], missing: str) -> None:
    subject = describe_run()
    if arguments.csv is not None:
        from nnfmq.lab.mlts.reports import scoring_csv

        flat = [result for test in results for result in test]
        arguments.csv.write_text(scoring_csv(flat, subject), encoding="utf-8")
    if arguments.html is not None:
        from nnfmq.lab.mlts.reports import scoring_page

        arguments.html.write_text(scoring_page(results, subject, missing), encoding="utf-8")
    if arguments.json:
        print_json(
            {
                "run": subject,
                "litert_missing": missing or None,
                "results": [result.as_json() for test in results for result in test],
            }
        )
    else:
        _print(console(arguments.no_color), results, missing)


def describe_run() -> str:
    """Return the time, nnfmq's version and the machine, for reports."""
    from importlib import metadata

    try:
        version = metadata.version("nnfmq")
    except metadata.PackageNotFoundError:
        version = "from a source tree"
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f"{now}; nnfmq {version}; {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs; {platform.platform()}"


@contextmanager
def progress_of_tests(no_color: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that draws on stderr how many of all tests are done, and which runs; only on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    screen = error_console(no_color)
    columns = MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", visible=False)

        def show(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text, visible=True)

        yield show


# ------------------------------------------------------------------------------------------------ tables


def _print(screen: Console, results: Sequence[Sequence[ScoringResult]], missing: str) -> None:
    from nnfmq.lab.mlts.scoring import OK

    there = [[result for result in test if result.status == OK] for test in results]
    if any(there):
        _print_scores(screen, there)
        _print_compilations(screen, there)
    if missing:
        screen.print(missing, soft_wrap=True)
    _print_missing(screen, results)
    failed = [result for test in results for result in test if result.has_failed]
    for result in failed:
        for text in (*([result.reason] if result.reason else []), *result.accuracy.errors):
            screen.print(f"FAILED {result.model.name} on {result.backend}: {text}", soft_wrap=True)
    if any(there):
        screen.print("Some results failed." if failed else "No metric exceeds its limit.")


def _print_scores(screen: Console, tests: Sequence[Sequence[ScoringResult]]) -> None:
    scores = table("test", "backend", "accuracy", ">p50 ms", ">p99 ms", ">data")
    for result in (result for test in tests for result in test):
        assert result.latency is not None
        times = (f"{time_ns / 1e6:,.3f}" for time_ns in (result.latency.p50_ns, result.latency.p99_ns))
        data = f"{result.data_count}/{result.model.total}"
        scores.add_row(result.model.name, result.backend, _accuracy(result), *times, data)
    screen.print(scores)


def _accuracy(result: ScoringResult) -> str:
    found = result.accuracy
    if "top_1" in found.metrics:
        return f"top-1 {100 * found.metrics['top_1']:.1f} %, top-5 {100 * found.metrics['top_5']:.1f} %"
    parts = [f"{name} {found.metrics[key]:.2g}" for key, name in _METRIC_NAMES.items() if key in found.metrics]
    return ", ".join(parts) or f"largest error {found.max_error:.3g}"


def _print_compilations(screen: Console, tests: Sequence[Sequence[ScoringResult]]) -> None:
    from nnfmq.lab.mlts.backends import FROM_CACHE, SAVING, WITHOUT_CACHE

    times = table("model, ms", "backend", ">compile", ">saving", ">cached", ">start", ">KB")
    for result in (result for test in tests for result in test if result.compilation):
        blocks = [*(result.compilation.get(kind) for kind in (WITHOUT_CACHE, SAVING, FROM_CACHE)), result.start]
        cells = ("" if block is None else f"{block.p50_ns / 1e6:,.1f}" for block in blocks)
        size = f"{result.cache_bytes / 1000:,.0f}" if result.cache_bytes else ""
        times.add_row(result.model.file, result.backend, *cells, size)
    if times.row_count:
        screen.print(times)


def _print_missing(screen: Console, results: Sequence[Sequence[ScoringResult]]) -> None:
    from nnfmq.lab.mlts.scoring import MISSING

    absent = [test[0] for test in results if test[0].status == MISSING]
    if absent:
        files = dict.fromkeys(result.reason.removeprefix("there is no ") for result in absent)
        screen.print(
            f"{len(absent)} of {len(results)} tests are missing; there is no {', '.join(files)}", soft_wrap=True
        )
