"""HYBRID_X: the recurrent operation X of the HAL on floats whose weights had 8 bits in the file.

TFLite quantizes the rows that are multiplied by such weights, inputs and hidden states, at each step; the parameter
`asymmetric`, after all others, says how (see `dynamic_quantization`). The weights are given dequantized.

DYNAMIC_X does the same as ONNX Runtime's DynamicQuantizeLSTM: all inputs have one scale and zero point, and so have the
hidden states of each step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from nnfmq.hal.tflite_codes import TfliteOperation
from nnfmq.hal.types import OperationType as Op
from nnfmq.operations import lstm, rnn_svdf
from nnfmq.operations.signature import BOOL, F32, V1_2, Declaration, Plan, Run, Variant, attribute, overload
from nnfmq.operations.tflite_extension.declaring import own_code
from nnfmq.operations.tflite_extension.dynamic_quantization import quantize_linearly, quantize_rows
from nnfmq.operations.tflite_extension.sixteen_bits import find

ASYMMETRIC = attribute("asymmetric", BOOL)


def hybrid(source: Declaration) -> Declaration:
    """Return the declaration of HYBRID_X, X being `source`."""
    longest = max(source.overloads, key=lambda one: len(one.parameters))
    variant = next(one for one in source.variants if one.types["T"] == F32)
    assert variant.plan is not None
    return replace(
        source,
        code=own_code(TfliteOperation[f"HYBRID_{source.name}"]),
        since=V1_2,
        overloads=(overload(*longest.parameters, ASYMMETRIC, level=V1_2),),
        variants=(Variant(variant.types, V1_2, _quantizing(variant.plan)),),
        shape=partial(_shape, source.shape),
        output_counts=dict.fromkeys(source.output_counts, V1_2),
    )


def _shape(rule: Callable[..., Any], *shapes: Any, asymmetric: bool, **attributes: Any) -> Any:
    return rule(*shapes, **attributes)


def _quantizing(plan: Plan) -> Plan:
    def plan_hybrid(*tensors: Any, asymmetric: bool, **attributes: Any) -> Run:
        return plan(*tensors, represent=partial(quantize_rows, asymmetric=asymmetric), **attributes)

    return plan_hybrid


_LSTMS = (Op.LSTM, Op.UNIDIRECTIONAL_SEQUENCE_LSTM, Op.BIDIRECTIONAL_SEQUENCE_LSTM)
_RNNS = (Op.RNN, Op.UNIDIRECTIONAL_SEQUENCE_RNN, Op.BIDIRECTIONAL_SEQUENCE_RNN)


def dynamic(source: Declaration) -> Declaration:
    """Return the declaration of DYNAMIC_X, X being `source`."""
    longest = max(source.overloads, key=lambda one: len(one.parameters))
    variant = next(one for one in source.variants if one.types["T"] == F32)
    assert variant.plan is not None
    return replace(
        source,
        code=own_code(TfliteOperation[f"DYNAMIC_{source.name}"]),
        since=V1_2,
        overloads=(overload(*longest.parameters, level=V1_2),),
        variants=(Variant(variant.types, V1_2, partial(variant.plan, represent=quantize_linearly)),),
        output_counts=dict.fromkeys(source.output_counts, V1_2),
    )


DECLARATIONS = (
    *(hybrid(find(lstm.DECLARATIONS, code)) for code in _LSTMS),
    *(hybrid(find(rnn_svdf.DECLARATIONS, code)) for code in _RNNS),
    dynamic(find(lstm.DECLARATIONS, Op.UNIDIRECTIONAL_SEQUENCE_LSTM)),
)
