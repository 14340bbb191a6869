"""Operations that the HAL and TFLite share, on random shapes and parameters, against LiteRT's reference kernels.

The cases are in `support.litert_cases`. What the two define differently is in `support.tflite_differences`, and must
differ here.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.litert_cases import CASES
from support.oracles import Builder, Draw, assert_same, pairs
from support.places import ROOT
from support.tflite_differences import DIFFERENCES

SEEDS = range(6)
MANY_SEEDS = range(40)  # enough for each difference to show
TYPED = [(name, dtype, build) for name, types, build in CASES for dtype in types]
EQUAL = [case for case in TYPED if case[:2] not in DIFFERENCES]
DIFFERENT = [case for case in TYPED if case[:2] in DIFFERENCES]


def label(value: object) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "dtype", "build"), EQUAL, ids=label)
def test_an_operation_is_litert_s(name: str, dtype: str, build: Builder, seed: int) -> None:
    assert_same(build(Draw(name, seed, dtype)))


@pytest.mark.parametrize(("name", "dtype", "build"), DIFFERENT, ids=label)
def test_a_listed_difference_is_there_and_no_larger(name: str, dtype: str, build: Builder) -> None:
    found = [pair for seed in MANY_SEEDS for pair in pairs(build(Draw(name, seed, dtype)))]

    apart = max(int(np.abs(reference.astype(np.int64) - tflite).max()) for reference, tflite in found)

    assert apart > 0
    assert apart <= (DIFFERENCES[name, dtype].most or apart)


def test_every_listed_difference_has_a_case() -> None:
    assert set(DIFFERENCES) == {case[:2] for case in DIFFERENT}


@pytest.mark.parametrize(("name", "dtype"), DIFFERENCES)
def test_a_listed_difference_is_in_the_documents(name: str, dtype: str) -> None:
    text, most = DIFFERENCES[name, dtype]

    assert (
        f"| {name} | {dtype} | {most or 'any'} | {text} |"
        in (ROOT / "docs" / "explanation" / "reference-engine.md").read_text()
    )
