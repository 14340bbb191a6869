"""`nnfmq mlts`: Android's Machine Learning Test Suite, its scoring benchmark (`bench`) and its crash tests (`crash`).

The measurements and tests are those of `nnfmq.lab.mlts`: this module parses the options, and prints and writes the
results. Exit status 1 means that a limit is exceeded, or that a crash test has another outcome than expected.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.base import settings
from nnfmq.cli.console import (
    at_least_one,
    console,
    error_console,
    from_zero,
    new_file,
    open_running,
    pattern,
    print_json,
    seconds,
    table,
)
from nnfmq.cli.parser import CommandAction, add_actions

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.lab.mlts.backends import Backend
    from nnfmq.lab.mlts.crash_runner import CrashOptions, CrashResult
    from nnfmq.lab.mlts.crash_tests import CrashTest
    from nnfmq.lab.mlts.models import ScoringModel
    from nnfmq.lab.mlts.scoring import ScoringResult

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
    return _run_crash(arguments) if arguments.action == "crash" else _run_bench(arguments)


# ---- options


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


# ---- what both actions use


@contextmanager
def _progress_of_tests(no_color: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that draws on stderr how many of all tests are done, and which runs; only on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    screen = error_console(no_color)
    columns = MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", visible=False)

        def show(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text, visible=True)

        yield show


# ----------------------------------------------------------------------------------------------------------------------
# `nnfmq mlts bench`: run MLTS's scoring benchmark, print its tables, write its reports.


_METRIC_NAMES = {
    "max_mel_cep_distortion": "distortion",
    "max_log_f0_error": "log F0",
    "max_phone_error_rate": "phone errors %",
}


def _run_bench(arguments: argparse.Namespace) -> int:
    """Run the benchmark; return 1 if a test failed or exceeds a limit, 2 for wrong usage, else 0."""
    from nnfmq.driver.cache.programs import cache_disabled
    from nnfmq.lab.conditions import machine
    from nnfmq.lab.mlts.models import MODELS
    from nnfmq.lab.mlts.scoring import ScoringOptions, run_benchmark

    models = [model for model in MODELS if re.search(arguments.only, model.name)]
    if problem := _bench_problem(arguments, len(models)):
        print(f"nnfmq: error: {problem}", file=sys.stderr)
        return 2
    options = ScoringOptions(arguments.warm_up, arguments.duration, arguments.photos)
    conditions = machine()
    results: list[list[ScoringResult]] = []
    with ExitStack() as stack:
        stack.enter_context(
            cache_disabled()
        )  # an embedded driver compiles, instead of reading what an earlier one left
        backends, missing = _backends(arguments)
        bar = stack.enter_context(_progress_of_tests(arguments.no_color))

        def started(model: ScoringModel, backend: str) -> None:
            bar(len(results), len(models), f"{model.name} on {backend}")

        for found in run_benchmark(models, backends, arguments.data, options, started):
            results.append(found)
    _write_bench(arguments, results, missing, conditions)
    return 1 if any(result.has_failed for test in results for result in test) else 0


def _bench_problem(arguments: argparse.Namespace, count: int) -> str:
    if arguments.data is None:
        return "no models: give --data DIR, the folder of MLTS's models, or set $NNFMQ_DATA"
    if not arguments.data.is_dir():
        return f"there is no folder {arguments.data}; give --data DIR, the folder of MLTS's models"
    return "" if count else f"no test has a name that matches {arguments.only!r}"


def _backends(arguments: argparse.Namespace) -> tuple[list[Backend], str]:
    """Return LiteRT, if it is there, and the devices; and why LiteRT is missing."""
    from nnfmq.base.processes import allowed_cores
    from nnfmq.lab.mlts.backends import DriverBackend, LiteRtBackend, chosen_devices, missing_reason

    target = "embedded" if arguments.connect is None else arguments.connect
    devices: list[Backend] = [DriverBackend(name, target) for name in chosen_devices(arguments.device, target)]
    if arguments.litert == "none":
        return devices, "LiteRT is not measured: --litert none"
    if missing := missing_reason():
        return devices, missing
    litert = LiteRtBackend(allowed_cores(), reference_kernels=arguments.litert == "reference")
    return [litert, *devices], ""


def _write_bench(
    arguments: argparse.Namespace,
    results: Sequence[Sequence[ScoringResult]],
    missing: str,
    conditions: Mapping[str, Any],
) -> None:
    from nnfmq.lab.conditions import machine_text

    subject = machine_text(conditions)
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
                "conditions": conditions,
                "litert_missing": missing or None,
                "results": [result.as_json() for test in results for result in test],
            }
        )
    else:
        _print_bench(console(arguments.no_color), results, missing)


def _print_bench(screen: Console, results: Sequence[Sequence[ScoringResult]], missing: str) -> None:
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


# ----------------------------------------------------------------------------------------------------------------------
# `nnfmq mlts crash`: run MLTS's crash tests, print their outcomes, write the reports.


_SELF_TEST_S = 1.0
_SELF_TEST_GRACE_S = 5.0


def _run_crash(arguments: argparse.Namespace) -> int:
    """Run the tests; return 1 if one has another outcome than expected, 2 for wrong usage, else 0."""
    from nnfmq.lab.conditions import machine
    from nnfmq.lab.mlts.crash_tests import SELF_TESTS, chosen_tests

    tests = list(SELF_TESTS) if arguments.self_test else chosen_tests(arguments.only)
    if problem := _crash_problem(arguments, len(tests)):
        print(f"nnfmq: error: {problem}", file=sys.stderr)
        return 2
    if arguments.list:
        _print_tests(console(arguments.no_color), tests)
        return 0
    conditions, results = machine(), _run_tests(arguments, tests)
    _write_crash(arguments, results, conditions)
    return 1 if any(result.has_failed for result in results) else 0


def _crash_problem(arguments: argparse.Namespace, count: int) -> str:
    if arguments.self_test and arguments.only:
        return "--self-test runs all self-tests; omit --only"
    if arguments.connect == "embedded":
        return "an embedded driver has one client; omit --connect, or give the socket of `nnfmq serve`"
    if arguments.log is not None and arguments.connect is None:
        return "--log is the log of the driver at --connect PATH"
    if arguments.log is not None and not arguments.log.is_file():
        return f"--log: there is no file {arguments.log}"
    return "" if count else f"no test has a name that matches {arguments.only!r}; --list shows all"


def _run_tests(arguments: argparse.Namespace, tests: Sequence[CrashTest]) -> list[CrashResult]:
    from nnfmq.hal.errors import InvalidArgument
    from nnfmq.lab.mlts.crash_runner import list_devices, run_suite
    from nnfmq.lab.mlts.stress_models import candidates

    options = _crash_options(arguments)
    there = list_devices(options)
    if unknown := [name for name in arguments.device if name not in there]:
        raise InvalidArgument(f"device {unknown[0]!r} is not available; available are: {', '.join(there)}")
    devices = arguments.device or (there[:1] if arguments.self_test else there)
    results: list[CrashResult] = []
    with ExitStack() as stack:
        bar = stack.enter_context(_progress_of_tests(arguments.no_color))

        def started(test: CrashTest, device: str) -> None:
            bar(len(results), len(tests) * len(devices), f"{test.name} on {device}")

        names = candidates(None if arguments.self_test else arguments.data)
        results.extend(run_suite(tests, devices, names, options, started))
    return results


def _crash_options(arguments: argparse.Namespace) -> CrashOptions:
    from dataclasses import replace

    from nnfmq.lab.mlts.crash_runner import CrashOptions
    from nnfmq.lab.mlts.driver_watch import RunningDriver

    if arguments.dump is not None:
        arguments.dump.mkdir(parents=True, exist_ok=True)
    options = CrashOptions(arguments.duration, arguments.grace, dump_to=str(arguments.dump or ""), seed=arguments.seed)
    if arguments.self_test:
        options = replace(options, duration_s=_SELF_TEST_S, grace_s=min(_SELF_TEST_GRACE_S, arguments.grace))
    if arguments.connect is not None:
        with open_running(arguments.connect) as client:
            options = replace(options, driver=RunningDriver(arguments.connect, client.driver_pid, arguments.log))
    return options


def _write_crash(arguments: argparse.Namespace, results: Sequence[CrashResult], conditions: Mapping[str, Any]) -> None:
    from nnfmq.lab.conditions import machine_text

    subject = machine_text(conditions)
    if arguments.csv is not None:
        from nnfmq.lab.mlts.reports import crash_csv

        arguments.csv.write_text(crash_csv(results, subject), encoding="utf-8")
    if arguments.html is not None:
        from nnfmq.lab.mlts.reports import crash_page

        arguments.html.write_text(crash_page(results, subject), encoding="utf-8")
    if arguments.json:
        failed = sum(result.has_failed for result in results)
        found = [result.as_json() for result in results]
        print_json({"conditions": conditions, "failed": failed, "results": found})
    else:
        _print_crash(console(arguments.no_color), results)


def _print_crash(screen: Console, results: Sequence[CrashResult]) -> None:
    for device in dict.fromkeys(result.device for result in results):
        outcomes = table("test", "outcome", ">steps", ">s", title=device)
        for result in (result for result in results if result.device == device):
            outcome = f"{result.outcome} !" if result.has_failed else str(result.outcome)
            steps = f"{sum(result.codes.values()):,}"
            outcomes.add_row(result.test.name, outcome, steps, f"{result.duration_ns / 1e9:.1f}")
        screen.print(outcomes)
    for result in (result for result in results if result.has_failed):
        reason = result.reason or f"expected was {result.test.expected}"
        screen.print(f"{result.outcome} {result.test.name} on {result.device}: {reason}", soft_wrap=True)
    failed = sum(result.has_failed for result in results)
    screen.print(
        f"{failed} of {len(results)} tests have another outcome than expected." if failed else "All as expected."
    )


def _print_tests(screen: Console, tests: Sequence[CrashTest]) -> None:
    listing = table("test", ">MLTS min", ">processes", ">threads")
    for test in tests:
        listing.add_row(test.name, f"{test.mlts_s / 60:.3g}", str(test.processes), str(test.threads))
    screen.print(listing)
