"""The emulators: they compute what the code says, and report what a real machine would not let it do."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.emulated import Call, Machine, Memory
from support.instruction_sets import initialize_all_targets
from support.library_functions import float_result
from support.qemu import Qemu

from nnfmq.engines.compiled.code_generator import compile_ir
from nnfmq.engines.compiled.target import TARGETS, Target

if TYPE_CHECKING:
    from support.bochs import Bochs

# Copies 16 bytes from args[0] + begin to args[1] + end.
_COPY = """
define void @copy(ptr %args, i64 %begin, i64 %end, ptr %scratch) {
  %source = load ptr, ptr %args, align 8
  %at = getelementptr i8, ptr %args, i64 8
  %target = load ptr, ptr %at, align 8
  %from = getelementptr i8, ptr %source, i64 %begin
  %to = getelementptr i8, ptr %target, i64 %end
  %bytes = load <16 x i8>, ptr %from, align 1
  store <16 x i8> %bytes, ptr %to, align 1
  ret void
}
"""


def unicorn(name: str = "neon") -> Machine:
    from support.arm import Arm

    return Arm(TARGETS[name])


def qemu() -> Machine:
    return Qemu(TARGETS["neon-i8mm"])


def bochs(target: Target = TARGETS["avx512"]) -> Bochs:
    from support.bochs import Bochs

    return Bochs(target)


needs_unicorn = pytest.mark.skipif(importlib.util.find_spec("unicorn") is None, reason="unicorn is not installed")
needs_bochs = pytest.mark.skipif(
    importlib.util.find_spec("bochscpu") is None, reason="bochscpu-python is not installed"
)


@pytest.fixture(autouse=True)
def _all_targets() -> None:
    initialize_all_targets()


@pytest.fixture(
    params=[
        pytest.param(unicorn, id="neon", marks=needs_unicorn),
        pytest.param(qemu, id="neon-i8mm"),
        pytest.param(bochs, id="avx512", marks=needs_bochs),
    ]
)
def emulated(request: pytest.FixtureRequest) -> Machine:
    create: Callable[[], Machine] = request.param
    return create()


def copied(machine: Machine, begin: int, end: int, to_input: bool = False) -> np.ndarray:
    memory = Memory()
    source, target = memory.add(np.arange(33, dtype=np.uint8)), memory.add(np.zeros(33, np.uint8), writable=True)
    args = memory.add(np.array([source.address, (source if to_input else target).address], np.int64))
    image = machine.load(compile_ir(_COPY, machine.target))
    machine.run(image, memory.regions, [Call(image.functions["copy"], (args.address, begin, end, 0))])
    return target.data


def test_an_emulator_returns_what_was_computed(emulated: Machine) -> None:
    expected = np.zeros(33, np.uint8)
    expected[17:] = np.arange(5, 21)
    np.testing.assert_array_equal(copied(emulated, 5, 17), expected)


@pytest.mark.parametrize(("begin", "end", "to_input"), [(18, 0, False), (0, 18, False), (0, 0, True)])
def test_an_emulator_detects_accesses_outside_of_operands(
    emulated: Machine, begin: int, end: int, to_input: bool
) -> None:
    with pytest.raises(AssertionError, match="of the function"):
        copied(emulated, begin, end, to_input)
    copied(emulated, 0, 0)  # the emulator works after an error


_SDOT = """
declare <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32>, <16 x i8>, <16 x i8>)
define <4 x i32> @dot(<4 x i32> %acc, <16 x i8> %a, <16 x i8> %b) {
  %sum = call <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32> %acc, <16 x i8> %a, <16 x i8> %b)
  ret <4 x i32> %sum
}
"""


@needs_unicorn
def test_an_emulator_of_aarch64_rejects_instructions_of_other_sets() -> None:
    target = TARGETS["neon-dotprod"]
    machine = unicorn("neon")
    image = machine.load(compile_ir(_SDOT, target))
    with pytest.raises(AssertionError, match="of the function"):
        machine.run(image, [], [Call(image.functions["dot"], ())])
    machine = unicorn(target.name)
    machine.run(image, [], [Call(image.functions["dot"], ())])


# -- functions of the C library ---------------------------------------------------------------------------------------

_LIBRARY = """
declare float @logf(float)
declare float @powf(float, float)
declare float @sinf(float)
define void @run(ptr %in, ptr %out) {
  %second = getelementptr float, ptr %in, i64 1
  %x = load float, ptr %in
  %y = load float, ptr %second
  %log = call float @logf(float %x)
  %pow = call float @powf(float %x, float %y)
  %sin = call float @sinf(float %x)
  %out1 = getelementptr float, ptr %out, i64 1
  %out2 = getelementptr float, ptr %out, i64 2
  store float %log, ptr %out
  store float %pow, ptr %out1
  store float %sin, ptr %out2
  ret void
}
"""


def run_ir(machine: Machine, text: str, memory: Memory, arguments: tuple[int, ...]) -> None:
    """Run the function `run` of an LLVM IR module."""
    image = machine.load(compile_ir(text, machine.target))
    machine.run(image, memory.regions, [Call(image.functions["run"], arguments)])


FUNCTION_MACHINES = [
    pytest.param(unicorn, id="neon", marks=needs_unicorn),
    pytest.param(bochs, id="avx512", marks=needs_bochs),
]


@pytest.mark.parametrize("create", FUNCTION_MACHINES)
@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (2.0, 0.5, (math.log(2), math.sqrt(2), math.sin(2))),
        (1e30, 2.0, (30 * math.log(10), math.inf, math.sin(float(np.float32(1e30))))),
        (0.0, -1.0, (-math.inf, math.inf, 0.0)),
        (-1.5, 3.0, (math.nan, -3.375, math.sin(-1.5))),
        (-2.0, 0.5, (math.nan, math.nan, math.sin(-2.0))),
        (math.inf, 1.0, (math.inf, math.inf, math.nan)),
    ],
)
def test_an_emulator_computes_functions_of_floats(
    create: Callable[[], Machine], x: float, y: float, expected: tuple[float, ...]
) -> None:
    memory = Memory()
    values = memory.add(np.array([x, y], np.float32))
    out = memory.add(np.zeros(3, np.float32), writable=True)
    run_ir(create(), _LIBRARY, memory, (values.address, out.address))
    np.testing.assert_allclose(out.data.view(np.float32), np.array(expected, np.float32), rtol=1e-7)


@pytest.mark.parametrize(
    ("x", "y", "expected"), [(1e38, 1e38, math.inf), (-1e38, 9.0, -math.inf), (-1e38, 8.0, math.inf)]
)
def test_a_power_that_is_too_large_is_an_infinity_of_the_right_sign(x: float, y: float, expected: float) -> None:
    bits = np.array([x, y], np.float32).view(np.uint32).tolist()
    assert np.array([float_result("powf", *bits)], np.uint32).view(np.float32)[0] == expected
