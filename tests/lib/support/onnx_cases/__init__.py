"""Random cases of operations that ONNX has in the HAL's meaning, by ONNX's names; ONNX Runtime computes its side.

A builder turns a `Draw` of one type into a `Case`. One operator and type may have several.
"""

from __future__ import annotations

from support.onnx_cases import images, movement, pointwise, quantized, recurrent
from support.oracles import Listed

CASES: list[Listed] = [*pointwise.CASES, *movement.CASES, *images.CASES, *quantized.CASES, *recurrent.CASES]
