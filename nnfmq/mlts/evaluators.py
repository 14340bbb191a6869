"""MLTS's evaluators: errors against golden outputs, top-k rates, errors of speech synthesis and recognition.

Differences from MLTS's own program, which has these defects: the largest error is that of the absolute differences, not
of the positive ones only; and each metric has its own name, so that none is reported under the name of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nnfmq.mlts.datasets import Array, DataSet
from nnfmq.mlts.model_list import ScoringModel

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
