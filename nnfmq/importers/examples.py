"""Where the files lie that come with the package: a model of handwritten digits in two types, and digits to try it on.

They are found beside the code, so the package must be installed as files, not run out of a zip archive. What they are
and whose they were is in CREDITS.md among them.
"""

from __future__ import annotations

from pathlib import Path

from nnfmq.hal.errors import InvalidArgument

__all__ = ["example_path"]

_FOLDER = Path(__file__).resolve().parent.parent / "data"


def example_path(name: str) -> Path:
    """Return the path of a file that comes with the package: "digits.tflite", "digits_quant.tflite" or "digits.npz".

    The first is a float32 model, the second the same in int8, whose input and output are codes. The archive holds
    `images` [n,8,8] of 0..16 and `labels` [n], both uint8, n = 450, which neither model has seen, and `correct_count`,
    how many of them the float32 one gets right. Raises InvalidArgument for any other name.
    """
    known = sorted(path.name for path in _FOLDER.iterdir() if path.is_file())
    if name not in known:
        raise InvalidArgument(f"no example {name!r}: there are {', '.join(known)}")
    return _FOLDER / name
