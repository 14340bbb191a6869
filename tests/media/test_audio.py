"""Recordings as model inputs: rates, widths and channels of WAV files, and what does not fit."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnfmq
from nnfmq.cli.inputs import read_inputs
from nnfmq.hal.errors import InvalidArgument

INPUT = nnfmq.TensorInfo("sound", (1, 4), "float32")


def saved(path: Path, frames: bytes, *, width: int = 2, channels: int = 1, rate: int = 16_000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(frames)
    return path


def samples(*values: int) -> bytes:
    return np.array(values, "<i2").tobytes()


@pytest.mark.parametrize(
    ("frames", "width"),
    [
        (bytes([128, 192, 64, 0]), 1),
        (samples(0, 1 << 14, -(1 << 14), -(1 << 15)), 2),
        (np.array([0, 1 << 30, -(1 << 30), -(1 << 31)], "<i4").tobytes(), 4),
    ],
)
def test_samples_of_each_width_are_between_minus_1_and_1(tmp_path: Path, frames: bytes, width: int) -> None:
    read = nnfmq.read_audio(saved(tmp_path / "a.wav", frames, width=width), INPUT)
    assert (read.dtype, read.tolist()) == (np.float32, [[0, 0.5, -0.5, -1]])


def test_channels_are_averaged_and_missing_samples_are_silence(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.wav", samples(1 << 14, 0, -(1 << 14), -(1 << 14)), channels=2)
    assert nnfmq.read_audio(path, INPUT).tolist() == [[0.25, -0.5, 0, 0]]


def test_integers_are_samples_or_quantized(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.wav", samples(1, -2, 3, 1 << 14))
    plain = nnfmq.TensorInfo("x", (4,), "int16")
    assert nnfmq.read_audio(path, plain).tolist() == [1, -2, 3, 1 << 14]
    codes = nnfmq.read_audio(path, nnfmq.TensorInfo("x", (1, 4, 1), "int8", scale=1 / 128, zero_point=5))
    assert (codes.shape, codes.dtype, codes.ravel().tolist()) == ((1, 4, 1), np.int8, [5, 5, 5, 69])


def test_a_part_of_a_long_file_is_chosen_by_its_start(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.wav", samples(*range(0, 8 << 12, 1 << 12)[:8]))
    with pytest.raises(InvalidArgument, match=r"a\.wav has 0.0005 s; input 'sound' takes 0.00025 s: choose a part"):
        nnfmq.read_audio(path, INPUT)
    assert nnfmq.read_audio(path, INPUT, start=0).tolist() == [[0, 1 / 8, 2 / 8, 3 / 8]]
    assert nnfmq.read_audio(path, INPUT, start=6 / 16_000).tolist() == [[6 / 8, 7 / 8, 0, 0]]
    with pytest.raises(InvalidArgument, match=r"start 1: .*a\.wav has 0\.0005 s"):
        nnfmq.read_audio(path, INPUT, start=1)


def test_another_rate_is_rejected_unless_it_is_that_of_the_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.wav", samples(0, 0), rate=44_100)
    with pytest.raises(InvalidArgument, match="has 44100 samples in a second, not 16000: convert it, or give another"):
        nnfmq.read_audio(path, INPUT)
    assert nnfmq.read_audio(path, INPUT, rate=44_100).shape == (1, 4)


@pytest.mark.parametrize("content", [b"", b"RIFF", b"no sound at all", b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0" + bytes(16)])
def test_a_file_that_is_no_recording_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"a\.wav is not a WAV file of PCM samples"):
        nnfmq.read_audio(tmp_path / "a.wav", INPUT)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (nnfmq.TensorInfo("x", (1, 0), "float32"), "a recording needs an input of known size"),
        (nnfmq.TensorInfo("x", (4,), "int32"), "a recording needs an input of float32, int16 or quantized integers"),
    ],
)
def test_an_input_that_takes_no_recording_is_named(tmp_path: Path, info: nnfmq.TensorInfo, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        nnfmq.read_audio(saved(tmp_path / "a.wav", samples(0)), info)


def test_widths_that_are_not_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="samples of 24 bits; 8, 16 and 32 are read"):
        nnfmq.read_audio(saved(tmp_path / "a.wav", bytes(6), width=3), INPUT)


def test_a_missing_recording_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        nnfmq.read_audio(tmp_path / "a.wav", INPUT)


def test_commands_read_recordings(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.WAV", samples(1 << 14))
    (read,) = read_inputs([path], [INPUT])
    assert read.tolist() == [[0.5, 0, 0, 0]]


def test_a_model_gives_its_only_input(tmp_path: Path) -> None:
    class Model:
        inputs: Any = (INPUT,)
        metadata = None

    path = saved(tmp_path / "a.wav", samples(1 << 14))
    assert nnfmq.read_audio(path, Model()).tolist() == [[0.5, 0, 0, 0]]
