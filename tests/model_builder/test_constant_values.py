"""Values of constants: conversion, copies and borrowed memory, and memory that lives as long as its model."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rebuilt import content

import nnfmq
from nnfmq.base.shared_constants import SharedConstants
from nnfmq.hal.types import LifeTime, Operand, OperandType, Protection
from nnfmq.model_builder.builder import value_bytes

F32, SMALL, LARGE = "TENSOR_FLOAT32", 32, 33  # elements of 4 bytes: 128 bytes, and more


def with_constants(*counts: int) -> nnfmq.ModelBuilder:
    """Return a builder of a model that packs constants of these lengths: operands 0, 1, ... of the finished model."""
    builder = nnfmq.ModelBuilder()
    constants = [builder.add_operand(F32, (count,)) for count in counts]
    axis, output = builder.add_operand("INT32"), builder.add_operand(F32, (sum(counts),))
    builder.set_operand_value(axis, 0)
    builder.add_operation("CONCATENATION", [*constants, axis], [output])
    builder.identify_inputs_and_outputs([], [output])
    return builder


@pytest.fixture
def memory() -> Iterator[nnfmq.Memory]:
    """Return a memory with the floats 0 to 63."""
    with nnfmq.Memory.create(256) as made:
        made.view[:] = np.arange(64, dtype=np.float32).tobytes()
        yield made


# -- conversion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "shape", "expected"),
    [
        (b"\x01\x02\x03\x04", "int32", (), b"\x01\x02\x03\x04"),
        (bytearray(b"\x01\x02"), "uint8", (2,), b"\x01\x02"),
        (memoryview(np.array([[1, 2]], np.float32)), "float32", (1, 2), np.array([1, 2], np.float32).tobytes()),
        (1, "int32", (), b"\x01\0\0\0"),
        (-1, "int32", (), b"\xff\xff\xff\xff"),
        (True, "bool", (), b"\x01"),
        (1, "float32", (), np.float32(1).tobytes()),
        (0.1, "float16", (), np.float16(0.1).tobytes()),
        (float("inf"), "float32", (), np.float32("inf").tobytes()),
        ([0, 255], "uint8", (2,), b"\x00\xff"),
        ([[1, 2], [3, 4]], "float32", (2, 2), np.array([1, 2, 3, 4], np.float32).tobytes()),
        ((-128, 127), "int8", (2,), b"\x80\x7f"),
        (np.array([1, 2], np.int16), "int16", (2,), b"\x01\0\x02\0"),
        (np.arange(4, dtype=np.float32).reshape(2, 2).T, "float32", (2, 2), np.array([0, 2, 1, 3], "<f4").tobytes()),
        (np.float32(2.5), "float32", (), np.float32(2.5).tobytes()),
    ],
)
def test_API_3_values_become_bytes(value: Any, dtype: str, shape: tuple[int, ...], expected: bytes) -> None:
    found = value_bytes(value, dtype, shape, "operand 0")
    assert (found.format, bytes(found)) == ("B", expected)


@pytest.mark.parametrize(
    ("value", "dtype", "shape", "message"),
    [
        (256, "uint8", (), "the value 256 is out of the range of uint8"),
        (-1, "uint8", (), "the value -1 is out of the range of uint8"),
        (2**31, "int32", (), "is out of the range of int32"),
        (2**70, "int32", (), "does not fit int32"),
        (1.0, "int32", (), "the value 1.0 does not fit int32"),
        (1, "bool", (), "the value 1 does not fit bool"),
        (True, "int32", (), "the value True does not fit int32"),
        (1e39, "float32", (), "the value 1e+39 is out of the range of float32"),
        (70000, "float16", (), "the value 70000 is out of the range of float16"),
        ("text", "float32", (), "the value 'text' does not fit float32"),
        ([1, "text"], "float32", (2,), "does not fit float32"),
        ([[1], [1, 2]], "float32", (2, 2), "has rows of different lengths"),
        ([1, 2], "float32", (3,), "an array of float32 (2,), it must be float32 (3,)"),
        ([1, 2], "float32", (2, 1), "an array of float32 (2,), it must be float32 (2, 1)"),
        (np.ones(2), "float32", (2,), "an array of float64 (2,), it must be float32 (2,)"),
        (np.ones(2, ">f4"), "float32", (2,), "an array of >f4 (2,), it must be float32 (2,)"),
        (memoryview(b"abcd")[::2], "uint8", (2,), "a memoryview that is not contiguous"),
        ([1], None, (1,), "only bytes can be its value, not [1]"),
    ],
)
def test_N_API_3_values_that_do_not_fit_are_rejected(
    value: Any, dtype: str | None, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(nnfmq.InvalidArgument) as caught:
        value_bytes(value, dtype, shape, "operand 0")
    assert message in str(caught.value)
    assert str(caught.value).startswith("operand 0: ")


# -- copies and borrowed memory ---------------------------------------------------------------------------------------


def test_API_3_a_value_of_128_bytes_is_copied_immediately() -> None:
    array = np.ones(SMALL, np.float32)
    with with_constants(SMALL) as builder:
        builder.set_operand_value(0, array)
        array[:] = 2
        builder.finish()
        operand = builder.model.main.operands[0]
        assert operand.lifetime == LifeTime.CONSTANT_COPY
        assert content(builder.model, operand) == np.ones(SMALL, np.float32).tobytes()
        assert builder.model.pools == ()


def test_API_3_a_larger_value_is_borrowed_until_the_model_is_finished() -> None:
    array = np.ones(LARGE, np.float32)
    with with_constants(LARGE) as builder:
        builder.set_operand_value(0, array)
        array[:] = 2
        builder.finish()
        array[:] = 3
        operand = builder.model.main.operands[0]
        assert operand.lifetime == LifeTime.CONSTANT_REFERENCE
        assert content(builder.model, operand) == np.full(LARGE, 2, np.float32).tobytes()


def test_API_3_large_values_share_one_pool_that_nobody_can_write_to() -> None:
    with with_constants(LARGE, SMALL, 2 * LARGE) as builder:
        for index, count in enumerate((LARGE, SMALL, 2 * LARGE)):
            builder.set_operand_value(index, np.full(count, index, np.float32))
        builder.finish()
        model = builder.model
        (pool,) = model.pools
        assert isinstance(pool, SharedConstants)
        assert (pool.protection, repr(pool)) == (Protection.READ, f"<SharedConstants: {12 * LARGE} bytes>")
        for index, count in enumerate((LARGE, SMALL, 2 * LARGE)):
            assert content(model, model.main.operands[index]) == np.full(count, index, np.float32).tobytes()
        with pytest.raises(PermissionError):
            os.pwrite(pool.fileno(), b"x", 0)
        assert pool.view.readonly


def test_API_3_the_last_value_of_an_operand_counts(memory: nnfmq.Memory) -> None:
    with with_constants(LARGE, LARGE) as builder:
        builder.set_operand_value(0, np.zeros(LARGE, np.float32))
        builder.set_operand_value_from_memory(0, memory, 4)
        builder.set_operand_value_from_memory(1, memory)
        builder.set_operand_value(1, np.full(LARGE, 7, np.float32))
        builder.finish()
        model = builder.model
        assert content(model, model.main.operands[0]) == np.arange(1, LARGE + 1, dtype=np.float32).tobytes()
        assert content(model, model.main.operands[1]) == np.full(LARGE, 7, np.float32).tobytes()


def test_API_3_a_value_that_was_replaced_by_None_is_not_kept() -> None:
    with nnfmq.ModelBuilder() as builder:
        builder.add_operand(F32, (LARGE,))
        builder.set_operand_value(0, np.zeros(LARGE, np.float32))
        builder.set_operand_value(0, None)
        assert builder._values.join_large() == {}


def test_API_3_finish_can_be_called_again_when_memory_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise nnfmq.ResourceExhaustedTransient("no memory")

    with with_constants(LARGE) as builder:
        builder.set_operand_value(0, np.ones(LARGE, np.float32))
        with monkeypatch.context() as patch:
            patch.setattr(nnfmq.Memory, "create_constant", fail)
            with pytest.raises(nnfmq.ResourceExhaustedTransient):
                builder.finish()
        builder.finish()
        assert content(builder.model, builder.model.main.operands[0]) == np.ones(LARGE, np.float32).tobytes()


# -- shared memory ----------------------------------------------------------------------------------------------------


def test_API_3_API_10_a_memory_may_be_closed_while_a_model_refers_to_it(memory: nnfmq.Memory) -> None:
    with with_constants(4, 8) as builder:
        builder.set_operand_value_from_memory(0, memory, 16, 16)
        builder.set_operand_value_from_memory(1, memory, 32)
        memory.close()
        builder.finish()
        model = builder.model
    assert len(model.pools) == 1
    assert content(model, model.main.operands[0]) == np.arange(4, 8, dtype=np.float32).tobytes()
    assert content(model, model.main.operands[1]) == np.arange(8, 16, dtype=np.float32).tobytes()


def test_API_3_each_memory_is_a_pool_of_the_model(memory: nnfmq.Memory) -> None:
    with with_constants(4, 4, 4) as builder, nnfmq.Memory.create(16) as other:
        other.view[:] = np.full(4, -1, np.float32).tobytes()
        for index, source in enumerate((memory, other, memory)):
            builder.set_operand_value_from_memory(index, source)
        builder.finish()
        model = builder.model
    assert [pool.size_bytes for pool in model.pools] == [256, 16]
    contents = [content(model, operand) for operand in model.main.operands[:3]]
    assert contents == [np.array(values, np.float32).tobytes() for values in ([0, 1, 2, 3], [-1] * 4, [0, 1, 2, 3])]


def test_API_16_the_memory_is_freed_with_the_last_model(memory: nnfmq.Memory) -> None:
    with with_constants(4, LARGE) as builder:
        builder.set_operand_value_from_memory(0, memory)
        builder.set_operand_value(1, np.zeros(LARGE, np.float32))
        builder.finish()
        model = builder.model
    fds = [pool.fileno() for pool in model.pools]  # type: ignore[attr-defined]  # they are SharedConstants
    assert len({os.fstat(fd).st_ino for fd in fds}) == 2
    del model, builder
    gc.collect()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_API_3_a_value_can_be_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8) + np.arange(4, dtype=np.float32).tobytes())
    with path.open("rb") as file, nnfmq.FileMemory.from_fd(file.fileno(), 24) as memory:
        with with_constants(4) as builder:
            builder.set_operand_value_from_memory(0, memory, 8)
            memory.close()
            builder.finish()
            model = builder.model
        assert content(model, model.main.operands[0]) == np.arange(4, dtype=np.float32).tobytes()


@pytest.mark.parametrize(
    ("offset", "length", "message"),
    [
        (0, 15, "15 bytes given, 16 are required"),
        (0, 17, "17 bytes given, 16 are required"),
        (0, None, ""),
        (240, 16, ""),
        (241, 16, "16 bytes at offset 241, the memory has 256"),
        (256, 16, "16 bytes at offset 256, the memory has 256"),
        (257, None, "16 bytes at offset 257, the memory has 256"),
        (-1, 16, "16 bytes at offset -1, the memory has 256"),
        (None, 16, "offset: an integer is required, not None"),
        (0, "16", "length: an integer is required, not '16'"),
    ],
)
def test_N_API_4_a_value_must_be_inside_its_memory(
    memory: nnfmq.Memory, offset: Any, length: Any, message: str
) -> None:
    with with_constants(4) as builder:
        if not message:
            builder.set_operand_value_from_memory(0, memory, offset, length)
            return
        with pytest.raises(nnfmq.InvalidArgument) as caught:
            builder.set_operand_value_from_memory(0, memory, offset, length)
        assert message in str(caught.value)


@pytest.mark.parametrize("length", [None, 5])
def test_N_API_4_of_an_unknown_extension_the_length_is_the_callers(memory: nnfmq.Memory, length: int | None) -> None:
    with nnfmq.ModelBuilder() as builder:
        index = builder.add_operand(builder.get_extension_operand_type("com.example.name", 0), (2,))
        builder.set_operand_value_from_memory(index, memory, 200, length)
        assert builder._operands[index].location.length == (length or 56)
        with pytest.raises(nnfmq.InvalidArgument, match="-1 bytes at offset 257"):
            builder.set_operand_value_from_memory(index, memory, 257)


@pytest.mark.parametrize("memory", [None, b"bytes", bytearray(16), object()])
def test_N_API_4_only_shared_memory_can_contain_a_value(memory: Any) -> None:
    with with_constants(4) as builder, pytest.raises(nnfmq.InvalidArgument, match=r"or nnfmq\.FileMemory is required"):
        builder.set_operand_value_from_memory(0, memory)


def test_N_API_4_closed_and_unreadable_memories_are_rejected(memory: nnfmq.Memory) -> None:
    with with_constants(4) as builder:
        memory.is_readable = False
        with pytest.raises(nnfmq.InvalidArgument, match="may not be read"):
            builder.set_operand_value_from_memory(0, memory)
        memory.is_readable = True
        memory.close()
        with pytest.raises(nnfmq.InvalidArgument, match="closed"):
            builder.set_operand_value_from_memory(0, memory)
        assert builder._operands[0] == Operand(OperandType.TENSOR_FLOAT32, (4,))


def test_N_API_4_a_value_needs_known_dimensions(memory: nnfmq.Memory) -> None:
    with nnfmq.ModelBuilder() as builder:
        builder.add_operand(F32, (0, 2))
        with pytest.raises(nnfmq.InvalidArgument, match="a value needs known dimensions"):
            builder.set_operand_value_from_memory(0, memory)
