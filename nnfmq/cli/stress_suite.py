"""`nnfmq stress --suite`: accept a machine by its thresholds; the options, the progress, the tables, the files.

The measurements are those of `nnfmq.lab.suite`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.base.settings import CLASSES
from nnfmq.cli.bench import names_among, opened_model, positive_number, read_baseline
from nnfmq.cli.console import console, new_file, print_json, progress_line, table
from nnfmq.cli.model_file import shapes_of
from nnfmq.cli.parser import ArgumentParser
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.lab.suite.clients import OwnClient
    from nnfmq.lab.suite.run import SuitePlan, SuiteProgress

SCENARIOS = ("idle", "busy-cores", "memory", "compile", "many-clients", "peer-death", "soak")
OPTIONS = ("minutes", "scenarios", "thresholds", "client", "measured_class", "junit", "baseline", "tolerance")
"""Options that have no meaning without --suite; None if they are not given."""
OTHER_OPTIONS = (
    "clients", "load", "window", "cpus", "duration", "slow", "worst", "trace", "self_test", "runs", "only",
)  # fmt: skip
"""Options of `nnfmq stress` that have no meaning with --suite."""
_MINUTES, _TOLERANCE = 10.0, 25.0
_UNCERTAIN, _INTERRUPTED = 3, 130  # exit statuses
_PERCENTILES = ("p50", "p99", "p99_9", "max")
_FEW_PERCENTILES = ("p99", "max")
_WIDE = 76  # columns for all of them


def add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the suite, which `--suite --help` lists."""
    if isinstance(parser, ArgumentParser):
        parser.set_topic("--suite", (*OPTIONS, "print_thresholds"), OTHER_OPTIONS)
    add = parser.add_argument_group("the suite").add_argument
    add("--suite", action="store_true", help="accept a machine by thresholds: --suite --help")
    add("--minutes", metavar="N", type=positive_number, help="of all scenarios together (default: 10)")
    add("--scenarios", metavar="NAME,...", type=_scenarios, help=f"of {', '.join(SCENARIOS)}")
    add("--thresholds", metavar="FILE", type=Path, help="what the machine has to achieve, in TOML")
    add("--print-thresholds", action="store_true", help="print the default thresholds")
    add("--client", metavar="FILE.py:NAME", help="measure this function of yours")
    add("--class", dest="measured_class", choices=CLASSES, metavar="CLASS",
        help=f"of the measured clients: {', '.join(CLASSES)}")  # fmt: skip
    add("--junit", metavar="FILE", type=new_file, help="write JUnit XML")
    add("--baseline", metavar="FILE", type=Path, help="compare with an earlier --json (status 1, 3)")
    add("--tolerance", metavar="PERCENT", type=positive_number, help="a change up to this is none (default: 25)")


def _scenarios(text: str) -> tuple[str, ...]:
    return names_among(text, SCENARIOS)


# ---- the command


def execute_suite(arguments: argparse.Namespace) -> int:
    """Run the suite, write the files, print the report; return the exit status.

    1: a threshold was not kept, a scenario failed, or is slower than in the baseline. 3: some of that cannot be told.
    130: interrupted by Ctrl-C, after the report of what was measured.
    """
    from nnfmq.lab.suite.outcomes import compare_with_earlier, require_comparable
    from nnfmq.lab.suite.report import suite_identity, suite_report
    from nnfmq.lab.suite.run import run_suite

    plan = _plan(arguments)
    baseline = None if arguments.baseline is None else read_baseline(arguments.baseline, "stress --suite")
    if baseline is not None:
        require_comparable(suite_identity(plan), baseline)  # before minutes are spent
    with _shown_progress(plan, arguments.no_color) as progress:
        report = suite_report(run_suite(plan, progress))
    if baseline is not None:
        report["baseline"] = compare_with_earlier(report, baseline, arguments.tolerance or _TOLERANCE)
    _write(arguments, report)
    if arguments.json:
        print_json(report)
    else:
        print_suite(console(arguments.no_color), report)
    return exit_status(report)


def print_thresholds() -> int:
    """Print the packaged thresholds; return the exit status."""
    from nnfmq.lab.suite.thresholds import PACKAGED_THRESHOLDS

    print(PACKAGED_THRESHOLDS.read_text(encoding="utf-8"), end="")
    return 0


def _plan(arguments: argparse.Namespace) -> SuitePlan:
    from nnfmq.cli.profile import random_inputs
    from nnfmq.lab.suite.run import SuitePlan
    from nnfmq.lab.suite.thresholds import read_thresholds

    if len(arguments.mode) > 1:
        raise InvalidArgument(f"--mode {','.join(arguments.mode)}: the suite measures one; give one of them")
    own = None if arguments.client is None else read_client(arguments.client)
    thresholds = read_thresholds(arguments.thresholds)
    if arguments.rate is not None:
        thresholds = replace(thresholds, load=replace(thresholds.load, rate=arguments.rate))
    device, model, hosted = opened_model(arguments)
    return SuitePlan(
        model=arguments.model,
        inputs=random_inputs(model.inputs, arguments.seed),
        own=own,
        minutes=arguments.minutes or _MINUTES,
        thresholds=thresholds,
        scenarios=arguments.scenarios or SCENARIOS,
        mode=arguments.mode[0],
        shapes=shapes_of(arguments),
        signature=arguments.signature,
        device=device,
        hosted=hosted,
        client_class=arguments.measured_class,
        connect=arguments.connect,
        is_compared=not model.states,
        seed=arguments.seed,
    )


def read_client(text: str) -> OwnClient:
    """Return the function that FILE.py:NAME names. Its file is executed.

    Raises:
        InvalidArgument: If there is no such file or function, or the file cannot be executed.
    """
    name, _, function = text.rpartition(":")
    path = Path(name)
    if not path.is_file():
        raise InvalidArgument(f"--client {text}: there is no file {name!r}; give FILE.py:NAME")
    module_name = f"nnfmq_client_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"--client {text}: {name!r} is no Python file; its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidArgument(f"--client {text}: {type(error).__name__}: {error}") from error
    finally:
        del sys.modules[module_name]  # processes that could not import it get the function itself
    found: OwnClient | None = getattr(module, function, None)
    if not callable(found):
        raise InvalidArgument(f"--client {text}: {name} has no function {function!r}")
    return found


def _write(arguments: argparse.Namespace, report: Mapping[str, Any]) -> None:
    """Write the files that the options name."""
    from nnfmq.lab.suite.report import junit_xml, render_suite_page

    if arguments.junit is not None:
        arguments.junit.write_text(junit_xml(report), encoding="utf-8")
    if arguments.html is not None:
        arguments.html.write_text(render_suite_page(report), encoding="utf-8")


def exit_status(report: Mapping[str, Any]) -> int:
    """Return the exit status of a report."""
    from nnfmq.lab.bench.report import CANNOT_TELL
    from nnfmq.lab.suite.outcomes import ERROR, FAILED

    of_scenarios = {result["outcome"] for result in report["scenarios"]}
    of_rows = set[str]()
    if "baseline" in report:  # without rows nothing could be compared
        of_rows = {row["outcome"] for row in report["baseline"]["rows"]} or {CANNOT_TELL}
    if report["is_interrupted"]:
        return _INTERRUPTED
    if of_scenarios & {FAILED, ERROR} or "regression" in of_rows:
        return 1
    return _UNCERTAIN if CANNOT_TELL in of_scenarios | of_rows else 0


# ---- the terminal


@contextmanager
def _shown_progress(plan: SuitePlan, no_color: bool) -> Iterator[SuiteProgress]:
    """Yield a progress that shows a bar on stderr, and a line for each finished scenario, if that is a terminal."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from nnfmq.lab.suite.report import milliseconds, scenario_result
    from nnfmq.lab.suite.run import ScenarioRecord, SuiteProgress

    columns = TimeElapsedColumn(), BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)

    class _Bar(SuiteProgress):
        def update(self, text: str, share: float) -> None:
            bar.update(task, description=text, completed=share, refresh=True)

        def finished(self, record: ScenarioRecord) -> None:
            result = scenario_result(plan, record)
            latency_ns = result.get("latency_ns", {})
            name = "max" if latency_ns.get("p99") is None else "p99"  # of too few requests
            times = f", {name} {milliseconds(latency_ns[name])} ms" if latency_ns else ""
            bar.console.print(f"{result['scenario']}: {result['outcome']}{times}")

    with progress_line(no_color, *columns) as bar:
        task = bar.add_task("", total=1.0)
        yield SuiteProgress() if bar.disable else _Bar()


def print_suite(screen: Console, report: Mapping[str, Any]) -> None:
    """Print the scenarios, the thresholds that were not kept, the comparison with a baseline, and the outcome."""
    from nnfmq.lab.conditions import machine_text
    from nnfmq.lab.suite.report import baseline_rows, notes_of

    screen.print(_scenario_table(report["scenarios"], _PERCENTILES if screen.width >= _WIDE else _FEW_PERCENTILES))
    rows = baseline_rows(report)
    if rows:
        listing = table("", ">ratio", ">95 % interval", "", title="beside the baseline")
        for name, ratio, low, high, outcome in rows:
            listing.add_row(name, ratio, f"{low}–{high}", outcome)
        screen.print(listing)
    for note in notes_of(report):
        screen.print(note)
    load = report["load"]
    screen.print(
        f"Latencies in ms from the intended start; {load['rate']:g} requests/s, {load['arrivals']} arrivals, deadline "
        f"{load['deadline_ms']:g} ms."
    )
    screen.print(machine_text(report["conditions"]))
    screen.print(f"The machine: {report['outcome']}.")


def _scenario_table(results: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    from nnfmq.lab.statistics import heading_of
    from nnfmq.lab.suite.report import scenario_numbers

    listing = table(
        "scenario", "outcome", ">requests", *(f">{heading_of(name)}" for name in names), ">missed", ">wrong"
    )
    listing.padding = (0, 1, 0, 0)
    for result in results:
        listing.add_row(result["scenario"], result["outcome"], *scenario_numbers(result, names))
    return listing
