"""Models with weights of 8 bits through a driver, on both engines: results are LiteRT's, states kept by the client."""

from __future__ import annotations

import numpy as np
import pytest
from support.both_runners import Theirs
from support.hybrid_cases import HYBRID_CASES
from support.integer_recurrent_cases import LstmForm, lstm

import nnfmq

STEPS = 3


def case(name: str, note: str) -> bytes:
    """Return the file of one hybrid operator."""
    (found,) = (one for one in HYBRID_CASES if (one.name, one.note) == (name, note))
    return found.content()


@pytest.mark.parametrize("device", ["reference", "compiled"])
@pytest.mark.parametrize(
    "content",
    [
        case("FULLY_CONNECTED", "int4-units-asymmetric"),
        case("CONV_2D", "channels"),
        case("CONV_2D", "channels-images"),
        case("UNIDIRECTIONAL_SEQUENCE_LSTM", "normalized-projection"),
        lstm(LstmForm(projection=True, outputs=3)),
    ],
    ids=["fully connected", "convolution", "convolution of images", "lstm", "integer lstm"],
)
def test_quantized_weights_give_litert_s_results_step_after_step(content: bytes, device: str) -> None:
    litert, rng = Theirs(content), np.random.default_rng(4)
    loaded = nnfmq.load(content)
    info = loaded.inputs[0]
    with (
        nnfmq.connect(embedded=True) as client,
        client.device(device).prepare(loaded) as prepared,
        prepared.burst() as burst,
    ):
        for _ in range(STEPS):
            values = rng.integers(-128, 128, info.shape).astype(np.int8)
            given = values if info.dtype == "int8" else values.astype(np.float32) / 64
            found, (expected,) = burst.execute(given)[0], litert([given])
            tolerance = 0 if info.dtype == "int8" else 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
