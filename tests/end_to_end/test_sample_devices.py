"""The sample devices of a driver process: each takes the operations of its own kind only, and computes those."""

from __future__ import annotations

import numpy as np
import pytest
from support.models import add_model, relu_model
from support.small_models import two_adds

import nnfmq
from nnfmq.hal.types import Model, OperandType

QUANTIZED = two_adds(OperandType.TENSOR_QUANT8_ASYMM, 0.5, 128)
MODELS: dict[str, Model] = {"add": add_model(), "relu": relu_model(), "quantized add": QUANTIZED}


@pytest.mark.parametrize(
    ("device", "taken"),
    [
        ("reference", ["add", "relu", "quantized add"]),  # Android's sample driver `all`
        ("sample-float_fast", ["add", "relu"]),
        ("sample-float_slow", ["add", "relu"]),
        ("sample-quant", ["quantized add"]),
        ("sample-minimal", ["add"]),
    ],
)
def test_UTL_10_a_sample_device_takes_and_prepares_the_operations_of_its_kind_only(
    device: str, taken: list[str], shared_client: nnfmq.Client
) -> None:
    chosen = shared_client.device(device)
    assert [name for name, model in MODELS.items() if all(chosen.supported_operations(model))] == taken
    for name, model in MODELS.items():
        if name in taken:
            chosen.prepare(model).close()
        else:
            with pytest.raises(nnfmq.GeneralFailure, match=r"does not support operations? 0"):
                chosen.prepare(model)


@pytest.mark.parametrize("device", ["sample-float_fast", "sample-float_slow", "sample-minimal"])
def test_UTL_10_a_sample_device_of_floats_computes(device: str, shared_client: nnfmq.Client) -> None:
    with shared_client.device(device).prepare(add_model()) as model:
        assert model.execute([1, 2, 3, 4], [10, 20, 30, 40])[0].tolist() == [11, 22, 33, 44]


def test_UTL_10_the_sample_device_of_quantized_values_computes(shared_client: nnfmq.Client) -> None:
    with shared_client.device("sample-quant").prepare(QUANTIZED) as model:
        five, ten = np.full((2, 2), 138, np.uint8), np.full((2, 2), 148, np.uint8)
        assert model.execute(five, ten)[0].tolist() == [[178, 178]] * 2  # 5 + 10 + 10, in steps of 0.5 from -64
