"""RANDOM_MULTINOMIAL: random classes, from unnormalized log-probabilities.

The random numbers are TFLite's: Philox 4x32-10 with the first seed as key and the second as the upper half of the
counter; two 32-bit results make a double of 52 bits. Equal seeds give equal samples; seeds 0 and 0 are replaced by
random ones in each execution. A class whose probability is 0 or whose log-probability is not finite is never sampled,
unless there is no other.

    C1 the input has shape (batch, classes), the seeds are two
    C2 the number of samples is positive
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import numpy.typing as npt

from nnfmq.hal.types import OperationType
from nnfmq.operations import declaration as op
from nnfmq.operations.declaration import Array, Run, Shape, Tensor
from nnfmq.operations.kernel_adapters import float_variants
from nnfmq.operations.shapes import require

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_CHUNK = 1 << 16


def philox(count: int, key: int, counter: int, first: int = 0) -> npt.NDArray[np.uint32]:
    """Return `count` groups of four words, from group `first`. `key` and `counter` (its upper half) have 64 bits."""
    low = np.arange(first, first + count, dtype=np.uint64)
    upper = np.full(count, counter % (1 << 64), np.uint64)
    words = [low & _LOW, low >> _WORD, upper & _LOW, upper >> _WORD]
    for number in range(_ROUNDS):
        keys = [np.uint64(((key >> 32 * i) + number * _KEY_STEPS[i]) & 0xFFFFFFFF) for i in (0, 1)]
        first_product, second_product = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            second_product >> _WORD ^ words[1] ^ keys[0],
            second_product & _LOW,
            first_product >> _WORD ^ words[3] ^ keys[1],
            first_product & _LOW,
        ]
    return np.stack(words, axis=1).astype(np.uint32)


def uniform(count: int, seeds: tuple[int, int], first: int = 0) -> npt.NDArray[np.float64]:
    """Return `count` doubles in [0, 1), starting at position `first` of the stream."""
    key, counter = (seed % (1 << 64) for seed in seeds)
    odd = first % 2
    pairs = philox((odd + count + 1) // 2, key, counter, first // 2).reshape(-1, 2)[odd : odd + count].astype(np.uint64)
    fractions = (pairs[:, 0] & np.uint64(0xFFFFF)) << _WORD | pairs[:, 1]
    return fractions.astype(np.float64) * 2.0**-52


def multinomial_shape(input: Shape, *, samples: int, seeds: Array) -> Shape:
    """Return (batch, samples)."""
    message = f"input {input} and seeds {seeds.shape}, required are rank 2 and shape (2,)"
    require(len(input) == 2 and seeds.shape == (2,), "C1", message)
    require(samples > 0, "C2", f"{samples} samples, at least 1 is required")
    return input[0], samples


def plan_multinomial(input: Tensor, *, output: Tensor, samples: int, seeds: Array) -> Run:
    """Plan the samples; seeds 0 and 0 are replaced at each execution."""
    pair = int(seeds[0]), int(seeds[1])
    if pair == (0, 0):
        return lambda logits: multinomial(logits, samples, _random_seeds())
    return partial(multinomial, samples=samples, seeds=pair)


def _random_seeds() -> tuple[int, int]:
    first, second = np.frombuffer(os.urandom(16), np.uint64).tolist()
    return first, second


def multinomial(logits: Array, samples: int, seeds: tuple[int, int]) -> Array:
    """Return `samples` classes for each row, in chunks: random doubles take much more memory than classes."""
    sums = cumulative(logits)
    chosen = np.empty((len(logits), samples), np.int32)
    for number, row in enumerate(sums):
        for start in range(0, samples, _CHUNK):
            count = min(_CHUNK, samples - start)
            chosen[number, start : start + count] = classes_of(row, uniform(count, seeds, number * samples + start))
    return chosen


def cumulative(logits: Array) -> npt.NDArray[np.float64]:
    """Return the cumulative probabilities of each row's classes, times a common factor."""
    private = logits.astype(np.float64)
    known = np.isfinite(private)
    largest = np.max(private, axis=1, keepdims=True, initial=float(np.finfo(np.float32).min), where=known)
    return np.add.accumulate(np.where(known, np.exp(private - largest), 0.0), axis=1)


def classes_of(sums: Array, samples: Array) -> Array:
    """Return the class that each of `samples` (in [0, 1)) falls into."""
    above: Array = np.searchsorted(sums, samples * sums[-1], side="right")
    return np.minimum(above, len(sums) - 1, out=above)


DECLARATIONS = (
    op.Declaration(
        OperationType.RANDOM_MULTINOMIAL,
        since=op.V1_2,
        overloads=(
            op.overload(op.data("input"), op.attribute("samples"), op.attribute("seeds", op.I32), level=op.V1_2),
        ),
        variants=float_variants(plan_multinomial),
        shape=multinomial_shape,
        outputs=(op.I32,),
    ),
)
