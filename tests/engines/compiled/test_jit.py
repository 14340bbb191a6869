"""Kernels as data, and the parts into which a program's kernels are cut."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from nnfmq.engines.compiled.kernels.functions import FloatUnary
from nnfmq.engines.compiled.kernels.pooling import PoolKernel
from support.compiled import outputs_of, random_inputs
from support.models import relu_model

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.jit import (
    LoadedCode,
    compile_shards,
    host_target,
    shard_kernels,
    symbol_name,
    total_compile_cost,
    unique_kernels,
)
from nnfmq.engines.compiled.kernel_serialization import decode_kernels, encode_kernels, kernel_types
from nnfmq.engines.compiled.kernels.elementwise_kernels import ElementwiseKernel
from nnfmq.engines.compiled.kernels.gemm import GemmKernel
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.errors import MissedDeadlineTransient


def kernel(length: int = 8, function: Any = None) -> ElementwiseKernel:
    """Return one over floats in a row, of which `length` are computed."""
    unary = FloatUnary("floor", -np.inf) if function is None else function
    return ElementwiseKernel(unary, (), ((),), length, (1,), 4, 1, length, 1, (False,))


def test_a_kernel_arrives_as_it_was_with_numbers_that_are_not_finite() -> None:
    (arrived,), target = decode_kernels(encode_kernels([kernel()], host_target()))
    assert arrived == kernel() and repr(arrived) == repr(kernel())
    assert target is host_target()


def test_every_dataclass_of_the_kernels_has_one_name() -> None:
    assert kernel_types()["elementwise_kernels.ElementwiseKernel"] is ElementwiseKernel
    assert len(set(kernel_types().values())) == len(kernel_types())
    assert all(dataclasses.is_dataclass(kind) for kind in kernel_types().values())


@dataclass(frozen=True)
class Stranger:
    number: int


@pytest.mark.parametrize("value", [np.int64(8), np.float32(1), Stranger(1), b"bytes", [1]], ids=repr)
def test_what_would_come_back_as_something_else_is_not_described(value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        encode_kernels([kernel(function=value)], host_target())


def test_equal_kernels_are_compiled_once() -> None:
    assert unique_kernels([kernel(8), kernel(16), kernel(8)]) == [kernel(8), kernel(16)]


def fake(kind: type[Any], number: int) -> Any:
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(made, field.name, number)
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_have_every_kernel_once_and_cost_about_the_same(count: int) -> None:
    kernels = [fake(kind, number) for number in range(9) for kind in (PoolKernel, GemmKernel)]
    parts = shard_kernels(kernels, count)
    assert len(parts) == count
    assert sorted(repr(each) for part in parts for each in part) == sorted(map(repr, kernels))
    assert max(map(total_compile_cost, parts)) - min(map(total_compile_cost, parts)) <= total_compile_cost(
        [fake(GemmKernel, 0)]
    )


def test_there_is_no_part_without_a_kernel() -> None:
    assert shard_kernels([kernel(8), kernel(16)], 5) == [[kernel(8)], [kernel(16)]]
    assert shard_kernels([], 5) == []


def test_the_parts_object_codes_are_linked_together_and_counted() -> None:
    heard: list[tuple[int, int]] = []
    kernels = [kernel(8), kernel(16), kernel(24)]
    codes = compile_shards(shard_kernels(kernels, 2), host_target(), lambda done, total: heard.append((done, total)))
    linker = LoadedCode(codes, host_target())
    addresses = {linker.address(symbol_name(each)) for each in kernels}
    assert len(codes) == 2 and len(addresses) == 3 and 0 not in addresses
    assert heard == [(0, 3), (2, 3), (3, 3)]


def test_what_hears_may_end_the_compilation() -> None:
    def late(done: int, _total: int) -> None:
        if done:
            raise MissedDeadlineTransient("too late")

    with pytest.raises(MissedDeadlineTransient, match="too late"):
        compile_shards([[kernel(8)], [kernel(16)]], host_target(), late)


def test_saved_object_codes_are_used_and_nothing_is_compiled_again() -> None:
    def refused(*_: object) -> list[bytes]:
        pytest.fail("it is compiled again")

    model = relu_model((5, 7))
    first = prepare(model)
    again = prepare(model, first.prepacked, refused)
    inputs = random_inputs(model, 3)
    expected = outputs_of(interpreter.prepare(model), model, inputs)
    assert again.compiled_ops == {0}
    np.testing.assert_array_equal(outputs_of(again, model, inputs)[0], expected[0])
