"""A photo as a model's input: the central square of 87.5 % of the shorter side, bilinear, in the model's numbers.

float32 inputs get [-1, 1], uint8 the pixels as they are, int8 the pixels minus 128: how classifiers of the MobileNet
kind are trained. Only Pillow reads files, and only here. Left out: other crops, means and channel orders; who needs
them prepares an .npy file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nnfmq.cli.output import shape_text
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
_CROP = 0.875
_DAMAGED = (OSError, ValueError, SyntaxError, IndexError, struct.error)  # how Pillow's decoders tell, one or the other
_MODES = {1: "L", 3: "RGB"}


def read_image(path: Path, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Read a photo as an array of `shape` (1, height, width, 1 or 3) and `dtype` (float32, uint8, int8).

    Raises InvalidArgument when Pillow is missing, the file is no whole image, or no photo fits such an input.
    """
    height, width, mode = _geometry(shape)
    pixels = np.asarray(_resized(_square(_decode(path, mode)), width, height), dtype=np.uint8)
    return _scaled(pixels.reshape(tuple(shape)), dtype)


def _geometry(shape: Sequence[int]) -> tuple[int, int, str]:
    if len(shape) != 4 or shape[0] != 1 or shape[3] not in _MODES:
        raise InvalidArgument(f"a photo fits inputs of 1xHxWx3 or 1xHxWx1; this model takes {shape_text(shape)}")
    return shape[1], shape[2], _MODES[shape[3]]


def _decode(path: Path, mode: str) -> Image:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise InvalidArgument(f"reading {path.name} needs Pillow: pip install 'nnfmq[images]'") from None
    with path.open("rb") as file:
        try:
            with Image.open(file) as image:
                return ImageOps.exif_transpose(image).convert(mode)
        except (*_DAMAGED, Image.DecompressionBombError) as bad:
            raise InvalidArgument(f"{path}: not a whole image: {_reason(bad)}") from bad


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    return "no known image format" if isinstance(error, UnidentifiedImageError) else str(error)


def _square(image: Image) -> Image:
    side = max(1, round(min(image.size) * _CROP))
    left, top = ((extent - side) // 2 for extent in image.size)
    return image.crop((left, top, left + side, top + side))


def _resized(image: Image, width: int, height: int) -> Image:
    """Interpolate between the four nearest pixels, as TensorFlow and Android do.

    Pillow's own `resize` averages over what it shrinks, which such models were not trained on: of 300 photos,
    mobilenet_v1_0.25_128_quant then recognises 115 at once instead of 123.
    """
    from PIL.Image import Resampling, Transform

    across, down = image.width / width, image.height / height
    matrix = (across, 0.0, 0.0, 0.0, down, 0.0)
    return image.transform((width, height), Transform.AFFINE, matrix, resample=Resampling.BILINEAR)


def _scaled(pixels: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if dtype == np.float32:
        return pixels.astype(np.float32) / np.float32(127.5) - np.float32(1.0)
    if dtype == np.int8:
        return (pixels.astype(np.int16) - 128).astype(np.int8)
    if dtype == np.uint8:
        return pixels
    raise InvalidArgument(f"a photo fits inputs of float32, uint8 or int8; this model takes {dtype}")
