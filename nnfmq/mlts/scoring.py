"""The scoring benchmark: run each model on each backend over the same data, and compare the driver with LiteRT.

For each model and backend: a warm-up, the whole data set, and repetitions of it until the duration has passed; then
compilations and starts, once for each file. A data set that takes more than LIMIT_S is a failure. States are reset
before each sequence. The outputs of the first pass over the data are evaluated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nnfmq.hal.errors import NnfmqError
from nnfmq.importers import load
from nnfmq.mlts.backends import FROM_CACHE, SAVING, Backend, ModelRunner
from nnfmq.mlts.datasets import Array, DataMissing, DataSet, load_data, model_path
from nnfmq.mlts.evaluators import Accuracy, evaluate, worse_than
from nnfmq.mlts.latencies import LatencyBlock, summarize
from nnfmq.mlts.model_list import ScoringModel

OK, FAILED, MISSING = "ok", "failed", "missing"
LIMIT_S = 300.0
COMPILATIONS = 100
"""Compilations of each kind, at most."""
STARTS = 10
"""Starts of each model, at most."""
_ERRORS = (NnfmqError, OSError, ValueError, RuntimeError)  # the last two are LiteRT's
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ScoringOptions:
    """Durations of the warm-up and of each measurement, and the number of photos (None: all)."""

    warm_up_s: float = 2.0
    duration_s: float = 10.0
    photos: int | None = None


@dataclass(frozen=True, slots=True)
class ScoringResult:
    """The result of a test on one backend. `status` is OK, FAILED or MISSING, the last two with a reason."""

    model: ScoringModel
    backend: str
    status: str = OK
    reason: str = ""
    data_count: int = 0
    latency: LatencyBlock | None = None
    accuracy: Accuracy = field(default_factory=Accuracy)
    compilation: dict[str, LatencyBlock] = field(default_factory=dict)
    cache_bytes: int = 0
    start: LatencyBlock | None = None

    @property
    def has_failed(self) -> bool:
        """Return True if the test failed, or a metric exceeds its limit."""
        return self.status == FAILED or bool(self.accuracy.errors)

    def as_json(self) -> dict[str, Any]:
        """Return the fields; the model as its name and group."""
        fields = asdict(self)
        model = fields.pop("model")
        del fields["accuracy"]["ranks"]
        known = {"name": model["name"], "group": model["group"], "data_total": model["total"]}
        return {**known, **fields}


def run_benchmark(
    models: Sequence[ScoringModel],
    backends: Sequence[Backend],
    folder: Path,
    options: ScoringOptions,
    started: Callable[[ScoringModel, str], None] = lambda _model, _backend: None,
) -> Iterator[list[ScoringResult]]:
    """Yield the results of each test, one for each backend, in the order of the list. Blocks between them.

    `started` is called with each model and backend before they run.

    The first backend is the baseline if its name begins with "LiteRT": results that are worse are errors.
    """
    compiled: set[str] = set()
    for model in models:
        try:
            path = model_path(folder, model)
            data = load_data(folder, model, load(path).inputs[0], options.photos)
        except DataMissing as missing:
            yield [ScoringResult(model, backend.name, MISSING, str(missing)) for backend in backends]
            continue
        except NnfmqError as error:
            yield [ScoringResult(model, backend.name, FAILED, str(error)) for backend in backends]
            continue
        compiles = model.file not in compiled
        compiled.add(model.file)
        results = []
        for backend in backends:
            started(model, backend.name)
            results.append(_run_model(model, backend, path, data, options, compiles))
        yield [results[0], *(compare(result, results[0]) for result in results[1:])]


def compare(result: ScoringResult, baseline: ScoringResult) -> ScoringResult:
    """Return the result, with an error if its top-1 or top-5 rate is worse than LiteRT's, if that is the baseline."""
    found, expected = result.accuracy, baseline.accuracy
    if not found.ranks or not expected.ranks or not baseline.backend.startswith("LiteRT"):
        return result
    worse = [
        f"top-{k} is {found.metrics[f'top_{k}']:.3f}, LiteRT's is {expected.metrics[f'top_{k}']:.3f}"
        for k in (1, 5)
        if worse_than(found.ranks, expected.ranks, k)
    ]
    return replace(result, accuracy=replace(found, errors=(*found.errors, *worse)))


def _run_model(
    model: ScoringModel, backend: Backend, path: Path, data: DataSet, options: ScoringOptions, compiles: bool
) -> ScoringResult:
    """Run one test; `compiles` is True if compilations and starts of the file are to be measured, too."""
    result = ScoringResult(model, backend.name, data_count=len(data.sequences))
    try:
        with backend.runner(path) as runner:
            outputs, durations_ns = measure_inference(runner, data, options)
        result = replace(result, latency=summarize(durations_ns))
        if len(outputs) < len(data.sequences):
            share = f"{len(outputs)} of {len(data.sequences)}"
            return replace(result, status=FAILED, reason=f"{share} inputs were executed within {LIMIT_S:g} s")
        result = replace(result, accuracy=evaluate(model, data, outputs))
        if not compiles:
            return result
        result = _with_compilations(result, backend, path, options)
        first = data.sequences[0].steps[0]
        starts = _repeat(lambda: backend.start(path, first), options, STARTS)
        return replace(result, start=summarize(starts))
    except _ERRORS as error:
        return replace(result, status=FAILED, reason=" ".join(str(error).split()) or type(error).__name__)


def measure_inference(
    runner: ModelRunner, data: DataSet, options: ScoringOptions
) -> tuple[list[list[Array]], list[int]]:
    """Return the outputs of the first pass, one list for each complete sequence, and the time of each execution."""
    _warm_up(runner, data, options.warm_up_s)
    outputs: list[list[Array]] = []
    durations_ns: list[int] = []
    begin = time.monotonic_ns()
    while True:
        for sequence in data.sequences:
            found = _run_sequence(runner, sequence.steps, durations_ns)
            if is_first_pass := len(outputs) < len(data.sequences):
                outputs.append(found)
            limit_s = LIMIT_S if is_first_pass else options.duration_s
            if time.monotonic_ns() - begin > limit_s * _NS:
                return outputs, durations_ns
        if time.monotonic_ns() - begin > options.duration_s * _NS:
            return outputs, durations_ns


def _warm_up(runner: ModelRunner, data: DataSet, warm_up_s: float) -> None:
    end = time.monotonic_ns() + round(warm_up_s * _NS)
    while True:
        for sequence in data.sequences:
            for step in sequence.steps:
                runner.set_input(step)
                runner.run()
                if time.monotonic_ns() >= end:
                    return


def _run_sequence(runner: ModelRunner, steps: Sequence[Array], durations_ns: list[int]) -> list[Array]:
    outputs, clock = [], time.perf_counter_ns
    runner.reset()
    for step in steps:
        runner.set_input(step)
        begin = clock()
        runner.run()
        durations_ns.append(clock() - begin)
        outputs.append(runner.output())
    return outputs


def _with_compilations(result: ScoringResult, backend: Backend, path: Path, options: ScoringOptions) -> ScoringResult:
    """Measure each kind of compilation; those with cache files only if the device saved any."""
    blocks: dict[str, LatencyBlock] = {}
    with backend.compilations(path) as steps:
        for kind, (prepare, compile_model) in steps.kinds.items():
            blocks[kind] = summarize(_repeat(compile_model, options, COMPILATIONS, prepare))
        size = steps.cache_bytes()
    if not size:
        blocks = {kind: block for kind, block in blocks.items() if kind not in (SAVING, FROM_CACHE)}
    return replace(result, compilation=blocks, cache_bytes=size)


def _repeat(
    step: Callable[[], None], options: ScoringOptions, count: int, prepare: Callable[[], None] = lambda: None
) -> list[int]:
    """Return the times of at most `count` calls within the duration, after one that is not counted."""
    durations_ns: list[int] = []
    prepare()
    step()
    end = time.monotonic_ns() + round(options.duration_s * _NS)
    while len(durations_ns) < count:
        prepare()
        begin = time.perf_counter_ns()
        step()
        durations_ns.append(time.perf_counter_ns() - begin)
        if time.monotonic_ns() >= end:
            break
    return durations_ns
