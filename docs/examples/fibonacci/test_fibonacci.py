"""Tests of the extension: `pip install -e . && pytest`. The embedded driver finds installed plug-ins."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ask_fibonacci import fibonacci_model

import nnfmq


@pytest.fixture(scope="module")
def model() -> Iterator[nnfmq.PreparedModel]:
    """Prepare FIBONACCI with scale 0.5 and zero point 10."""
    with (
        nnfmq.connect(embedded=True) as client,
        client.device("reference").prepare(fibonacci_model(0.5, 10)) as prepared,
    ):
        yield prepared


@pytest.mark.parametrize(("n", "values"), [(1, [12]), (2, [12, 12]), (6, [12, 12, 14, 16, 20, 26])])
def test_the_first_n_numbers(model: nnfmq.PreparedModel, n: int, values: list[int]) -> None:
    """The numbers are 1, 1, 2, 3, 5, 8."""
    (result,) = model.execute(np.int64(n))
    assert result.tolist() == values


@pytest.mark.parametrize("n", [0, -1, 187])
def test_C1_n_is_from_1_to_186(model: nnfmq.PreparedModel, n: int) -> None:
    """Another value fails the execution, not the driver."""
    with pytest.raises(nnfmq.GeneralFailure, match=rf"n is {n}, .*\(C1\)"):
        model.execute(np.int64(n))
