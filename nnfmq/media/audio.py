"""Recordings as model inputs: samples of a WAV file, all channels averaged, as many as the input takes."""

from __future__ import annotations

import math
import os
import wave
from typing import Any

import numpy as np

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.media.images import PhotoModel, only_input, quantized

__all__ = ["SUFFIXES", "read_audio"]

SUFFIXES = frozenset((".wav", ".wave"))
_RATE = 16_000  # that of most models for speech
_WIDTHS = {1: "u1", 2: "<i2", 4: "<i4"}  # element types by the bytes of a sample


def read_audio(
    path: str | os.PathLike[str], given: TensorInfo | PhotoModel, *, rate: int = _RATE, start: float | None = None
) -> np.ndarray[Any, Any]:
    """Read samples of a WAV file as an array for a model's input.

    float32 inputs get values in [-1, 1), int16 inputs without a scale the samples of 16 bits, inputs with a scale the
    quantized values. Samples that the file lacks at its end are silence.

    Args:
        path: A WAV file of PCM samples of 8, 16 or 32 bits.
        given: The input, such as `model.inputs[0]`: all elements are samples, one after the other; or a model with one
            input.
        rate: The samples in a second that the model takes. A file with another rate is not resampled but rejected.
        start: Where to begin, in seconds; then what follows the last sample is not used. None = at the beginning, and
            the file must not be longer than the input.

    Raises:
        InvalidArgument: If the file is no such WAV file, or has another rate, or does not fit the input.
        OSError: If the file cannot be read.
    """
    info = given if isinstance(given, TensorInfo) else only_input(given, "recording")
    count = math.prod(info.shape)
    if not count:
        raise InvalidArgument(f"a recording needs an input of known size; input {info.name!r} is {info.shape}")
    samples = _samples(path, rate)
    begin = 0 if start is None else round(start * rate)
    if not 0 <= begin <= len(samples):
        raise InvalidArgument(f"start {start:g}: {path} has {len(samples) / rate:g} s")
    if start is None and len(samples) > count:
        seconds = f"{len(samples) / rate:g} s; input {info.name!r} takes {count / rate:g} s"
        raise InvalidArgument(f"{path} has {seconds}: choose a part, as with `start` of nnfmq.read_audio")
    found = samples[begin : begin + count]
    return _converted(np.pad(found, (0, count - len(found))), info).reshape(info.shape)


def _samples(path: str | os.PathLike[str], rate: int) -> np.ndarray[Any, Any]:
    """Return the samples of a file in [-1, 1), as float64."""
    with open(path, "rb") as stream:
        try:
            with wave.open(stream) as file:
                channels, width, found = file.getnchannels(), file.getsampwidth(), file.getframerate()
                content = file.readframes(file.getnframes())
        except (wave.Error, EOFError) as error:
            raise InvalidArgument(f"{path} is not a WAV file of PCM samples: {error or 'it ends too early'}") from None
    if found != rate:
        raise InvalidArgument(f"{path} has {found} samples in a second, not {rate}: convert it, or give another `rate`")
    if width not in _WIDTHS:
        raise InvalidArgument(f"{path} has samples of {8 * width} bits; 8, 16 and 32 are read")
    values = np.frombuffer(content[: len(content) // (width * channels) * width * channels], _WIDTHS[width])
    middle = 128 if width == 1 else 0  # samples of 8 bits are unsigned
    real = (values.astype(np.float64) - middle) / 2.0 ** (8 * width - 1)
    return np.asarray(real.reshape(-1, channels).mean(axis=1))


def _converted(real: np.ndarray[Any, Any], info: TensorInfo) -> np.ndarray[Any, Any]:
    if info.dtype == "int16" and not info.scale:
        return np.round(real * 2**15).clip(-(2**15), 2**15 - 1).astype(np.int16)
    if info.dtype == "float32" or (info.scale and np.issubdtype(info.dtype, np.integer)):
        return quantized(real, info)
    raise InvalidArgument(f"a recording needs an input of float32, int16 or quantized integers; this is {info.dtype}")
