"""`nnfmq conformance`: run test models through an engine or a driver, and report failures.

All files are read before anything runs; a format error ends the command with exit status 2 and names file and line. A
failure names the test, the operand, the index, and the expected and actual value. Random graphs that fail are written
to files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import add_connect_argument, at_least_one, console, error_console, new_file, pattern, table

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.lab.conformance.results import Summary
    from nnfmq.lab.conformance.runner import Settings, Source
    from nnfmq.lab.conformance.targets import PlanCounts

EXAMPLES = """\
examples:
  nnfmq conformance vts                               # a folder of test models, on the interpreter
  nnfmq conformance vts --path burst --jobs 4 --html report.html
  nnfmq conformance vts --path runtime --partition 2  # on two drivers, which get the operations in turn
  nnfmq conformance --random-graphs --classes large --seeds 50-99 --dump failing
  nnfmq conformance --extract NeuralNetworks vts      # write Android's test models, from a checkout of its sources
"""

_CLASSES = ("single", "small", "large", "quantized", "later", "divided")
_USUAL_CLASSES = _CLASSES[:3]
_RUNTIME, _SAMPLE_DEVICES = "runtime", "sample-.*"
_SEED_MAX = (1 << 32) - 1
_SHOWN_FAILURES = 20

PATHS = (  # those of `conformance.targets`, repeated because importing it takes long
    "interpreter", "compiled", "compiled-steps", "sync", "async", "fenced", "reusable", "burst", "aidl-burst",
    "memory-domain", "memory-domain-async", "memory-domain-fenced", "memory-domain-aidl-burst", "all",
    "runtime", "runtime-async", "runtime-fenced", "runtime-burst",
)  # fmt: skip


_ENGINES = {
    "interpreter": "the interpreter",
    "compiled": "the compiling engine",
    "compiled-steps": "the compiling engine",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `conformance`."""
    parser.usage = "%(prog)s [options] [PATH ...]"  # the generated usage fills half of the screen
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="*", help="a .jsonl[.gz] file, or a folder of them")
    parser.add_argument(
        "--path", choices=PATHS, metavar="P", default="interpreter",
        help="interpreter (default), compiled, compiled-steps; by a driver: sync, async, fenced, reusable, "
        "[aidl-]burst, memory-domain[-async|-fenced|-aidl-burst], all; by several: "
        "runtime[-async|-fenced|-burst]",
    )  # fmt: skip
    parser.add_argument("--device", metavar="NAME", help="default: reference; for runtime: sample-.*")
    parser.add_argument(
        "--partition", metavar="P", choices=("2", "3", "random"), default="",
        help="runtime: 2 or 3 drivers in turn, or random devices",
    )  # fmt: skip
    parser.add_argument("--jobs", metavar="N", type=at_least_one, default=1, help="number of processes (default: 1)")
    parser.add_argument("--filter", metavar="REGEX", type=pattern, default="", help="only tests whose name matches")
    _add_random_arguments(parser)
    parser.add_argument(
        "--extract", metavar="CHECKOUT", type=Path,
        help="write Android's test models to the folder PATH",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=new_file, help="write the results as JSON")
    parser.add_argument("--html", metavar="FILE", type=new_file, help="write the results as an HTML page")
    parser.add_argument("--verbose", action="store_true", help="all failures, reasons for skipping, slowest tests")
    add_connect_argument(parser)


def _add_random_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--random-graphs", action="store_true", help="also run random graphs")
    parser.add_argument(
        "--classes", metavar="NAME,...", type=_classes, default=_USUAL_CLASSES,
        help=f"{','.join(_CLASSES)} (first 3)",
    )  # fmt: skip
    parser.add_argument("--seeds", metavar="A-B", type=_seeds, default=(0, 49), help="seeds (default: 0-49)")
    parser.add_argument(
        "--dump", metavar="DIR", type=Path, help="folder for graphs that fail (default: a temporary one)"
    )


def _classes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(_CLASSES):
        raise argparse.ArgumentTypeError(
            f"unknown class {', '.join(sorted(unknown))!r}; the classes are {', '.join(_CLASSES)}"
        )
    return names


def _seeds(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last <= _SEED_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a seed nor a range A-B of seeds, at most {_SEED_MAX}")
    return first, last


def execute(arguments: argparse.Namespace) -> int:
    """Run the tests, write and print the results; return 0 if all passed, 1 if not, 2 for wrong usage."""
    from nnfmq.driver.cache.programs import cache_disabled
    from nnfmq.lab.conditions import machine
    from nnfmq.lab.conformance.runner import Settings
    from nnfmq.lab.conformance.testmodels import FormatError

    if mistake := _mistake(arguments):
        print(f"nnfmq: error: {mistake}", file=sys.stderr)
        return 2
    if arguments.extract is not None:
        return _extract(arguments)
    is_choice = arguments.path.startswith(_RUNTIME) and not arguments.partition
    arguments.device = arguments.device or (_SAMPLE_DEVICES if is_choice else "reference")
    settings = Settings(
        arguments.path, arguments.device, arguments.connect, arguments.filter, partition=arguments.partition
    )
    conditions, began_ns = machine(), time.monotonic_ns()
    try:
        # Test what an embedded driver compiles now, not what an earlier one left in its cache.
        with cache_disabled(), _dump_folder(arguments) as folder:
            summary = _run(arguments, replace(settings, dump_to=folder))
    except FormatError as error:
        print(f"nnfmq: error: {error}", file=sys.stderr)
        return 2
    duration_ns = time.monotonic_ns() - began_ns
    _write(arguments, summary, duration_ns, conditions)
    _print(console(arguments.no_color), summary, duration_ns, arguments.verbose)
    return 0 if summary.has_passed else 1


def _mistake(arguments: argparse.Namespace) -> str:
    """Return the error in a combination of arguments; empty if there is none."""
    names_a_driver = arguments.device or arguments.connect
    if arguments.extract is not None and len(arguments.paths) != 1:
        return "--extract needs one PATH: the folder that the test models are written to"
    if arguments.path in _ENGINES and names_a_driver:
        return "--device and --connect need a --path through a driver, such as burst"
    if arguments.partition and not arguments.path.startswith(_RUNTIME):
        return "--partition needs a --path through the runtime, such as runtime"
    if arguments.partition == "random" and names_a_driver:
        return "--partition random chooses devices of drivers that it starts: leave out --device and --connect"
    return ""


def _extract(arguments: argparse.Namespace) -> int:
    """Write the test models of a checkout; return 0 if no specification failed, else 1, or 2 for a wrong folder."""
    from nnfmq.lab.conformance.specifications import extract_all, find_specifications
    from nnfmq.lab.conformance.testmodels import FormatError

    [folder] = arguments.paths
    try:
        total = len(find_specifications(arguments.extract))
    except FormatError as error:
        print(f"nnfmq: error: {error}", file=sys.stderr)
        return 2
    failed, models = [], 0
    with _progress(arguments.no_color) as bar, closing(extract_all(arguments.extract, folder, arguments.jobs)) as all_:
        task = bar.add_task("specifications", total=total, failed=0)
        for outcome in all_:
            models += outcome.models
            failed += [outcome] if outcome.reason else []
            bar.update(task, advance=1, failed=len(failed))
    for outcome in failed:
        print(f"FAILED {outcome.specification}: {outcome.reason}", file=sys.stderr)
    print(f"test models: {models:,}, from {total - len(failed):,} of {total:,} specifications, in {folder}")
    return int(bool(failed))


@contextmanager
def _dump_folder(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the folder for graphs that fail, "" without random graphs; remove a temporary folder if it stays empty."""
    import tempfile

    if not arguments.random_graphs:
        yield ""
        return
    if arguments.dump is not None:
        arguments.dump.mkdir(parents=True, exist_ok=True)
        yield str(arguments.dump)
        return
    folder = tempfile.mkdtemp(prefix="nnfmq-random-graphs-")
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty: graphs failed
            Path(folder).rmdir()


def _sources(arguments: argparse.Namespace) -> list[Source]:
    from nnfmq.lab.conformance.random_graphs import batches
    from nnfmq.lab.conformance.testmodels import FormatError, find_files

    if not arguments.paths and not arguments.random_graphs:
        raise FormatError(
            "nothing to run: give a PATH of test models or --random-graphs; "
            "--extract CHECKOUT PATH writes Android's test models, from a checkout of its sources"
        )
    graphs = batches(arguments.classes, *arguments.seeds) if arguments.random_graphs else []
    return [*find_files(arguments.paths), *graphs]


def _run(arguments: argparse.Namespace, settings: Settings) -> Summary:
    from nnfmq.lab.conformance.results import Summary
    from nnfmq.lab.conformance.runner import count, run_sources
    from nnfmq.lab.conformance.testmodels import FormatError

    sources = _sources(arguments)
    total = count(sources, settings.pattern)
    if not total:
        raise FormatError(f"no test model in {_sources_text(arguments)} has a name that matches {settings.pattern!r}")
    summary = Summary()
    with _progress(arguments.no_color) as bar, closing(run_sources(sources, settings, arguments.jobs)) as results:
        task = bar.add_task(settings.path, total=total, failed=0)
        for result in results:
            summary.add(result)
            failed = sum(len(tally.failed) for tally in summary.kinds.values())
            bar.update(task, advance=1, failed=failed)
    return summary


def _progress(no_color: bool) -> Any:
    """Return a progress bar on stderr; nothing is drawn if stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    screen = error_console(no_color)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
    )
    return Progress(*columns, TimeRemainingColumn(), console=screen, transient=True, disable=not screen.is_terminal)


def _sources_text(arguments: argparse.Namespace) -> str:
    first, last = arguments.seeds
    graphs = (
        [f"random graphs ({', '.join(arguments.classes)}; seeds {first}-{last})"] if arguments.random_graphs else []
    )
    return ", ".join([*map(str, arguments.paths), *graphs])


def _subject(arguments: argparse.Namespace) -> str:
    where = _ENGINES.get(arguments.path) or f"device {arguments.device}, path {arguments.path}"
    where += f", {arguments.partition} drivers in turn" if arguments.partition else ""
    return f"{_sources_text(arguments)} on {where}"


def _write(arguments: argparse.Namespace, summary: Summary, duration_ns: int, conditions: Mapping[str, Any]) -> None:
    if arguments.json is not None:
        known = {"path": arguments.path, "device": arguments.device, "duration_ns": duration_ns}
        known |= {"partition": arguments.partition} if arguments.partition else {}
        known |= {"conditions": conditions}
        arguments.json.write_text(json.dumps({**known, **summary.as_json()}, indent=2) + "\n", encoding="utf-8")
    if arguments.html is not None:
        from nnfmq.lab.conformance.results import render

        arguments.html.write_text(render(summary, _subject(arguments)), encoding="utf-8")


def _print(screen: Console, summary: Summary, duration_ns: int, verbose: bool) -> None:
    _print_failures(screen, summary, None if verbose else _SHOWN_FAILURES)
    counts = table("tests", ">total", ">passed", ">failed", ">skipped")
    for kind, tally in summary.kinds.items():
        numbers = tally.total, tally.passed, len(tally.failed), len(tally.skipped)
        counts.add_row(kind.replace("_", " "), *(f"{number:,}" for number in numbers))
    screen.print(counts)
    if verbose:
        _print_details(screen, summary)
    if summary.dumped:
        folder = Path(summary.dumped[0]).parent
        screen.print(f"Random graphs that failed: {len(summary.dumped):,}, in {folder}", soft_wrap=True)
    if summary.compared_steps:
        screen.print(f"Compiled operations that were compared with the interpreter's: {summary.compared_steps:,}")
    _print_plans(screen, summary.plans)
    headline = "All tests passed" if summary.has_passed else "Some tests failed"
    screen.print(f"{headline}; {duration_ns / 1e9:.1f} s.")


def _print_plans(screen: Console, plans: PlanCounts) -> None:
    """Print what the runtime's plans were; nothing for another target."""
    planned = plans.simple + plans.compound + plans.unprepared
    if not planned:
        return
    screen.print(
        f"Plans: {planned:,}, of which {plans.simple:,} have one device, {plans.compound:,} several steps "
        f"({plans.steps:,} together); {plans.undivided:,} models of several operations are on one device."
    )
    screen.print(
        f"The CPU device took the place of a device that failed: for {plans.unprepared:,} whole models when they were "
        f"prepared, for {plans.fell_back:,} models when they were executed."
    )


def _print_failures(screen: Console, summary: Summary, limit: int | None) -> None:
    failures = [(kind, *failed) for kind, tally in summary.kinds.items() for failed in tally.failed]
    for kind, name, outcome in failures[:limit]:
        screen.print(f"FAILED {name} ({kind.replace('_', ' ')}): {outcome.reason}", soft_wrap=True)
    if limit is not None and len(failures) > limit:
        screen.print(f"... and {len(failures) - limit:,} more: --verbose prints all, --json and --html write them")


def _print_details(screen: Console, summary: Summary) -> None:
    from collections import Counter

    reasons = Counter(reason for tally in summary.kinds.values() for _, reason in tally.skipped)
    for reason, number in reasons.most_common():
        screen.print(f"skipped {number:,}: {reason}", soft_wrap=True)
    slowest = table("slowest", ">ms")
    slowest.columns[0].no_wrap = True  # users copy it
    for duration_ns, name in summary.slowest:
        slowest.add_row(name, f"{duration_ns / 1e6:,.1f}")
    screen.print(slowest)
