"""`nnfmq bench`: measure the latency of a model under load, in several execution modes, and beside other runtimes.

The measurements are those of `nnfmq.lab.bench`: this module parses the options, reads the inputs, and prints. It has
the names of perf_analyzer and of TFLite's benchmark_model for the same options, which --help does not list.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfmq.base.processes import allowed_cores
from nnfmq.cli.console import (
    add_class_argument,
    add_connect_argument,
    at_least_one,
    console,
    from_zero,
    new_file,
    print_json,
    progress_line,
    short_microseconds,
    table,
)
from nnfmq.cli.model_file import ModelFile, SizesNeeded, add_model_arguments, add_runtime_option, shapes_of
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import nearest

if TYPE_CHECKING:
    from rich.console import Console

    from nnfmq.cli.inputs import Array
    from nnfmq.importers import LoadedModel
    from nnfmq.lab.bench.measurement import LoadMeasurements, LoadPlan
    from nnfmq.lab.bench.runner import OpenedFile

EXAMPLES = """\
examples:
  nnfmq bench model.tflite --against litert,onnxruntime --html latency.html
  nnfmq bench model.tflite --rate 1000 --baseline earlier.json
Options of perf_analyzer and benchmark_model have their names there, too.
"""

MODES = ("burst", "reusable", "sync", "async", "fenced", "aidl-burst")
_PEERS = {"litert": "LiteRT", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
_PERCENTILES = ("50", "90", "95", "99", "99.9")
_PROFILED = ("compiled", "reference")  # devices whose operations `nnfmq profile` can time
_DURATION_S = 10.0
_UNLIMITED_S = 3600.0  # of a load with a number of requests
_MAX_LEVELS = 100
_SHOWN = ("p50", "p90", "p95", "p99", "p99_9", "max")
_FEW_SHOWN = ("p50", "p99", "max")
_WIDE = 72  # columns for all of them
_UNCERTAIN = 3  # the exit status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bench`."""
    parser.usage = "%(prog)s [options] MODEL.tflite"
    add_model_arguments(parser)
    add = _Adder(parser)
    add("--mode", metavar="NAME,...", type=_modes, default=MODES[:1], help=f"{', '.join(MODES[:-1])} or {MODES[-1]}")
    add("--against", metavar="NAME,...", type=_peers, default=(), help=f"also measure {', '.join(_PEERS)}")
    add("--clients", "--concurrency-range", metavar="N", type=_counts, default=(1,),
        help="client processes; 1:8:1 for 1 to 8 (default: 1)")  # fmt: skip
    add("--rate", "--request-rate-range", metavar="R", type=_rates, default=(None,),
        help="open loop: requests per second, or 100:500:100")  # fmt: skip
    add("--arrivals", "--request-distribution", metavar="KIND", choices=("constant", "poisson"), default="constant",
        help="constant or poisson (default: constant)")  # fmt: skip
    add("--duration", metavar="S", type=positive_number, help="measured seconds of each load (default: 10)")
    add.hidden("--count", "--request-count", "--num_runs", type=at_least_one)
    add.hidden("--warm-up", "--warmup-request-count", "--warmup_runs", type=from_zero)
    add.hidden("--window", "--measurement-interval", "-p", type=positive_number, default=500.0)
    add.hidden("--stability", "--stability-percentage", "-s", type=positive_number, default=10.0)
    add(
        "--latency-threshold",
        "-l",
        metavar="MS",
        type=positive_number,
        help="stop at the first load whose p99 is above it",
    )
    add.hidden("--percentile", choices=_PERCENTILES, default="99")
    add("--input-data", metavar="DATA", action="append", default=[], help="random, zero, or a file for each input")
    add.hidden("--seed", "--random-seed", type=from_zero, default=0)
    add("--device", metavar="NAME", help="default: compiled, or a hosted runtime if needed")
    add_runtime_option(parser, in_help=False)
    add("--threads", "--num_threads", metavar="N", type=_threads, help="computing threads (default: all cores)")
    add.hidden("--deterministic", action="store_true")
    add("--baseline", metavar="FILE", type=Path, help="compare with an earlier --json (status 1, 3)")
    add.hidden("--tolerance", type=_not_negative, default=5.0)
    add("--html", metavar="FILE", type=new_file, help="write a page with charts")
    add("--csv", "-f", metavar="FILE", type=new_file, help="write perf_analyzer's columns")
    add("--hgrm", metavar="FILE", type=new_file, help="write percentiles for HdrHistogram's plotter")
    add.hidden("--profile-export-file", type=new_file)
    add.hidden("--enable_op_profiling", nargs="?", const=True, default=False, type=_boolean)
    add_connect_argument(parser)
    add_class_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


class _Adder:
    """Adds options to a parser, with other names for them that --help does not list."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def __call__(self, name: str, *others: str, **options: Any) -> None:
        """Add an option that --help lists."""
        action = self._parser.add_argument(name, **options)
        self._add_hidden(others, action.dest, options)

    def hidden(self, name: str, *others: str, **options: Any) -> None:
        """Add an option that only the reference lists."""
        action = self._parser.add_argument(name, help=argparse.SUPPRESS, **options)
        self._add_hidden(others, action.dest, options)

    def _add_hidden(self, names: Sequence[str], dest: str, options: dict[str, Any]) -> None:
        if names:
            hidden = options | {"dest": dest, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            self._parser.add_argument(*names, **hidden)


# ---- types of arguments


def names_among(text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Argparse type, with the names allowed: names separated by commas, each once."""
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in allowed]
    if unknown:
        hint = nearest(unknown[0], allowed)
        raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; allowed are {', '.join(allowed)}{hint}")
    return names


def _modes(text: str) -> tuple[str, ...]:
    return names_among(text, MODES)


def _peers(text: str) -> tuple[str, ...]:
    return tuple(_PEERS[name] for name in names_among(text, tuple(_PEERS)))


def _series(text: str) -> list[float]:
    """Return the numbers of START, START:END or START:END:STEP, END included."""
    try:
        start, end, step = ([float(part) for part in text.split(":")] + [math.nan] * 3)[:3]
    except ValueError:
        start = math.nan
    if len(text.split(":")) > 3 or not start > 0 or not math.isfinite(start):
        raise argparse.ArgumentTypeError(f"{text!r}: give a positive number, or START:END:STEP as in 1:8:1")
    end, step = (start if math.isnan(end) else end), (1.0 if math.isnan(step) else step)
    if not (step > 0 and start <= end < start + _MAX_LEVELS * step):
        raise argparse.ArgumentTypeError(f"{text!r}: START, END and STEP must give 1 to {_MAX_LEVELS} numbers")
    return [start + number * step for number in range(int((end - start) / step + 1e-9) + 1)]


def _counts(text: str) -> tuple[int, ...]:
    numbers = _series(text)
    if any(number != int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: the number of clients is an integer")
    return tuple(map(int, numbers))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(_series(text))


def positive_number(text: str) -> float:
    """Argparse type: a number above 0."""
    value = _number(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _threads(text: str) -> int:
    threads, allowed = at_least_one(text), allowed_cores()
    if threads > allowed:
        raise argparse.ArgumentTypeError(f"this process may use {allowed} cores, so give 1 to {allowed}")
    return threads


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: true or false")
    return text == "true"


# ---- the command


def execute(arguments: argparse.Namespace) -> int:
    """Measure, write the files, print the report; return the exit status.

    1: a measurement failed, or no load is within --latency-threshold, or a result is slower than the baseline. 3: a
    result may differ from the baseline, but one of the runs was not stable, beside other programs, or on another CPU.
    """
    from nnfmq.lab.bench.report import (
        CLOCK,
        build_report,
        compare_runners,
        compare_with_baseline,
        require_same_model,
    )
    from nnfmq.lab.conditions import machine, model_identity

    if arguments.enable_op_profiling and arguments.device not in (None, *_PROFILED):
        allowed = " and ".join(_PROFILED)
        raise InvalidArgument(f"--enable_op_profiling: only {allowed} can be profiled, not {arguments.device}")
    baseline = None if arguments.baseline is None else read_baseline(arguments.baseline, "bench")
    device, model, hosted = opened_model(arguments)
    identity = model_identity(arguments.model)
    if baseline is not None:
        require_same_model(identity, baseline)  # before minutes are spent
    plan = _plan(arguments, model, device, hosted)
    if arguments.enable_op_profiling and plan.hosted is not None:
        raise InvalidArgument(f"--enable_op_profiling: {device} executes the model, and does not tell its operations")
    options = {"threads": arguments.threads, "inputs": arguments.input_data or ["random"]}
    conditions = machine() | {"clock": CLOCK} | options
    found = _measured(plan, arguments.no_color)
    report = identity | build_report(plan, found, conditions)
    report["ratios"] = compare_runners(report["results"])
    if baseline is not None:
        report["baseline"] = compare_with_baseline(report, baseline, arguments.tolerance)
    if arguments.enable_op_profiling:
        report["operations"] = _profiled(arguments, model, plan.inputs[0])
    _write(arguments, report, found)
    _print(arguments, report)
    return _status(report)


def _measured(plan: LoadPlan, no_color: bool) -> LoadMeasurements:
    """Return the measurements of a plan; blocks. Raises InvalidArgument if one fails, or no runner is available."""
    from nnfmq.lab.bench.measurement import measure_plan
    from nnfmq.lab.child_processes import BenchmarkFailed

    try:
        with shown_progress(no_color) as progress:
            found = measure_plan(plan, progress)
    except BenchmarkFailed as error:
        raise InvalidArgument(str(error)) from error
    if not found.loads:
        raise InvalidArgument("; ".join(f"{name}: {reason}" for name, reason in found.missing.items()))
    return found


def read_baseline(path: Path, command: str) -> Any:
    """Return the JSON of an earlier run of a command.

    Raises:
        InvalidArgument: If the file is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{path} is no report of nnfmq {command} --json: {error}") from error


def opened_model(arguments: argparse.Namespace) -> tuple[str | None, LoadedModel, OpenedFile | None]:
    """Return the device, the model, and what runners need to know of it if a hosted runtime opens the file; blocks.

    The device is that of --device, or the one that opens the file. `arguments` have --runtime-option, too.

    Raises:
        SizesNeeded: If sizes of inputs are open: a hosted runtime would take any, but the inputs have to have some.
        NnfmqError: Those of `ModelFile`.
    """
    from nnfmq.importers.loaded_model import UnknownShapes
    from nnfmq.lab.bench.runner import OpenedFile

    file = ModelFile.read(arguments)
    if isinstance(file.refusal, UnknownShapes):
        raise SizesNeeded(file.refusal)
    if file.loaded is not None:
        return arguments.device, file.loaded, None
    device, model = file.hosted(arguments)
    return device, model, OpenedFile(dict(arguments.runtime_option), model.inputs, model.outputs, model.states)


def _plan(arguments: argparse.Namespace, model: LoadedModel, device: str | None, hosted: OpenedFile | None) -> LoadPlan:
    from nnfmq.lab.bench.measurement import LoadPlan

    count, threshold = arguments.count, arguments.latency_threshold
    return LoadPlan(
        model=arguments.model,
        shapes=shapes_of(arguments),
        signature=arguments.signature,
        inputs=_inputs(arguments, model),
        runners=(*arguments.mode, *arguments.against),
        clients=arguments.clients,
        rates=arguments.rate,
        distribution=arguments.arrivals,
        seed=arguments.seed,
        seconds=arguments.duration or (_DURATION_S if count is None else _UNLIMITED_S),
        count=count,
        warm_up=arguments.warm_up,
        window_s=arguments.window / 1000,
        stability=arguments.stability,
        percentile=f"p{arguments.percentile}".replace(".", "_"),
        threshold_ns=None if threshold is None else round(threshold * 1e6),
        device=device,
        threads=arguments.threads,
        connect=arguments.connect,
        hosted=hosted,
        deterministic=arguments.deterministic,
    )


def _inputs(arguments: argparse.Namespace, model: LoadedModel) -> list[list[Array]]:
    """Return one or several sets of inputs."""
    import numpy as np

    from nnfmq.cli.profile import random_inputs

    data = arguments.input_data
    if data in ([], ["random"]):
        return [random_inputs(model.inputs, arguments.seed)]
    if data == ["zero"]:
        return [[np.zeros_like(array) for array in random_inputs(model.inputs, 0)]]
    from nnfmq.cli.inputs import read_steps
    from nnfmq.cli.run import photo_normalizations

    return read_steps([Path(name) for name in data], model.inputs, photo_normalizations(model), has_states=True)


def _profiled(arguments: argparse.Namespace, model: LoadedModel, inputs: Sequence[Array]) -> dict[str, Any]:
    """Return the times of the operations, measured in this process as `nnfmq profile` does."""
    from nnfmq.cli.profile import profile_report
    from nnfmq.client.model.handle import initial_values

    options = argparse.Namespace(
        model=arguments.model, device=arguments.device or _PROFILED[0], threads=arguments.threads, runs=None,
        input=arguments.input_data, seed=arguments.seed, no_color=arguments.no_color,
    )  # fmt: skip
    return profile_report(options, model, [*inputs, *initial_values(model.states)])


@contextmanager
def shown_progress(no_color: bool) -> Iterator[Any]:
    """Yield a function that shows a text with the elapsed time on stderr, if that is a terminal."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with progress_line(no_color, *columns) as bar:  # the runners' waits call about ten times a second
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text, refresh=True)


def _write(arguments: argparse.Namespace, report: dict[str, Any], found: LoadMeasurements) -> None:
    """Write the files that the options name."""
    from nnfmq.lab.bench.report import csv_text, hgrm_text, named_parts, profile_export, render_page, result_names

    results, runners = report["results"], list(dict.fromkeys(result["runner"] for result in report["results"]))
    if arguments.html is not None:
        arguments.html.write_text(render_page(report), encoding="utf-8")
    if arguments.csv is not None:
        for path, runner in zip(named_parts(arguments.csv, runners), runners, strict=True):
            own = [result for result in results if result["runner"] == runner]
            path.write_text(csv_text(own), encoding="utf-8")
    if arguments.hgrm is not None:
        paths = named_parts(arguments.hgrm, result_names(results))
        for path, result in zip(paths, results, strict=True):
            path.write_text(hgrm_text(result), encoding="utf-8")
    if arguments.profile_export_file is not None:
        version = report["conditions"]["packages"].get("nnfmq")
        for path, runner in zip(named_parts(arguments.profile_export_file, runners), runners, strict=True):
            own_loads = [load for load in found.loads if load.runner == runner]
            path.write_text(profile_export(own_loads, version), encoding="utf-8")


def _print(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    if arguments.json:
        print_json(report)
        return
    screen = console(arguments.no_color)
    print_report(screen, report)
    if "operations" in report:
        from nnfmq.cli.profile_report import operations_table

        screen.print(operations_table(report["operations"], "order", wide=False))


def _status(report: dict[str, Any]) -> int:
    from nnfmq.lab.bench.report import CANNOT_TELL

    outcomes = {row["outcome"] for row in report.get("baseline", ())}
    is_exceeded = report["threshold"] is not None and report["threshold"]["within"] is None
    if "regression" in outcomes or is_exceeded:
        return 1
    return _UNCERTAIN if CANNOT_TELL in outcomes else 0


# ---- tables


_Named = tuple[str, Mapping[str, Any]]
"""A result and its name."""


def print_report(screen: Console, report: Mapping[str, Any]) -> None:
    """Print the report on a console; with fewer columns there are fewer percentiles."""
    from nnfmq.lab.bench.report import notes, result_names

    results = list(zip(result_names(report["results"]), report["results"], strict=True))
    screen.print(_latencies(results, _SHOWN if screen.width >= _WIDE else _FEW_SHOWN))
    screen.print(_costs(results, is_wide=screen.width >= _WIDE))
    for key, title in (("ratios", "beside the first runner"), ("baseline", "beside the baseline")):
        if report.get(key):
            screen.print(_ratios(report[key], title))
    for line in notes(report):
        screen.print(line)


def _latencies(results: Sequence[_Named], names: Sequence[str]) -> Any:
    from nnfmq.lab.statistics import heading_of, shown_percentiles

    listing = _narrow(
        table(
            "µs",
            *(f">{heading_of(name)}" for name in names),
            ">requests/s" if len(names) > len(_FEW_SHOWN) else ">per s",
        )
    )
    for name, result in results:
        times = shown_percentiles(result, names, short_microseconds)
        listing.add_row(name, *times, f"{result['throughput_per_s']:,.0f}")
    return listing


def _narrow(listing: Any) -> Any:
    listing.padding = (0, 1, 0, 0)  # so that it fits 80 columns
    return listing


def _costs(results: Sequence[_Named], *, is_wide: bool) -> Any:
    more = (">client", ">driver", ">CPU µs each") if is_wide else ()
    listing = _narrow(table("", ">CPU s", *more, ">PSS MiB", ">processes"))
    for name, result in results:
        client_s, driver_s = (result["cpu_ns"][side] / 1e9 for side in ("client", "driver"))
        each_us = (client_s + driver_s) * 1e6 / result["requests"]
        parts = (f"{client_s:.2f}", f"{driver_s:.2f}", f"{each_us:,.1f}") if is_wide else ()
        pss = f"{result['pss_bytes'] / 2**20:,.1f}"
        listing.add_row(name, f"{client_s + driver_s:.2f}", *parts, pss, str(result["processes"]))
    return listing


def _ratios(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    from nnfmq.lab.bench.report import ratio_text, result_names

    listing = _narrow(table("", ">ratio", ">95 % interval", "", title=title))
    for name, row in zip(result_names(rows), rows, strict=True):
        interval = f"{ratio_text(row['low'])}–{ratio_text(row['high'])}"
        listing.add_row(f"{name}: {row['metric']}", ratio_text(row["ratio"]), interval, row.get("outcome", ""))
    return listing
