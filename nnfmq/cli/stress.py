"""`nnfmq stress`: measure a model under disturbances, and name the cause of each of the worst requests from evidence.

The measurements are those of `nnfmq.lab.stress`: this module parses the options, reads the model, and prints.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nnfmq.cli.bench import MODES, names_among, opened_model, positive_number, shown_progress
from nnfmq.cli.console import (
    at_least_one,
    console,
    from_zero,
    indented,
    new_file,
    print_json,
    share_text,
    short_microseconds,
    table,
)
from nnfmq.cli.model_file import add_model_arguments, add_runtime_option, shapes_of
from nnfmq.cli.stress_suite import (
    OPTIONS,
    OTHER_OPTIONS,
    add_suite_arguments,
    execute_suite,
    print_thresholds,
)
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from nnfmq.lab.bench.runner import RunnerJob
    from nnfmq.lab.stress.self_test import ConfusionMatrix

EXAMPLES = """\
examples:
  nnfmq stress model.tflite --mode burst,sync --clients 1,4 --load none,cpu
  nnfmq stress model.tflite --suite --html page.html # accept this machine
"""

_LOADS = ("none", "cpu", "memory", "churn", "compile", "faults", "gc", "stops", "throttle")
_CAUSES = ("cpu-client", "cpu-worker", "memory", "throttling", "compilation", "gc", "page-faults", "stops")
_PLACEMENTS = ("apart", "same", "free")
_RIGHT_SHARE = 0.9
_PERCENTILES = ("p50", "p99", "p99_9", "max")
_FEW_PERCENTILES = ("p99", "max")
_WIDE = 72
_UNEXPECTED_MAX = 10  # lines; --json has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `stress`."""
    parser.usage = "%(prog)s [options] MODEL.tflite | --self-test"
    add_model_arguments(parser, is_optional=True)
    add = parser.add_argument
    add("--mode", metavar="NAME,...", type=_among(MODES), default=("burst",), help="as in nnfmq bench")
    add("--clients", metavar="N,...", type=_numbers, default=(1,), help="client processes (default: 1)")
    add("--load", metavar="NAME,...", type=_among(_LOADS), default=_LOADS, help=", ".join(_LOADS))
    add("--window", metavar="US,...", type=_windows, default=(None,), help="polling windows of client and driver")
    add("--cpus", metavar="NAME,...", type=_among(_PLACEMENTS), default=("apart",),
        help="client and worker on CPUs: apart, same, free")  # fmt: skip
    add("--rate", metavar="R", type=positive_number, help="open loop: requests per second of all clients")
    add("--duration", metavar="S", type=positive_number, default=2.0, help="seconds of each scenario (default: 2)")
    add("--slow", metavar="MS", type=positive_number, default=2.0,
        help="slow: this much above the usual (default: 2)")  # fmt: skip
    add("--worst", metavar="N", type=at_least_one, default=3, help="requests to print for each (default: 3)")
    add("--device", metavar="NAME", help="default: compiled, or a hosted runtime if needed")
    add_runtime_option(parser, in_help=False)
    add("--seed", metavar="N", type=from_zero, default=0, help="of times, durations and inputs (default: 0)")
    add("--html", metavar="FILE", type=new_file, help="write a page")
    add("--trace", metavar="FILE", type=new_file, help="write the worst requests for Perfetto")
    add("--self-test", action="store_true", help="cause disturbances and print the confusion matrix")
    add("--runs", metavar="N", type=at_least_one, default=1, help="of each disturbance, pair and none (default: 1)")
    add("--only", metavar="CAUSE,...", type=_among(_CAUSES), default=_CAUSES, help="self-test of these causes")
    add("--connect", metavar="PATH", help="the socket of a driver (default: one of its own)")
    add("--json", action="store_true", help="print JSON")
    add_suite_arguments(parser)


# ---- types of arguments


def _among(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        return names_among(text, allowed)

    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(at_least_one(part) for part in text.split(",")))


def _windows(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(from_zero(part) for part in text.split(",")))


# ---- the command


def execute(arguments: argparse.Namespace) -> int:
    """Measure or test, write the files, print the report; return the exit status.

    1: a measurement failed; or in the self-test fewer than 90 % were right, or a cause was named without a disturbance,
    or no run was without one because other programs disturbed them all.
    """
    from nnfmq.lab.child_processes import BenchmarkFailed

    if arguments.print_thresholds:
        return print_thresholds()
    _require_options_of_one_kind(arguments)
    if arguments.connect == "embedded":
        raise InvalidArgument("--connect embedded: give the socket of `nnfmq serve`, or none for a driver of its own")
    if arguments.model is None and not arguments.self_test:
        raise InvalidArgument("give a MODEL.tflite, or --self-test")
    run = execute_suite if arguments.suite else _self_test if arguments.self_test else _stress
    # SIGTERM ends the command as Ctrl-C does: a process that is stopped or limited at that time must not stay so.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(arguments)
    except BenchmarkFailed as error:
        raise InvalidArgument(str(error)) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _require_options_of_one_kind(arguments: argparse.Namespace) -> None:
    """Require that no option is given that would have no effect.

    Raises:
        InvalidArgument: If one is.
    """
    from nnfmq.cli import command_parser

    names, default = (OTHER_OPTIONS if arguments.suite else OPTIONS), command_parser("stress").get_default
    for name in names:
        if getattr(arguments, name) != default(name):
            option = f"--{name.removeprefix('measured_').replace('_', '-')}"
            raise InvalidArgument(f"{option} has no effect with{'' if arguments.suite else 'out'} --suite")


def _job(arguments: argparse.Namespace) -> RunnerJob:
    """Return the job of the clients, for the first mode."""
    from nnfmq.cli.profile import random_inputs
    from nnfmq.lab.bench.runner import RunnerJob

    device, model, hosted = opened_model(arguments)
    inputs = [random_inputs(model.inputs, arguments.seed)]
    return RunnerJob(
        arguments.mode[0], arguments.model, shapes_of(arguments), arguments.signature, inputs, device, None,
        arguments.connect, hosted=hosted,
    )  # fmt: skip


def _stress(arguments: argparse.Namespace) -> int:
    from nnfmq.lab.bench.report import CLOCK
    from nnfmq.lab.conditions import subject_of
    from nnfmq.lab.stress.attribution import Thresholds
    from nnfmq.lab.stress.report import scenario_report
    from nnfmq.lab.stress.trial import ScenarioPlan, run_scenarios

    plan = ScenarioPlan(
        _job(arguments), arguments.mode, arguments.clients, arguments.window, arguments.cpus, arguments.load,
        arguments.duration, arguments.seed, arguments.rate,
    )  # fmt: skip
    subject = subject_of(arguments.model)
    subject["conditions"] |= {
        "clock": CLOCK, "duration_s": plan.seconds, "rate": plan.rate, "slow_ms": arguments.slow, "seed": plan.seed,
    }  # fmt: skip
    thresholds = Thresholds(excess=round(arguments.slow * 1e6))
    with shown_progress(arguments.no_color) as progress:
        scenarios = [
            scenario_report(scenario, found, arguments.worst, thresholds)
            for scenario, found in run_scenarios(plan, progress)
        ]
    report = subject | {"scenarios": scenarios}
    _write(arguments, report)
    if arguments.json:
        print_json(report)
    else:
        print_scenarios(console(arguments.no_color), report)
    return 0


def _write(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write the files that the options name."""
    if arguments.html is not None:
        from nnfmq.lab.stress.report import render_stress_page

        arguments.html.write_text(render_stress_page(report), encoding="utf-8")
    if arguments.trace is not None:
        from nnfmq.lab.stress.report import chrome_trace

        arguments.trace.write_text(json.dumps(chrome_trace(report["scenarios"])), encoding="utf-8")


def _self_test(arguments: argparse.Namespace) -> int:
    import nnfmq
    from nnfmq.lab.conditions import subject_of

    arguments.model = arguments.model or nnfmq.example_path("digits.tflite")
    subject, matrix = subject_of(arguments.model), _tested(arguments)
    report = {**subject, **matrix.report(), "seed": arguments.seed, "runs_of_each": arguments.runs}
    if arguments.json:
        print_json(report)
    else:
        print_matrix(console(arguments.no_color), report)
    right, count = matrix.right(())
    are_undisturbed_right = right == count and (count > 0 or matrix.excluded == 0)
    return 0 if matrix.share() >= _RIGHT_SHARE and are_undisturbed_right else 1


def _tested(arguments: argparse.Namespace) -> ConfusionMatrix:
    """Run the self-test and return its matrix."""
    from nnfmq.lab import placement
    from nnfmq.lab.stress.clients import started_clients
    from nnfmq.lab.stress.self_test import ConfusionMatrix, combinations_of, run_self_test, unavailable_causes
    from nnfmq.lab.stress.trial import TrialSetup, socket_and_folder

    matrix, job = ConfusionMatrix(), _job(arguments)
    with ExitStack() as stack:
        progress = stack.enter_context(shown_progress(arguments.no_color))
        socket, folder = stack.enter_context(socket_and_folder(arguments.connect))
        job = replace(job, connect=socket)
        (client,) = stack.enter_context(started_clients(job, 1, tick=lambda: progress("the client loads the model")))
        unavailable = unavailable_causes(folder, client.pid)
        matrix.skipped = {name: reason for name, reason in unavailable.items() if name in arguments.only}
        names = [name for name in arguments.only if name not in unavailable]
        setup = TrialSetup(socket, [placement.two_cpus() or placement.choose("apart", 0)], folder)
        plans = combinations_of(names)
        for disturbances, named, repetitions in run_self_test(
            client, setup, plans, arguments.runs, arguments.seed, progress
        ):
            matrix.add(disturbances, named, repetitions)
    return matrix


# ---- tables


def print_scenarios(screen: Console, report: Mapping[str, Any]) -> None:
    """Print the scenarios, then the worst requests of each with causes and evidence."""
    is_wide = screen.width >= _WIDE
    screen.print(_scenarios(report["scenarios"], _PERCENTILES if is_wide else _FEW_PERCENTILES, is_wide=is_wide))
    for scenario in report["scenarios"]:
        for line in _worst(scenario):
            screen.print(line)
    _print_conditions(screen, report)


def _print_conditions(screen: Console, report: Mapping[str, Any]) -> None:
    from nnfmq.lab.stress.report import condition_lines

    for line in condition_lines(report):
        screen.print(line)


def _scenarios(scenarios: Sequence[Mapping[str, Any]], names: Sequence[str], *, is_wide: bool) -> Any:
    from nnfmq.lab.statistics import heading_of, shown_percentiles

    more = (">requests",) if is_wide else ()
    listing = table("µs", *(f">{heading_of(name)}" for name in names), *more, ">slow")
    listing.padding = (0, 1, 0, 0)
    for each in scenarios:
        if "reason" in each:
            listing.add_row(each["scenario"], *["-"] * (len(names) + len(more) + 1))
            continue
        times = shown_percentiles(each, names, short_microseconds)
        requests = (f"{each['requests']:,}",) if is_wide else ()
        listing.add_row(each["scenario"], *times, *requests, f"{each['slow_requests']:,}")
    return listing


def _worst(scenario: Mapping[str, Any]) -> Iterator[RenderableType]:
    from nnfmq.lab.stress.report import request_lines, scenario_lines

    yield from scenario_lines(scenario)
    for request in scenario.get("worst", ()):
        first, *causes = request_lines(request)
        yield indented(first, 2)
        yield from (indented(line, 4) for line in causes)


def print_matrix(screen: Console, report: Mapping[str, Any]) -> None:
    """Print the confusion matrix of the self-test: a line for each disturbance, the causes named, and how often.

    What was named without having been brought about follows, with its evidence.
    """
    listing = table("disturbances", ">right", "named in runs")
    listing.padding = (0, 1, 0, 0)
    for row in report["rows"]:
        named = ", ".join(f"{name} {count}" for name, count in row["named"].items())
        listing.add_row(" + ".join(row["disturbances"]) or "none", f"{row['right']}/{row['runs']}", named)
    screen.print(listing)
    for name, reason in report["skipped"].items():
        screen.print(f"{name} was left out: {reason}")
    if report["repeated"]:
        screen.print(
            f"Other programs used the CPUs: {report['repeated']} runs without a disturbance were repeated, and "
            f"{report['excluded']} excluded."
        )
    for found in report["unexpected"][:_UNEXPECTED_MAX]:
        beside = " + ".join(found["disturbances"]) or "none"
        screen.print(
            f"{found['cause']} named beside {beside}, {found['explained_ns'] / 1e6:,.1f} ms: {found['evidence']}"
        )
    if len(report["unexpected"]) > _UNEXPECTED_MAX:
        screen.print(f"and {len(report['unexpected']) - _UNEXPECTED_MAX} more (--json)")
    screen.print(
        f"{share_text(report['right_share'], 1)} of the runs with disturbances are right; seed {report['seed']}."
    )
    _print_conditions(screen, report)
