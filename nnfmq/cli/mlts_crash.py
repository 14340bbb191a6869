"""`nnfmq mlts crash`: run MLTS's crash tests, print their outcomes, write the reports."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from nnfmq.cli.console import console, print_json, table
from nnfmq.cli.mlts_bench import describe_run, progress_of_tests

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.lab.mlts.crash_runner import CrashOptions, CrashResult
    from nnfmq.lab.mlts.crash_tests import CrashTest

_SELF_TEST_S = 1.0
_SELF_TEST_GRACE_S = 5.0


def execute(arguments: argparse.Namespace) -> int:
    """Run the tests; return 1 if one has another outcome than expected, 2 for wrong usage, else 0."""
    from nnfmq.lab.mlts.crash_tests import SELF_TESTS, chosen_tests

    tests = list(SELF_TESTS) if arguments.self_test else chosen_tests(arguments.only)
    if problem := _usage_problem(arguments, len(tests)):
        print(f"nnfmq: error: {problem}", file=sys.stderr)
        return 2
    if arguments.list:
        _print_list(console(arguments.no_color), tests)
        return 0
    results = _run(arguments, tests)
    _write(arguments, results)
    return 1 if any(result.has_failed for result in results) else 0


def _usage_problem(arguments: argparse.Namespace, count: int) -> str:
    if arguments.self_test and arguments.only:
        return "--self-test runs all self-tests; omit --only"
    if arguments.connect == "embedded":
        return "an embedded driver has one client; omit --connect, or give the socket of `nnfmq serve`"
    if arguments.log is not None and arguments.connect is None:
        return "--log is the log of the driver at --connect PATH"
    if arguments.log is not None and not arguments.log.is_file():
        return f"--log: there is no file {arguments.log}"
    return "" if count else f"no test has a name that matches {arguments.only!r}; --list shows all"


def _run(arguments: argparse.Namespace, tests: Sequence[CrashTest]) -> list[CrashResult]:
    from nnfmq.hal.errors import InvalidArgument
    from nnfmq.lab.mlts.crash_runner import list_devices, run_suite
    from nnfmq.lab.mlts.stress_models import candidates

    options = _options(arguments)
    there = list_devices(options)
    if unknown := [name for name in arguments.device if name not in there]:
        raise InvalidArgument(f"device {unknown[0]!r} is not available; available are: {', '.join(there)}")
    devices = arguments.device or (there[:1] if arguments.self_test else there)
    results: list[CrashResult] = []
    with ExitStack() as stack:
        bar = stack.enter_context(progress_of_tests(arguments.no_color))

        def started(test: CrashTest, device: str) -> None:
            bar(len(results), len(tests) * len(devices), f"{test.name} on {device}")

        names = candidates(None if arguments.self_test else arguments.data)
        results.extend(run_suite(tests, devices, names, options, started))
    return results


def _options(arguments: argparse.Namespace) -> CrashOptions:
    from nnfmq.lab.mlts.crash_runner import CrashOptions
    from nnfmq.lab.mlts.driver_watch import RunningDriver

    if arguments.dump is not None:
        arguments.dump.mkdir(parents=True, exist_ok=True)
    options = CrashOptions(arguments.duration, arguments.grace, dump_to=str(arguments.dump or ""), seed=arguments.seed)
    if arguments.self_test:
        options = replace(options, duration_s=_SELF_TEST_S, grace_s=min(_SELF_TEST_GRACE_S, arguments.grace))
    if arguments.connect is not None:
        import nnfmq

        with nnfmq.connect(arguments.connect, embedded=False, recover=False) as client:
            options = replace(options, driver=RunningDriver(arguments.connect, client.driver_pid, arguments.log))
    return options


def _write(arguments: argparse.Namespace, results: Sequence[CrashResult]) -> None:
    subject = describe_run()
    if arguments.csv is not None:
        from nnfmq.lab.mlts.reports import crash_csv

        arguments.csv.write_text(crash_csv(results, subject), encoding="utf-8")
    if arguments.html is not None:
        from nnfmq.lab.mlts.reports import crash_page

        arguments.html.write_text(crash_page(results, subject), encoding="utf-8")
    if arguments.json:
        failed = sum(result.has_failed for result in results)
        print_json({"run": subject, "failed": failed, "results": [result.as_json() for result in results]})
    else:
        _print(console(arguments.no_color), results)


def _print(screen: Console, results: Sequence[CrashResult]) -> None:
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


def _print_list(screen: Console, tests: Sequence[CrashTest]) -> None:
    listing = table("test", ">MLTS min", ">processes", ">threads")
    for test in tests:
        listing.add_row(test.name, f"{test.mlts_s / 60:.3g}", str(test.processes), str(test.threads))
    screen.print(listing)
