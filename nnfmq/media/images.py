"""Photos as model inputs: the central square of 87.5 % of the shorter side, resized bilinearly to the input's size.

float32 inputs get values in [-1, 1], uint8 inputs the pixels, int8 inputs the pixels minus 128, as MobileNets are
trained, unless a normalization is given. Channels are the last dimension, or the second one, as in many ONNX models.
Other crops and orders of channels are not supported: make an array instead.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.summaries import counted
from nnfmq.hal.tensor_info import TensorInfo

if TYPE_CHECKING:
    from PIL.Image import Image

Normalization: TypeAlias = tuple[Sequence[float], Sequence[float]] | None
"""Mean and standard deviation of an input's values, one of each or one for each channel; None: see above."""


class PhotoModel(Protocol):
    """A model that a photo is read for: what `nnfmq.load` returns, or a prepared model."""

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The inputs, in order."""
        ...

    @property
    def metadata(self) -> Any:
        """An `nnfmq.ModelMetadata`, or None."""
        ...


SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))
_CROP = 0.875
_DAMAGED = (OSError, ValueError, SyntaxError, IndexError, struct.error)  # raised by one or another of Pillow's decoders
_MODES = {1: "L", 3: "RGB"}


def read_image(path: Path, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Read a photo as an array of `dtype` (float32, uint8, int8) and `shape`: 1xHxWxC or 1xCxHxW with 1 or 3 channels.

    Raises:
        InvalidArgument: If Pillow is missing, the file is not a complete image, or the input does not fit a photo.
        OSError: If the file cannot be read.
    """
    height, width, channels = _extents(shape)
    image = _decode(path, _MODES[channels])
    side = max(1, round(min(image.size) * _CROP))
    left, top = ((length - side) // 2 for length in image.size)
    square = image.crop((left, top, left + side, top + side))
    pixels = np.asarray(_resized(square, width, height), dtype=np.uint8).reshape(1, height, width, channels)
    if not _has_channels_last(shape):
        pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return _scaled(pixels, dtype)


def _extents(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return height, width and channels of an input. Raises InvalidArgument if it does not take a photo."""
    if len(shape) == 4 and shape[0] == 1 and 0 not in shape:
        if _has_channels_last(shape):
            return shape[1], shape[2], shape[3]
        if shape[1] in _MODES:
            return shape[2], shape[3], shape[1]
    text = "x".join(str(size or "?") for size in shape) or "scalar"
    advice = "; give the model shapes of known sizes" if 0 in shape else ""
    raise InvalidArgument(
        f"a photo needs an input of shape 1xHxWxC or 1xCxHxW with C = 1 or 3; this input is {text}{advice}"
    )


def _has_channels_last(shape: Sequence[int]) -> bool:
    return shape[3] in _MODES


def read_photo(
    path: str | os.PathLike[str],
    given: TensorInfo | PhotoModel,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> np.ndarray[Any, Any]:
    """Read a photo as an array for a model's input: its central square, resized, normalized and then quantized.

    Args:
        path: A file that Pillow reads (extra `images`): JPEG, PNG, WebP and others.
        given: The input, such as `model.inputs[0]`, of shape 1xHxWxC or 1xCxHxW; or a model with one input.
        mean: What is subtracted from each value of a pixel, 0 to 255; one number, or one for each channel. None = that
            of the model's metadata, if `given` is a model that has some; else float32 inputs get values in [-1, 1],
            and integers the pixels as MobileNets take them.
        std: What the difference is divided by; given if and only if `mean` is.

    Raises:
        InvalidArgument: If Pillow is missing, the file is not a complete image, or the input or the normalization does
            not fit a photo.
        OSError: If the file cannot be read.
    """
    path, normalization = Path(path), _normalization(mean, std)
    info = given if isinstance(given, TensorInfo) else only_input(given, "photo")
    if not isinstance(given, TensorInfo) and normalization is None and given.metadata is not None:
        described = given.metadata.inputs[:1]
        normalization = next(((each.mean, each.std) for each in described if each.mean), None)
    if normalization is None:
        return read_image(path, info.shape, np.dtype(info.dtype))
    return _normalized(path, info, normalization)


def _normalized(
    path: Path, info: TensorInfo, normalization: tuple[Sequence[float], Sequence[float]]
) -> np.ndarray[Any, Any]:
    if info.dtype != "float32" and not (info.dtype in ("uint8", "int8") and info.scale):
        raise InvalidArgument(f"a photo needs an input of float32, uint8 or int8; this input is {info.dtype}")
    pixels = read_image(path, info.shape, np.dtype(np.uint8)).astype(np.float32)
    channels = _extents(info.shape)[2]
    mean_values, std_values = (np.array(values, np.float32) for values in normalization)
    if any(values.size not in (1, channels) for values in (mean_values, std_values)):
        raise InvalidArgument(f"a normalization of {mean_values.size} channels; the input has {channels}")
    if not _has_channels_last(info.shape):
        mean_values, std_values = (values.reshape(-1, 1, 1) for values in (mean_values, std_values))
    real: np.ndarray[Any, Any] = (pixels - mean_values) / std_values
    return quantized(real, info)


def _normalization(mean: float | Sequence[float] | None, std: float | Sequence[float] | None) -> Normalization:
    if (mean is None) != (std is None):
        raise InvalidArgument(
            f"a normalization has a mean and a std; only {'std' if mean is None else 'mean'} is given"
        )
    if mean is None or std is None:
        return None
    values = tuple([float(each)] if isinstance(each, (int, float)) else [*map(float, each)] for each in (mean, std))
    if not all(math.isfinite(value) for each in values for value in each) or 0 in values[1]:
        raise InvalidArgument(f"a normalization of finite numbers, with no std of 0, is needed; mean {mean}, std {std}")
    return values[0], values[1]


def only_input(model: PhotoModel, what: str) -> TensorInfo:
    """Return the input of a model that has one; `what` is to be its value. Raises InvalidArgument if it has others."""
    if not hasattr(model, "inputs"):
        raise InvalidArgument(
            f"a {what} is for a model or one of its inputs, not for a {type(model).__name__}: "
            "give what nnfmq.load or `prepare` returns, or an element of its `inputs`"
        )
    if len(model.inputs) != 1:
        names = ", ".join(repr(info.name) for info in model.inputs)
        raise InvalidArgument(
            f"a {what} is for one input; the model has {counted(len(model.inputs), 'input')}: {names}; give one of them"
        )
    return model.inputs[0]


def quantized(real: np.ndarray[Any, Any], info: TensorInfo) -> np.ndarray[Any, Any]:
    """Return real values as elements of an input: float32, or integers with a scale."""
    if info.dtype == "float32":
        return real.astype(np.float32, copy=False)
    limits = np.iinfo(info.dtype)
    codes = np.round(real / np.float32(info.scale)) + info.zero_point
    return np.clip(codes, limits.min, limits.max).astype(info.dtype)


def _decode(path: Path, mode: str) -> Image:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise InvalidArgument(f"reading {path.name} needs Pillow: pip install 'nnfmq[images]'") from None
    with path.open("rb") as file:
        try:
            with Image.open(file) as image:
                return ImageOps.exif_transpose(image).convert(mode)
        except (*_DAMAGED, Image.DecompressionBombError) as bad:
            reason = "unknown image format" if isinstance(bad, UnidentifiedImageError) else str(bad)
            raise InvalidArgument(f"{path} is not a complete image: {reason}") from bad


def _resized(image: Image, width: int, height: int) -> Image:
    """Interpolate between the four nearest pixels, as TensorFlow and Android do.

    Pillow's `resize` averages over the area that it shrinks, which these models were not trained on: with it
    mobilenet_v1_0.25_128_quant classifies 115 of 300 photos correctly, with this function 123.
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
    raise InvalidArgument(f"a photo needs an input of float32, uint8 or int8; this input is {dtype}")
