"""The scoring benchmark: run each model on each backend over the same data, and compare the driver with LiteRT.

For each model and backend: a warm-up, the whole data set, and repetitions of it until the duration has passed; then
compilations and starts, once for each file. A data set that takes more than LIMIT_S is a failure. States are reset
before each sequence. The outputs of the first pass over the data are evaluated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nnfmq.hal.errors import NnfmqError
from nnfmq.importers import load
from nnfmq.lab.conditions import model_identity
from nnfmq.lab.mlts.backends import FROM_CACHE, SAVING, Backend, ModelRunner
from nnfmq.lab.mlts.models import Array, DataMissing, DataSet, ScoringModel, load_data, model_path
from nnfmq.lab.statistics import LatencyBlock, summarize

__all__ = [
    "Accuracy",
    "ScoringOptions",
    "ScoringResult",
    "compare",
    "evaluate",
    "log_f0_error",
    "measure_inference",
    "mel_cep_distortion",
    "phone_error_rate",
    "ranks",
    "run_benchmark",
    "top_k",
    "worse_than",
]


# ----------------------------------------------------------------------------------------------------------------------
# MLTS's evaluators: errors against golden outputs, top-k rates, errors of speech synthesis and recognition.
#
# Differences from MLTS's own program, which has these defects: the largest error is that of the absolute differences,
# not of the positive ones only; and each metric has its own name, so that none is reported under the name of another.


TOP_K = 5
MAX_TOP1_LOSS = 0.05
"""How much lower than expected the top-1 rate may be."""
SIGNIFICANCE = 0.05
"""Two runtimes round differently, so each is right on some photos on which the other is wrong."""
DISTORTION_LIMIT, LOG_F0_LIMIT = 4.0, 0.01
PHONE_ERROR_LIMIT = 5.0
"""In percent."""
_FRAME = (4, 49)  # frames of a step, and values of a frame:
_AMPLITUDES, _LOG_F0, _VOICING = slice(1, 40), 47, 48  # 40 amplitudes, of which the first does not count, 7 others, ...


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The metrics of one test: errors against golden outputs, named metrics, and what exceeds a limit.

    `mse` and `max_error` are None without golden outputs. `ranks` is, for each photo, the number of classes that are
    better than the right one.
    """

    mse: float | None = None
    max_error: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


def evaluate(model: ScoringModel, data: DataSet, outputs: Sequence[Sequence[Array]]) -> Accuracy:
    """Return the accuracy of `outputs`, which has the outputs of each step of each sequence."""
    if model.evaluator == "top-k":
        classes = [sequence.expected_class for sequence in data.sequences]
        found = ranks([steps[0] for steps in outputs], classes)
        metrics = top_k(found)
        return Accuracy(metrics=metrics, errors=tuple(_top1_errors(model, metrics["top_1"])), ranks=tuple(found))
    errors = [_errors(found, sequence.golden) for found, sequence in zip(outputs, data.sequences, strict=True)]
    mse = float(np.mean(np.concatenate([each**2 for each in errors])))
    max_error = max(float(np.abs(each).max()) for each in errors)
    metrics = _sequence_metrics(model, data, outputs)
    return Accuracy(mse, max_error, metrics, tuple(_limit_errors(metrics)))


def _errors(found: Sequence[Array], golden: Sequence[Array]) -> Array:
    pairs = zip(found, golden, strict=True)
    return np.concatenate([one.astype(np.float64).ravel() - other.astype(np.float64) for one, other in pairs])


def ranks(scores: Sequence[Array], classes: Sequence[int]) -> list[int]:
    """Return the number of classes that are better than the right one; of equal scores the first is better."""
    found = []
    for array, expected in zip(scores, classes, strict=True):
        order = np.argsort(-array.astype(np.float64).ravel(), kind="stable")
        found.append(int(np.flatnonzero(order == expected)[0]))
    return found


def top_k(found: Sequence[int]) -> dict[str, float]:
    """Return the share of photos whose right class is among the k best, for k from 1 to 5."""
    return {f"top_{k}": sum(rank < k for rank in found) / len(found) for k in range(1, TOP_K + 1)}


def worse_than(found: Sequence[int], baseline: Sequence[int], k: int) -> bool:
    """Return whether fewer photos have the right class among the k best than in the baseline, beyond chance.

    A sign test over the photos on which they differ: if both are equally good, the baseline is right on as many of them
    or more with a probability of less than SIGNIFICANCE.
    """
    pairs = [(one < k, other < k) for one, other in zip(found, baseline, strict=True)]
    losses, gains = pairs.count((False, True)), pairs.count((True, False))
    count = losses + gains
    probability: float = sum(math.comb(count, number) for number in range(losses, count + 1)) / 2**count
    return probability < SIGNIFICANCE


def _top1_errors(model: ScoringModel, top1: float) -> Iterable[str]:
    lowest = model.expected_top1 - MAX_TOP1_LOSS
    if top1 < lowest:
        yield f"top-1 is {top1:.3f}; expected are {model.expected_top1:.3f}, at least {lowest:.3f}"


def _sequence_metrics(model: ScoringModel, data: DataSet, outputs: Sequence[Sequence[Array]]) -> dict[str, float]:
    """Return the largest error of any sequence."""
    if not model.evaluator:
        return {}
    found = [np.stack([step.ravel() for step in steps]) for steps in outputs]
    golden = [np.stack(sequence.golden) for sequence in data.sequences]
    pairs = list(zip(found, golden, strict=True))
    if model.evaluator == "phone-error-rate":
        return {"max_phone_error_rate": max(phone_error_rate(*pair) for pair in pairs)}
    assert data.mean_std_dev is not None
    frames = [(_frames(one, data.mean_std_dev), _frames(other, data.mean_std_dev)) for one, other in pairs]
    return {
        "max_mel_cep_distortion": max(mel_cep_distortion(*pair) for pair in frames),
        "max_log_f0_error": max(log_f0_error(*pair) for pair in frames),
    }


def _frames(outputs: Array, mean_std_dev: Array) -> Array:
    """Undo the normalization; return the frames, shape (frames, 49)."""
    mean, deviation = mean_std_dev.T
    frames: Array = (outputs * deviation + mean).reshape(-1, *_FRAME)
    return frames.reshape(-1, _FRAME[1])


def mel_cep_distortion(found: Array, golden: Array) -> float:
    """Return the root mean square of the differences of all amplitudes but the first, over frames of 49 values."""
    return _root_mean_square((found - golden)[:, _AMPLITUDES])


def log_f0_error(found: Array, golden: Array) -> float:
    """Return the root mean square of the differences of log F0 over frames that are voiced in both; 0 without any."""
    voiced = (found[:, _VOICING] > 0) & (golden[:, _VOICING] > 0)
    return _root_mean_square((found - golden)[voiced, _LOG_F0]) if voiced.any() else 0.0


def phone_error_rate(found: Array, golden: Array) -> float:
    """Return the edit distance of the best phones of each step, relative to their number, in percent."""
    one, other = found.argmax(axis=1).tolist(), golden.argmax(axis=1).tolist()
    return 100.0 * _edit_distance(one, other) / len(other)


def _edit_distance(one: Sequence[int], other: Sequence[int]) -> int:
    row = list(range(len(other) + 1))
    for number, phone in enumerate(one, 1):
        diagonal, row[0] = row[0], number
        for column, expected in enumerate(other, 1):
            replaced = diagonal + (phone != expected)
            diagonal, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, replaced)
    return row[-1]


def _root_mean_square(errors: Array) -> float:
    return math.sqrt(float(np.mean(np.square(errors.astype(np.float64)))))


_LIMITS = {
    "max_mel_cep_distortion": ("the mel-cepstral distortion", DISTORTION_LIMIT),
    "max_log_f0_error": ("the error of log F0", LOG_F0_LIMIT),
    "max_phone_error_rate": ("the phone error rate", PHONE_ERROR_LIMIT),
}


def _limit_errors(metrics: dict[str, float]) -> Iterable[str]:
    for name, value in metrics.items():
        label, limit = _LIMITS[name]
        if not value <= limit:  # NaN exceeds every limit
            yield f"{label} is {value:.4g}; the limit is {limit:g}"


# ----------------------------------------------------------------------------------------------------------------------
# The scoring benchmark: run each model on each backend over the same data, and compare the driver with LiteRT.


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
    model_sha256: str = ""

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
        compiles, digest = model.file not in compiled, model_identity(path)["model_sha256"]
        compiled.add(model.file)
        results = []
        for backend in backends:
            started(model, backend.name)
            results.append(replace(_run_model(model, backend, path, data, options, compiles), model_sha256=digest))
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
