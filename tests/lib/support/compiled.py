"""One operation through the compiling engine and through the interpreter, on the same random arguments.

Codes must be equal bit by bit; floats within 1e-5, relative and absolute (sums are in another order). Floats of another
instruction set must have the bits of this machine's. The test fails, too, where no kernel computed the operation:
comparing the interpreter with itself would show nothing. Inputs end where memory does, as those of a client may, and so
do constants, in all runs but the first one: a kernel that reads further ends the process. So do outputs, which kernels
write directly in the second run of a bound program.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from unittest.mock import patch

import numpy as np

from nnfmq.engines import interpreter
from nnfmq.engines.compiled import artifact, partition
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.kernel_compilation import (
    Meanwhile,
    compile_in_process,
    decode_kernels,
    encode_kernels,
    unique_kernels,
)
from nnfmq.engines.compiled.kernels import Kernel, symbol_name
from nnfmq.engines.compiled.object_code import LoadedCode
from nnfmq.engines.compiled.partition import prepare
from nnfmq.engines.compiled.target import TARGETS, Target, host_target
from nnfmq.engines.program import Partition, Program
from nnfmq.hal.types import Model, Operand, is_scalar
from nnfmq.operations.declaration import NUMPY_TYPES, Array
from nnfmq.validation import validate_model

FLOAT_TOLERANCE = 1e-5
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def random_inputs(model: Model, seed: int) -> list[Array]:
    """Return an array for each input of a model whose input shapes are known."""
    random = np.random.default_rng(seed)
    return [_random(random, model.main.operands[index]) for index in model.main.input_indexes]


def _random(random: np.random.Generator, operand: Operand) -> Array:
    dtype, shape = NUMPY_TYPES[operand.type], operand.dimensions
    if dtype.kind == "f":
        floats: Array = random.normal(size=shape).astype(dtype)
        return floats
    info = np.iinfo(dtype)
    low, high = (info.min, info.max) if dtype.itemsize == 1 else (-1000, 1000)
    numbers: Array = random.integers(low, high, size=shape, endpoint=True).astype(dtype)
    return numbers


def before_a_guard(array: Array) -> Array:
    """Return a copy of an array that ends at a page which nobody may read."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    if _libc.mprotect(ctypes.c_void_p(guard), page, _PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    copied = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copied[...] = array
    return copied


def with_guarded_constants(program: Program, model: Model) -> Program:
    """Return the program again, of what a cache would have of it, over constants that end at such a page."""
    plan, constants, *code = program.prepacked[0]
    return prepare(model, [(plan, before_a_guard(constants) if constants.size else constants, *code)])


def outputs_of(program: Program, model: Model, inputs: Sequence[Array]) -> list[Array]:
    """Execute once and return the outputs."""
    operands = [model.main.operands[index] for index in model.main.output_indexes]
    outputs = [np.empty(() if is_scalar(o.type) else o.dimensions, NUMPY_TYPES[o.type]) for o in operands]
    program.execute(inputs, outputs)
    return outputs


def outputs_of_two_runs(program: Program, model: Model, inputs: Sequence[Array]) -> list[Array]:
    """Return the outputs of a bound program's second run, whose bytes must be those of the first one.

    They end at a page that nobody may access: a kernel that writes further ends the process. A program without direct
    outputs, as in an emulator, runs once.
    """
    operands = [model.main.operands[index] for index in model.main.output_indexes]
    shapes = [() if is_scalar(operand.type) else operand.dimensions for operand in operands]
    outputs = [before_a_guard(np.empty(s, NUMPY_TYPES[o.type])) for s, o in zip(shapes, operands, strict=True)]
    execution = program.bind(inputs, outputs)
    with np.errstate(all="ignore"):
        execution.run()
        if any(isinstance(step.function, Partition) and step.function.direct_outputs for step in program.steps):
            expected = [output.tobytes() for output in outputs]
            for output in outputs:
                output.reshape(-1).view(np.uint8)[:] = 0xFF
            execution.run()
            assert [output.tobytes() for output in outputs] == expected
    return outputs


def compile_described(kernels: Sequence[Kernel], target: Target, meanwhile: Meanwhile) -> list[bytes]:
    """Compile what is left of kernels after they travelled to a compile process: the same."""
    with patch.dict(TARGETS, {target.name: target}):  # some are of tests alone
        arrived, same = decode_kernels(encode_kernels(unique_kernels(kernels), target))
    assert arrived == unique_kernels(kernels) and same is target
    assert [symbol_name(kernel) for kernel in arrived] == [symbol_name(kernel) for kernel in unique_kernels(kernels)]
    return compile_in_process(arrived, same, meanwhile)


def assert_kernels_agree(model: Model, seed: int = 0, runs: int = 2, tolerance: float = FLOAT_TOLERANCE) -> None:
    """Compare both engines on random inputs, and require that kernels computed every operation of the model."""
    validate_model(model)
    assert_kernels_agree_on(model, [random_inputs(model, seed + run) for run in range(runs)], tolerance)


def assert_kernels_agree_on(
    model: Model, arguments: Sequence[Sequence[Array]], tolerance: float = FLOAT_TOLERANCE
) -> None:
    """Compare both engines on each of the `arguments`, as `assert_kernels_agree`."""
    compiled, reference = prepare(model, compile=compile_described), interpreter.prepare(model)
    assert compiled.compiled_ops == frozenset(range(len(model.main.operations)))
    guarded = with_guarded_constants(compiled, model)
    for run, arrays in enumerate(arguments):
        program = guarded if run else compiled
        inputs = [before_a_guard(array) for array in arrays]
        pairs = zip(outputs_of_two_runs(program, model, inputs), outputs_of(reference, model, inputs), strict=True)
        for found, expected in pairs:
            if expected.dtype.kind in "fc":
                np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
            else:
                np.testing.assert_array_equal(found, expected)
    has_floats = any(array.dtype.kind in "fc" for array in outputs_of(reference, model, arguments[0]))
    in_use = partition.host_target()  # type: ignore[attr-defined]  # which the test may have replaced
    if has_floats and in_use not in (host_target(), TARGETS["sse4.1"]):
        assert_bits_of_this_machine(compiled, model, arguments)


def assert_bits_of_this_machine(program: Program, model: Model, arguments: Sequence[Sequence[Array]]) -> None:
    """Require of a program for another instruction set the bits that this machine's best one computes; NaN is NaN."""
    found = [outputs_of(program, model, arrays) for arrays in arguments]
    with natively():
        own = prepare(model)
        expected = [outputs_of(own, model, arrays) for arrays in arguments]
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        assert bits(one) == bits(other)


def bits(array: Array) -> bytes:
    """Return the bytes of an array; all NaN are the same one, because CPUs make different ones."""
    return np.where(np.isnan(array), np.nan, array).astype(array.dtype).tobytes()


@contextmanager
def natively() -> Iterator[None]:
    """Prepare and run models on this machine meanwhile, although the test uses an emulator or another set."""
    with (
        patch.object(partition, "host_target", host_target),
        patch.object(artifact, "LoadedCode", LoadedCode),
        patch.object(artifact, "CompiledPartition", CompiledPartition),
    ):
        yield
