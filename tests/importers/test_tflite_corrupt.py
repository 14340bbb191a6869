"""Corrupt and truncated files: `load` returns a model or raises InvalidArgument, in bounded time and memory.

Models that load are validated, too, which may raise InvalidArgument and nothing else.
"""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tflite_cases import CASES, Case
from support.tflite_files import Operator, Tensor, everything, floats, quantized, single, writer
from support.tiers import IS_DEEP

from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers import load
from nnfmq.validation import validate_model


def constants_after_the_flatbuffer() -> bytes:
    """Return a file as LiteRT's quantizer writes them: constants of 16 bytes or more are not in the FlatBuffer."""
    weights = Tensor("w", (3, 4), data=floats(3, 4))
    tensors = [Tensor("x", (2, 4)), weights, Tensor("y", (2, 3))]
    return single("FULLY_CONNECTED", tensors, "FullyConnectedOptions", constants_follow=True)


TINY = {"everything": everything, "quantized": quantized, "constants follow": constants_after_the_flatbuffer}
REAL = (
    "mobilenet_v1_0.25_128_quant.tflite",
    "mobilenet_v2_1.0_224_quant.tflite",
    "tts_float.tflite",
    "micro/trained_lstm.tflite",
)
SEED = 7
CHANGES = (0x01, 0x80, 0xFF)  # of a byte, by exclusive or
WORDS = (0, 4, 8, 2**31 - 1, 2**31, 2**32 - 1)


def attempt(data: bytes) -> bool:
    """Load and validate; return whether both accepted it. Anything but InvalidArgument fails the test."""
    try:
        validate_model(load(data).model)
    except InvalidArgument:
        return False
    return True


def corrupted(data: bytes, rng: random.Random) -> bytes:
    """Return the file with one bit, one byte, or one aligned word changed."""
    changed = bytearray(data)
    at = rng.randrange(len(data))
    kind = rng.randrange(3)
    if kind == 0:
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        changed[at] = rng.choice((0, 1, 127, 128, 255))
    else:
        changed[at & ~3 : (at & ~3) + 4] = struct.pack("<I", rng.choice((*WORDS, len(data), len(data) - at)))
    return bytes(changed)


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
def test_the_unspoiled_files_are_accepted(make: Callable[[], bytes]) -> None:
    assert attempt(make())


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
def test_a_file_cut_at_any_byte_is_rejected(make: Callable[[], bytes]) -> None:
    data = make()
    # The writer puts nothing behind the last string's NUL and its padding: what is missing there is not needed.
    accepted = [length for length in range(len(data) - 8) if attempt(data[:length])]
    assert accepted == []


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_any_byte_may_be_wrong(make: Callable[[], bytes], number: int) -> None:
    """Each byte gets one of the changes; in the deep tier each of them."""
    data, change = make(), CHANGES[number]
    for at in range(len(data)) if IS_DEEP else range(number, len(data), len(CHANGES)):
        attempt(data[:at] + bytes([data[at] ^ change]) + data[at + 1 :])


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
def test_several_changes_at_random_places_do_no_harm(make: Callable[[], bytes]) -> None:
    data, rng = make(), random.Random(SEED)
    for _ in range(1000 if IS_DEEP else 300):
        attempt(corrupted(corrupted(data, rng), rng))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_operator_s_options_and_arguments_may_be_wrong(case: Case) -> None:
    content = case.content()
    rng = random.Random(SEED)
    assert attempt(content)
    for _ in range(40 if IS_DEEP else 15):
        attempt(corrupted(content, rng))


@pytest.mark.parametrize("name", REAL)
def test_a_corrupted_real_model_does_no_harm(data_dir: Path, name: str) -> None:
    whole = (data_dir / "models" / name).read_bytes()
    rng = random.Random(SEED)
    for _ in range(30):
        attempt(corrupted(whole, rng))


@pytest.mark.parametrize("name", REAL)
def test_a_truncated_real_model_is_rejected(data_dir: Path, name: str) -> None:
    whole = (data_dir / "models" / name).read_bytes()
    rng = random.Random(SEED)
    assert not any(attempt(whole[: rng.randrange(len(whole) - 64)]) for _ in range(30))


def test_the_message_names_the_file_and_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "cut.tflite"
    path.write_bytes(everything()[:1000])
    with pytest.raises(
        InvalidArgument, match=r"cut\.tflite: corrupt or truncated file: Model.*\(at byte \d+ of 1000\)"
    ):
        load(path)


def test_a_device_and_a_pipe_are_no_model_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tflite")  # which nobody writes to
    for path in ("/dev/zero", tmp_path / "pipe.tflite"):
        with pytest.raises(InvalidArgument, match="not a regular file"):
            load(path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent.tflite")


def test_another_schema_version_is_rejected() -> None:
    data = bytearray(everything())
    root = struct.unpack_from("<I", data)[0]
    vtable = root - struct.unpack_from("<i", data, root)[0]
    version_at = root + struct.unpack_from("<H", data, vtable + 4)[0]
    struct.pack_into("<I", data, version_at, 4)
    with pytest.raises(InvalidArgument, match="schema version 4: only 3"):
        load(bytes(data))


def test_zeros_for_a_bias_that_no_file_of_this_size_can_need_are_not_made() -> None:
    # The filter is no constant, so its extents cost the file nothing: 2**28 channels, 1 GiB of zeros.
    x = Tensor("x", (1, 1))
    tensors = [x, Tensor("w", (1 << 28, 1)), Tensor("y", (1, 1 << 28))]
    data = writer.write(tensors, [Operator("FULLY_CONNECTED", (0, 1), (2,))], (0, 1), (2,))
    tracemalloc.start()
    with pytest.raises(InvalidArgument, match="the file's size allows"):
        load(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_buffers_that_claim_the_same_bytes_cannot_multiply_the_memory() -> None:
    # 200 constants of one byte each whose buffers are then all pointed at the first one, of 100,000 bytes.
    size = 100_000
    scales = {"scales": [1.0], "zero_points": [0]}
    weights = [Tensor("w", (size,), "UINT8", bytes(size if n == 0 else 1), **scales) for n in range(200)]
    values = [Tensor("x", (size,), "UINT8", **scales) for _ in range(201)]
    operators = [Operator("MUL", (200 + n, n), (201 + n,)) for n in range(200)]
    data = bytearray(writer.write([*weights, *values], operators, (200,), (400,)))
    buffers_at = vector_at(data, 12)
    first = buffers_at + 4 * 2  # behind the count and the empty buffer
    target = first + struct.unpack_from("<I", data, first)[0]
    for n in range(200):
        struct.pack_into("<I", data, first + 4 * n, target - (first + 4 * n))
    with pytest.raises(InvalidArgument, match="the file's size allows"):
        load(bytes(data))


def vector_at(data: bytearray, slot: int) -> int:
    """Return where a vector of the root table begins (its count)."""
    root = struct.unpack_from("<I", data)[0]
    vtable = root - struct.unpack_from("<i", data, root)[0]
    field = root + struct.unpack_from("<H", data, vtable + slot)[0]
    return int(field + struct.unpack_from("<I", data, field)[0])


def test_tensors_that_share_a_buffer_share_its_copy() -> None:
    weights = bytes(4 * 1000)
    tensors = [Tensor("x", (1000,)), Tensor("w", (1000,), data=weights), Tensor("y", (1000,))]
    data = single("MUL", tensors)
    twice = writer.write(
        [*tensors[:2], Tensor("w again", (1000,), extra={"Buffer": 1}), *tensors[2:], Tensor("z", (1000,))],
        [Operator("MUL", (0, 1), (3,)), Operator("MUL", (3, 2), (4,))], (0,), (4,),
    )  # fmt: skip
    assert len(load(twice).model.operand_values) == len(load(data).model.operand_values)
