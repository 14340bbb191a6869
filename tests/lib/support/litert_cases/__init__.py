"""Random cases of all operators that the HAL and TFLite share, by TFLite's names; LiteRT computes TFLite's side.

A builder turns a `Draw` of one type into a `Case`. One operator and type may have several.
"""

from __future__ import annotations

from support.litert_cases import detection, images, movement, pointwise, products, recurrent
from support.oracles import Listed

CASES: list[Listed] = [
    *pointwise.CASES,
    *images.CASES,
    *movement.CASES,
    *products.CASES,
    *recurrent.CASES,
    *detection.CASES,
]
