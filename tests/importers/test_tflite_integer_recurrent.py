"""Recurrent operators on INT8: nnfmq's results are those of LiteRT's reference kernels, step after step."""

from __future__ import annotations

import numpy as np
import pytest
from support.both_runners import Theirs, ours
from support.integer_recurrent_cases import LSTM_FORMS, LstmForm, lstm, svdf

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

STEPS = 4


def check(content: bytes) -> None:
    """Run the model on random inputs, states carried over."""
    imported, litert = ours(content), Theirs(content)
    shape = imported.loaded.inputs[0].shape
    rng, seen = np.random.default_rng(5), set()
    for _ in range(STEPS):
        inputs = [rng.integers(-128, 128, shape).astype(np.int8)]
        (found,), (expected,) = imported(inputs), litert(inputs)
        np.testing.assert_array_equal(found, expected)
        seen.update(found.ravel().tolist())
    assert len(seen) > STEPS  # not all at the limits


@pytest.mark.parametrize("form", LSTM_FORMS, ids=str)
def test_an_lstm_of_integers_is_litert_s(form: LstmForm) -> None:
    check(lstm(form))


@pytest.mark.parametrize(("rank", "with_bias"), [(2, True), (1, False)])
def test_an_svdf_of_integers_is_litert_s(rank: int, with_bias: bool) -> None:
    check(svdf(rank=rank, with_bias=with_bias))
