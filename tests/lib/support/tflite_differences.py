"""Where the HAL and TFLite compute an operation differently: the one list, which docs/engine.md shows as a table.

By TFLite's name of the operator and numpy's of the type. The differential tests expect equality everywhere else, and
a difference here.
"""

from __future__ import annotations

CODES = ("uint8", "int8")

DIFFERENCES: dict[tuple[str, str], str] = {
    **{("MEAN", dtype): "the HAL truncates the mean code, TFLite rounds it" for dtype in CODES},
    **{("FULLY_CONNECTED", dtype): "the HAL's multiplier rounds twice, LiteRT's once" for dtype in CODES},
    ("AVERAGE_POOL_2D", "int8"): "as unsigned on codes + 128, so halves go up; TFLite's go away from zero",
    ("L2_NORMALIZATION", "int8"): "the HAL multiplies by 128 before it rounds, TFLite shifts while it rounds",
    ("RESIZE_BILINEAR", "int8"): "as unsigned on codes + 128, cut off after adding a half; TFLite's is in fixed point",
}
