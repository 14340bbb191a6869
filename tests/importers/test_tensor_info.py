"""TensorInfo: numpy's name for each operand type, and the types that have none."""

from __future__ import annotations

import numpy as np
import pytest

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import ElementInfo, TensorInfo, dtype_name, operand_info
from nnfmq.hal.types import Operand, OperandType, element_bytes

WITHOUT = (OperandType.SUBGRAPH, OperandType.OEM, OperandType.TENSOR_OEM_BYTE)


@pytest.mark.parametrize("operand_type", [t for t in OperandType if t not in WITHOUT])
def test_numpys_element_has_the_size_of_the_hals(operand_type: OperandType) -> None:
    assert np.dtype(dtype_name(operand_type)).itemsize == element_bytes(operand_type)


@pytest.mark.parametrize("operand_type", WITHOUT)
def test_a_type_without_a_numpy_element_is_rejected(operand_type: OperandType) -> None:
    with pytest.raises(InvalidArgument, match="no NumPy element type"):
        dtype_name(operand_type)


def test_an_operand_is_described_with_its_quantization() -> None:
    operand = Operand(OperandType.TENSOR_QUANT8_ASYMM, (1, 2), 0.5, 128)
    assert operand_info(operand, "scores") == TensorInfo("scores", (1, 2), "uint8", 0.5, 128)


def test_a_scalar_is_distinguished_from_a_tensor_of_unknown_rank() -> None:
    assert operand_info(Operand(OperandType.INT32)) == TensorInfo("", (), "int32", is_scalar=True)
    assert operand_info(Operand(OperandType.TENSOR_INT32)) == TensorInfo("", (), "int32")


def test_EXT_3_a_type_of_an_extension_is_described_by_what_a_device_stated() -> None:
    known = {OperandType(1 << 16): ElementInfo("int64", True)}
    assert operand_info(Operand(OperandType(1 << 16)), "n", known) == TensorInfo("n", (), "int64", is_scalar=True)
    with pytest.raises(InvalidArgument, match="no NumPy element type"):
        operand_info(Operand(OperandType(1 << 16)))
