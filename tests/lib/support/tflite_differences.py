"""The operations that the HAL and TFLite compute differently: the list that the documentation shows.

By the name of the case in `support.litert_cases` and numpy's of the type. The differential tests expect equality
everywhere else, and a difference here: one code, or one of a truth value, at most, where `most` is 1.
"""

from __future__ import annotations

from typing import NamedTuple

CODES = ("uint8", "int8")
COMPARISONS = ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL")


class Difference(NamedTuple):
    """A description of the difference, and its maximum; None = without limit."""

    text: str
    most: int | None = 1


DIFFERENCES: dict[tuple[str, str], Difference] = {
    **{("MEAN", dtype): Difference("the HAL truncates the mean code, TFLite rounds it") for dtype in CODES},
    **{
        ("FULLY_CONNECTED", dtype): Difference("the HAL's multiplier rounds twice, LiteRT's reference kernel once")
        for dtype in CODES
    },
    ("AVERAGE_POOL_2D", "int8"): Difference("as unsigned on codes + 128, so halves go up; TFLite's go away from zero"),
    ("RESIZE_BILINEAR", "int8"): Difference(
        "as unsigned on codes + 128, cut off after adding a half; TFLite's is in fixed point"
    ),
    ("L2_NORMALIZATION", "int8"): Difference("as unsigned on codes + 128, with 7 more bits than TFLite's product has"),
    ("DIV", "int32"): Difference("the HAL's quotient is rounded down, TFLite's towards zero"),
    ("CAST, from INT32 out of range", "uint8"): Difference("the HAL saturates, TFLite wraps around", None),
    **{
        ("TOPK_V2, equal numbers", dtype): Difference("the HAL puts the last of them first, TFLite the first", None)
        for dtype in ("float32", *CODES, "int32")
    },
    **{
        (f"{name}, unequal scales", dtype): Difference("the HAL compares float32 values, TFLite fixed-point ones")
        for name in COMPARISONS
        for dtype in CODES
    },
    **{
        (f"{name}, unequal scales", dtype): Difference("the HAL requantizes to the output, TFLite takes codes", None)
        for name in ("MAXIMUM", "MINIMUM", "SELECT")
        for dtype in CODES
    },
}
