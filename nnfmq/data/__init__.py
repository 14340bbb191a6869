"""Example files in the package: a model for handwritten digits in two types, and digits to run it on.

The package must be installed as files, not run from a zip archive. CREDITS.md in the data folder has the sources.
"""

from __future__ import annotations

from pathlib import Path

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import nearest

__all__ = ["example_path"]

_FOLDER = Path(__file__).resolve().parent


def example_path(name: str) -> Path:
    """Return the path of an example file: "digits.tflite", "digits_quant.tflite" or "digits.npz".

    The first is a float32 model, the second the same model in int8, with quantized input and output. The archive has
    `images` [450, 8, 8] of 0 to 16 and `labels` [450], both uint8, which were not used for training, and
    `correct_count`, the number of images that the float32 model classifies correctly.

    Raises:
        InvalidArgument: If `name` is not an example file.
    """
    known = sorted(path.name for path in _FOLDER.iterdir() if path.is_file() and path.suffix != ".py")
    if name not in known:
        raise InvalidArgument(f"no example {name!r}: there are {', '.join(known)}{nearest(name, known)}")
    return _FOLDER / name
