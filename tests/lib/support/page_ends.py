"""Runs kernels over inputs that end, or begin, where their mapping does: `python page_ends.py [beyond]`.

A kernel that reads or writes one byte beside its input ends this process by SIGSEGV. `beyond` does so on purpose, which
shows that the pages around the inputs do their part. Otherwise the number of models that ran is printed.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator

import numpy as np

from nnfmq.engines.compiled.program import prepare
from nnfmq.hal.types import Model, Operand, OperandType, OperationType
from nnfmq.operations.signature import Array
from support.compiled import outputs_of, random_inputs
from support.small_models import one_operation, vector

F32, Q8, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_INT32
SAME, PAGE, _NOBODY = 1, mmap.PAGESIZE, 0  # PROT_NONE
_KEPT: list[mmap.mmap] = []


def beside_nothing(array: Array, at_end: bool) -> Array:
    """Return a copy of an array that ends where its mapping does, or begins there; it stays mapped."""
    pages = -(-array.nbytes // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    _KEPT.append(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = PAGE + (pages * PAGE - array.nbytes if at_end else 0)
    copy = np.frombuffer(memory, array.dtype, array.size, first).reshape(array.shape)
    copy[...] = array
    for outside in (base, base + (pages + 1) * PAGE):
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(outside), PAGE, _NOBODY):
            raise OSError(ctypes.get_errno(), "mprotect")
    return copy


def tensor(type: OperandType, *shape: int) -> Operand:
    """Return an operand, of scale 0.5 if it holds codes."""
    return Operand(type, shape) if type == F32 else Operand(type, shape, 0.5, 100)


def weights(type: OperandType, shape: tuple[int, ...], channels: int) -> list[tuple[Operand, bytes]]:
    """Return a filter and a bias."""
    random = np.random.default_rng(0)
    if type == F32:
        bias = Operand(F32, (channels,)), bytes(4 * channels)
        return [(Operand(F32, shape), random.normal(size=shape).astype("<f4").tobytes()), bias]
    codes = random.integers(0, 256, shape).astype("u1").tobytes()
    return [(Operand(type, shape, 0.0625, 120), codes), (Operand(I32, (channels,), 0.03125), bytes(4 * channels))]


def matrix(*rows: tuple[int, int]) -> tuple[Operand, bytes]:
    """Return paddings."""
    return Operand(I32, (len(rows), 2)), np.array(rows, "<i4").tobytes()


def models(type: OperandType) -> Iterator[Model]:
    """Yield models of one operation each, whose extents are no multiples of vectors."""
    code = OperationType

    def image(*shape: int) -> Operand:
        return tensor(type, *shape)

    for shape in ((37, 21), (5, 6), (3, 333), (333, 3), (2, 77), (1, 19)):
        yield one_operation(code.TRANSPOSE, [image(*shape), None], image(*shape[::-1]))
    yield one_operation(code.CHANNEL_SHUFFLE, [image(2, 3, 34), 2, 2], image(2, 3, 34))
    yield one_operation(code.CONCATENATION, [image(5, 7), image(5, 3), image(5, 19), 1], image(5, 29))
    yield one_operation(code.PAD, [image(3, 7, 5), matrix((0, 1), (2, 0), (1, 1))], image(4, 9, 7))
    yield one_operation(code.SLICE, [image(9, 33), vector([1, 30]), vector([8, 3])], image(8, 3))
    yield one_operation(code.REVERSE, [image(9, 33), vector([1])], image(9, 33))
    yield one_operation(code.GATHER, [image(9, 33), 0, vector([8, 0, 8])], image(3, 33))
    blocks = [vector([2, 2]), matrix((1, 0), (0, 1))]
    yield one_operation(code.SPACE_TO_BATCH_ND, [image(1, 3, 5, 3), *blocks], image(4, 2, 3, 3))
    for channels in (1, 3, 13):
        source = image(1, 7, 5, channels)
        for resize in (code.RESIZE_BILINEAR, code.RESIZE_NEAREST_NEIGHBOR):
            yield one_operation(resize, [source, 9, 10, False], image(1, 10, 9, channels))
        for filter in ((1, 1), (3, 3)):
            constants = weights(type, (9, *filter, channels), 9)
            yield one_operation(code.CONV_2D, [source, *constants, SAME, 1, 1, 0], image(1, 7, 5, 9))
        for multiplier in (1, 3):
            filters = channels * multiplier
            constants = weights(type, (1, 3, 3, filters), filters)
            arguments = [source, *constants, SAME, 1, 1, multiplier, 0]
            yield one_operation(code.DEPTHWISE_CONV_2D, arguments, image(1, 7, 5, filters))
        constants = weights(type, (9, 3, 3, channels), 9)
        arguments = [source, *constants, 0, 0, 0, 0, 2, 2, 0, False]
        yield one_operation(code.TRANSPOSE_CONV_2D, arguments, image(1, 15, 11, 9))
    constants = weights(type, (6, 3, 3, 5), 6)
    arguments = [image(1, 7, 5, 10), *constants, SAME, 1, 1, 2, 0, False]
    yield one_operation(code.GROUPED_CONV_2D, arguments, image(1, 7, 5, 6))
    if type == F32:
        arguments = [image(2, 5, 7), image(2, 7, 11), False, False]
        yield one_operation(code.BATCH_MATMUL, arguments, image(2, 5, 11))


def main() -> None:
    """Run all models twice, or read beyond an input."""
    if sys.argv[1:] == ["beyond"]:
        array = beside_nothing(np.zeros(100, np.uint8), at_end=True)
        print(ctypes.string_at(array.ctypes.data, 101))
    count = 0
    for type in (F32, Q8):
        for model in models(type):
            program = prepare(model)
            assert program.generated, model.main.operations
            for at_end in (True, False):
                inputs = [beside_nothing(array, at_end) for array in random_inputs(model, 0)]
                outputs_of(program, model, inputs)
            count += 1
    print(count)


if __name__ == "__main__":
    main()
