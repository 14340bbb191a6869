"""Serialization of kernels, and the shards in which a program's kernels are compiled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
from support.compiled import outputs_of, random_inputs
from support.models import relu_model

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.kernel_compilation import (
    compile_each,
    decode_kernels,
    encode_kernels,
    kernel_types,
    shard_kernels,
    total_compile_cost,
    unique_kernels,
)
from nnfmq.engines.compiled.kernels import symbol_name
from nnfmq.engines.compiled.kernels.elementwise import ElementwiseKernel
from nnfmq.engines.compiled.kernels.float_ops import FloatUnary
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.kernels.recurrent import CellKernel, GateGemv, OutputKind, RnnCell
from nnfmq.engines.compiled.kernels.reduction import PoolKernel
from nnfmq.engines.compiled.object_code import Linker, LoadedCode
from nnfmq.engines.compiled.partition import prepare
from nnfmq.engines.compiled.target import host_target
from nnfmq.hal.errors import MissedDeadlineTransient


def kernel(length: int = 8, operator: Any = None) -> ElementwiseKernel:
    """Return a kernel that computes one row of `length` floats."""
    unary = FloatUnary("floor", -np.inf) if operator is None else operator
    return ElementwiseKernel(unary, (), ((),), length, (1,), 4, 1, length, 1, (False,))


def test_a_kernel_with_infinities_is_decoded_unchanged() -> None:
    (decoded,), target = decode_kernels(encode_kernels([kernel()], host_target()))
    assert decoded == kernel() and repr(decoded) == repr(kernel())
    assert target is host_target()


def test_enum_members_of_a_kernel_are_decoded_unchanged() -> None:
    gemv = GateGemv(1, 3, 5, 1, 8)
    cell = CellKernel(gemv, RnnCell(1), 2, (5,), (OutputKind.LAST_OUTPUT, OutputKind.ZEROS))
    (decoded,), _ = decode_kernels(encode_kernels([cell], host_target()))
    assert decoded == cell and repr(decoded) == repr(cell)


def test_every_type_of_the_kernels_has_one_name() -> None:
    assert kernel_types()["elementwise.ElementwiseKernel"] is ElementwiseKernel
    assert len(set(kernel_types().values())) == len(kernel_types())
    kinds = [kind for name, kind in kernel_types().items() if name != "WindowDimension"]
    assert all(dataclasses.is_dataclass(kind) or issubclass(kind, Enum) for kind in kinds)


@dataclass(frozen=True)
class Unknown:
    number: int


@pytest.mark.parametrize("value", [np.int64(8), np.float32(1), Unknown(1), b"bytes", [1]], ids=repr)
def test_values_that_would_be_decoded_as_another_type_are_rejected(value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        encode_kernels([kernel(operator=value)], host_target())


def test_equal_kernels_are_compiled_once() -> None:
    assert unique_kernels([kernel(8), kernel(16), kernel(8)]) == [kernel(8), kernel(16)]


def fake(kind: type[Any], number: int) -> Any:
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(made, field.name, number)
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shards_have_every_kernel_once_and_cost_about_the_same(count: int) -> None:
    kernels = [fake(kind, number) for number in range(9) for kind in (PoolKernel, GemmKernel)]
    shards = shard_kernels(kernels, count)
    assert len(shards) == count
    assert sorted(repr(each) for shard in shards for each in shard) == sorted(map(repr, kernels))
    costs = [total_compile_cost(shard) for shard in shards]
    assert max(costs) - min(costs) <= total_compile_cost([fake(GemmKernel, 0)])
    assert costs == sorted(costs, reverse=True), "a process may begin the most expensive one last"


def test_no_shard_is_empty() -> None:
    assert shard_kernels([kernel(8), kernel(16)], 5) == [[kernel(8)], [kernel(16)]]
    assert shard_kernels([], 5) == []


def test_each_kernel_has_object_code_of_its_own_and_progress_is_reported() -> None:
    progress: list[tuple[int, int]] = []
    kernels = [kernel(8), kernel(16), kernel(24)]
    codes = compile_each(kernels, host_target(), lambda done, total: progress.append((done, total)))
    assert [list(Linker([code]).functions()) for code in codes] == [[symbol_name(each)] for each in kernels]
    loaded = LoadedCode(codes)
    addresses = {loaded.address(symbol_name(each)) for each in kernels}
    assert len(addresses) == 3 and 0 not in addresses
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_the_progress_callback_may_end_the_compilation() -> None:
    def late(done: int, _total: int) -> None:
        if done:
            raise MissedDeadlineTransient("too late")

    with pytest.raises(MissedDeadlineTransient, match="too late"):
        compile_each([kernel(8), kernel(16)], host_target(), late)


def test_saved_object_code_is_used_and_nothing_is_compiled_again() -> None:
    def unexpected_compile(*_: object) -> list[bytes]:
        pytest.fail("it is compiled again")

    model = relu_model((5, 7))
    first = prepare(model)
    again = prepare(model, first.prepacked, unexpected_compile)
    inputs = random_inputs(model, 3)
    expected = outputs_of(interpreter.prepare(model), model, inputs)
    assert again.compiled_ops == {0}
    np.testing.assert_array_equal(outputs_of(again, model, inputs)[0], expected[0])
