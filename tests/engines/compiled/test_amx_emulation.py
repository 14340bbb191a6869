"""The instructions of AMX in the emulator and, if it has them, on this machine's CPU."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from signal import SIGILL, SIGSEGV
from typing import Any

import numpy as np
import pytest
from support.emulated import CODE, Call, Memory, Region
from support.instruction_sets import initialize_all_targets
from support.linked import Image
from support.native_calls import run_natively

from nnfmq.engines.compiled.code_generator import compile_ir
from nnfmq.engines.compiled.target import TARGETS, host_features

bochs = pytest.importorskip("support.bochs", reason="bochscpu-python is not installed")

AMX = TARGETS["amx"]
Runner = Callable[[bytes, Sequence[Any]], None]

_DECLARATIONS = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.sttilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tileloaddt164(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tdpbssd(i8, i8, i8)
declare void @llvm.x86.tdpbsud(i8, i8, i8)
declare void @llvm.x86.tdpbusd(i8, i8, i8)
declare void @llvm.x86.tdpbuud(i8, i8, i8)
"""


def compiled(body: str, parameters: str, constants: str = "") -> bytes:
    """Return the object code of a function `run` of these intrinsics, each in a line without `call void @llvm.x86.`."""
    initialize_all_targets()
    lines = "\n".join(f"  call void @llvm.x86.{line.strip()}" for line in body.strip().splitlines())
    return compile_ir(f"{_DECLARATIONS}{constants}\ndefine void @run({parameters}) {{\n{lines}\n  ret void\n}}\n", AMX)


def emulated(object_code: bytes, arguments: Sequence[Any]) -> None:
    machine, memory = bochs.Bochs(AMX), Memory()
    image = machine.load(object_code)
    regions = {
        index: memory.add(argument, writable=True)
        for index, argument in enumerate(arguments)
        if isinstance(argument, np.ndarray)
    }
    values = [regions[index].address if index in regions else int(value) for index, value in enumerate(arguments)]
    machine.run(image, memory.regions, [Call(image.functions["run"], tuple(values))])
    for index, region in regions.items():
        arguments[index][...] = region.data.view(arguments[index].dtype).reshape(arguments[index].shape)


def native(object_code: bytes, arguments: Sequence[Any]) -> None:
    run_natively(object_code, "run", arguments)


@pytest.fixture(
    params=[
        emulated,
        pytest.param(
            native,
            marks=pytest.mark.skipif(not host_features().issuperset(AMX.features), reason="no CPU with AMX"),
        ),
    ],
    ids=lambda runner: runner.__name__,
)
def run(request: pytest.FixtureRequest) -> Runner:
    runner: Runner = request.param
    return runner


def configuration(shapes: Sequence[tuple[int, int]], palette: int = 1) -> np.ndarray:
    """Return the memory operand of LDTILECFG. Shapes are rows, and bytes in a row."""
    rows, row_bytes = zip(*shapes, *[(0, 0)] * (16 - len(shapes)), strict=True)
    return np.frombuffer(struct.pack("<B15x16H16B", palette, *row_bytes, *rows), np.uint8).copy()


_MULTIPLY = """
ldtilecfg(ptr %config)
tileloadd64(i8 0, ptr %sums, i64 %stride)
tileloadd64(i8 5, ptr %lhs, i64 %lhs_stride)
tileloaddt164(i8 7, ptr %rhs, i64 %stride)
{kind}(i8 0, i8 5, i8 7)
tilestored64(i8 0, ptr %sums, i64 %stride)
tilerelease()
"""
_MULTIPLY_PARAMETERS = "ptr %config, ptr %sums, ptr %lhs, ptr %rhs, i64 %lhs_stride, i64 %stride"


@pytest.mark.parametrize(
    ("kind", "lhs_type", "rhs_type"),
    [
        ("tdpbusd", np.uint8, np.int8),
        ("tdpbssd", np.int8, np.int8),
        ("tdpbsud", np.int8, np.uint8),
        ("tdpbuud", np.uint8, np.uint8),
    ],
)
@pytest.mark.parametrize(("rows", "k", "columns"), [(16, 64, 16), (5, 12, 3), (1, 4, 16)])
def test_products_of_bytes_are_added(
    run: Runner, kind: str, lhs_type: type, rhs_type: type, rows: int, k: int, columns: int
) -> None:
    """Rows of the inputs are farther apart than they are long; what is between them stays as it was."""
    random = np.random.default_rng(rows)
    lhs, rhs = (
        random.integers(np.iinfo(kind_).min, np.iinfo(kind_).max + 1, shape).astype(kind_)
        for kind_, shape in ((lhs_type, (rows, k)), (rhs_type, (k, columns)))
    )
    lhs[0], rhs[:, 0] = np.iinfo(lhs_type).min or 255, np.iinfo(rhs_type).min or 255  # the largest products
    sums = random.integers(-(2**31), 2**31, (rows, columns)).astype(np.int32)
    sums[0, 0] = 2**31 - 1  # sums are modulo 2**32
    expected = sums + lhs.astype(np.int32) @ rhs.astype(np.int32)
    stride, lhs_stride = 4 * columns + 8, k + 20
    memory, between = rows_apart(sums.view(np.uint8), stride)
    arguments = [
        configuration([(rows, 4 * columns), *[(0, 0)] * 4, (rows, k), (0, 0), (k // 4, 4 * columns)]),
        memory,
        rows_apart(lhs.view(np.uint8), lhs_stride)[0],
        rows_apart(rhs.view(np.uint8).reshape(k // 4, 4, columns).swapaxes(1, 2).reshape(k // 4, -1), stride)[0],
        lhs_stride,
        stride,
    ]
    run(compiled(_MULTIPLY.format(kind=kind), _MULTIPLY_PARAMETERS), arguments)
    np.testing.assert_array_equal(memory[~between].view(np.int32).reshape(rows, columns), expected)
    assert (memory[between] == 0xEE).all()


def rows_apart(rows: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of rows `stride` bytes apart, without any after the last, and which of them are between rows."""
    wide = np.full((rows.shape[0], stride), 0xEE, np.uint8)
    wide[:, : rows.shape[1]] = rows
    between = np.full(wide.shape, True)
    between[:, : rows.shape[1]] = False
    size = wide.size - stride + rows.shape[1]
    return wide.reshape(-1)[:size].copy(), between.reshape(-1)[:size].copy()


def test_a_tile_is_zero_after_it_is_configured_and_after_tilezero(run: Runner) -> None:
    ones, first, second = np.ones((2, 64), np.uint8), np.ones((2, 64), np.uint8), np.ones((2, 64), np.uint8)
    code = compiled(
        """
        ldtilecfg(ptr %config)
        tilestored64(i8 3, ptr %first, i64 64)
        tileloadd64(i8 3, ptr %ones, i64 64)
        tilezero(i8 3)
        tilestored64(i8 3, ptr %second, i64 64)
        """,
        "ptr %config, ptr %ones, ptr %first, ptr %second",
    )
    run(code, [configuration([(0, 0)] * 3 + [(2, 64)]), ones, first, second])
    assert not first.any() and not second.any() and ones.all()


def test_a_new_configuration_deletes_the_tiles(run: Runner) -> None:
    """So does TILERELEASE, after which there is no configuration."""
    out, first, second = np.ones((4, 64), np.uint8), np.ones(64, np.uint8), np.ones(64, np.uint8)
    code = compiled(
        """
        ldtilecfg(ptr %small)
        sttilecfg(ptr %first)
        tileloadd64(i8 0, ptr %in, i64 64)
        ldtilecfg(ptr %large)
        tilestored64(i8 0, ptr %out, i64 64)
        tilerelease()
        sttilecfg(ptr %second)
        """,
        "ptr %small, ptr %large, ptr %in, ptr %out, ptr %first, ptr %second",
    )
    small = configuration([(1, 4)])
    run(code, [small, configuration([(4, 64)]), np.ones((1, 64), np.uint8), out, first, second])
    assert not out.any()
    np.testing.assert_array_equal(first, small)
    assert not second.any()


def test_operands_are_addressed_in_every_way(run: Runner) -> None:
    """Relative to the instruction, with a displacement of one byte and four bytes, and with r8 to r15."""
    text = "".join(f"\\{byte:02x}" for byte in configuration([(1, 8), (2, 8)]))
    values, out = np.arange(1000, dtype=np.uint8), np.zeros((2, 8), np.uint8)
    code = compiled_text(
        f"""
        @config = private constant [64 x i8] c"{text}"
        define void @run(i64 %a, i64 %b, i64 %c, ptr %values, ptr %out, i64 %stride) {{
          call void @llvm.x86.ldtilecfg(ptr @config)
          %near = getelementptr i8, ptr %values, i64 16
          call void @llvm.x86.tileloadd64(i8 0, ptr %near, i64 %stride)
          %far = getelementptr i8, ptr %values, i64 500
          call void @llvm.x86.tileloadd64(i8 1, ptr %far, i64 %stride)
          call void @llvm.x86.tilestored64(i8 1, ptr %out, i64 8)
          call void @llvm.x86.tilestored64(i8 0, ptr %out, i64 8)
          ret void
        }}
        """
    )
    run(code, [0, 0, 0, values, out, 40])
    np.testing.assert_array_equal(out, [values[16:24], values[540:548]])


def compiled_text(text: str) -> bytes:
    initialize_all_targets()
    return compile_ir(_DECLARATIONS + text, AMX)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "shapes", "message", "signal"),
    [
        ("tilezero(i8 0)", [(16, 64)], "tilezero: invalid: tile 0 is not configured at 0x0 of", SIGILL),
        ("ldtilecfg(ptr %config)\ntilezero(i8 1)", [(1, 4)], "tilezero: invalid: tile 1 is not configured", SIGILL),
        ("ldtilecfg(ptr %config)\ntilerelease()\ntilezero(i8 0)", [(1, 4)], "tile 0 is not configured", SIGILL),
        ("ldtilecfg(ptr %config)\ntdpbusd(i8 0, i8 1, i8 1)", [(1, 4)] * 2, "a tile is two operands", SIGILL),
        ("ldtilecfg(ptr %config)\ntdpbusd(i8 0, i8 1, i8 2)", [(1, 4), (2, 4), (1, 4)], "1 x 4, 2 x 4 and 1", SIGILL),
        ("ldtilecfg(ptr %config)\ntdpbusd(i8 0, i8 1, i8 2)", [(1, 4), (1, 8), (1, 4)], "1 x 4, 1 x 8 and 1", SIGILL),
        ("ldtilecfg(ptr %config)\ntdpbusd(i8 0, i8 1, i8 2)", [(1, 4), (1, 4), (1, 8)], "and 1 x 8 bytes", SIGILL),
        ("ldtilecfg(ptr %config)\ntdpbusd(i8 0, i8 1, i8 2)", [(1, 6), (1, 4), (1, 6)], "tiles of 1 x 6", SIGILL),
        ("ldtilecfg(ptr %config)\ntdpbusd(i8 0, i8 1, i8 2)", [(1, 4), (1, 6), (1, 4)], "1 x 6 and", SIGILL),
        ("ldtilecfg(ptr %config)", [(17, 4)], "ldtilecfg: general protection: shape", SIGSEGV),
        ("ldtilecfg(ptr %config)", [(16, 68)], "ldtilecfg: general protection: shape", SIGSEGV),
        ("ldtilecfg(ptr %config)", [(16, 0)], "ldtilecfg: general protection: shape", SIGSEGV),
        ("ldtilecfg(ptr %config)", [(0, 4)], "ldtilecfg: general protection: shape", SIGSEGV),
        ("ldtilecfg(ptr %config)", [(1, 4)] * 9, "reserved bytes", SIGSEGV),
    ],
)
def test_what_a_cpu_rejects_is_an_error(
    run: Runner, body: str, shapes: list[tuple[int, int]], message: str, signal: int
) -> None:
    expected = message if run is emulated else f"signal {int(signal)}"
    with pytest.raises(AssertionError, match=expected):
        run(compiled(body, "ptr %config"), [configuration(shapes)])


@pytest.mark.parametrize(("offset", "value"), [(0, 2), (2, 1), (15, 1)])
def test_reserved_bytes_of_a_configuration_are_an_error(run: Runner, offset: int, value: int) -> None:
    config = configuration([(1, 4)])
    config[offset] = value
    expected = "ldtilecfg: general protection: palette" if run is emulated else f"signal {int(SIGSEGV)}"
    with pytest.raises(AssertionError, match=expected):
        run(compiled("ldtilecfg(ptr %config)", "ptr %config"), [config])


def test_palette_0_releases_the_tiles_whatever_else_is_in_the_configuration(run: Runner) -> None:
    config, released = configuration([(1, 4)]), configuration([(16, 64)], palette=0)
    out = np.ones(64, np.uint8)
    code = compiled(
        "ldtilecfg(ptr %config)\nldtilecfg(ptr %released)\nsttilecfg(ptr %out)", "ptr %config, ptr %released, ptr %out"
    )
    run(code, [config, released, out])
    assert not out.any()


@pytest.mark.parametrize(
    ("operation", "rows", "stride", "message"),
    [
        ("tileloadd64", 3, 64, "tileloadd: read of 16 bytes at {0:#x}, outside of operands"),
        ("tileloadd64", 2, 65, "tileloadd: read of 16 bytes at {1:#x}, outside of operands"),
        ("tilestored64", 3, 64, "tilestored: write of 16 bytes at {0:#x}, outside of operands"),
    ],
)
def test_a_row_outside_of_operands_is_an_error(operation: str, rows: int, stride: int, message: str) -> None:
    machine, memory = bochs.Bochs(AMX), Memory()
    config = memory.add(configuration([(rows, 16)]))
    values = memory.add(np.zeros(80, np.uint8), writable=True)
    code = compiled(f"ldtilecfg(ptr %config)\n{operation}(i8 0, ptr %values, i64 {stride})", "ptr %config, ptr %values")
    image = machine.load(code)
    expected = message.format(values.address + 128, values.address + 65)
    with pytest.raises(AssertionError, match=f"^{expected} at 0x[0-9a-f]+ of the function"):
        machine.run(image, memory.regions, [Call(image.functions["run"], (config.address, values.address))])


def test_a_tile_is_not_stored_in_read_only_memory() -> None:
    machine, memory = bochs.Bochs(AMX), Memory()
    config, values = memory.add(configuration([(1, 16)])), memory.add(np.ones(16, np.uint8))
    code = compiled("ldtilecfg(ptr %config)\ntilestored64(i8 0, ptr %values, i64 16)", "ptr %config, ptr %values")
    image = machine.load(code)
    with pytest.raises(AssertionError, match="tilestored: write of 16 bytes"):
        machine.run(image, memory.regions, [Call(image.functions["run"], (config.address, values.address))])
    assert values.data.all()


# -- encodings that LLVM does not choose ------------------------------------------------------------------------------

_LDTILECFG_RDI = "c4e27849 07"
_TILESTORED_TMM0_RDX_RCX = "c4e27a4b 04 0a"


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ("c4e27b4b 04 26", [0, 0]),  # tileloadd tmm0, [rsi]: without an index each row is the same
        ("c4e27b4b 04 4e", [0, 32]),  # tileloadd tmm0, [rsi + 2 * rcx]
        ("c4e27b4b 44 ce 01", [1, 129]),  # tileloadd tmm0, [rsi + 8 * rcx + 1]
        ("c4e27b4b 04 0d 02000010", [2, 18]),  # tileloadd tmm0, [0x1000'0002 + rcx]
        ("4989f0 4989c9 c482 7b4b 84 08 03000000", [3, 19]),  # mov r8, rsi; mov r9, rcx; tileloadd tmm0, [r8 + r9 + 3]
    ],
)
def test_addresses_are_computed_from_base_index_scale_and_displacement(load: str, expected: list[int]) -> None:
    code = bytes.fromhex(f"{_LDTILECFG_RDI} {load} {_TILESTORED_TMM0_RDX_RCX} c3")
    memory = Memory()
    config, out = memory.add(configuration([(2, 1)])), memory.add(np.zeros(17, np.uint8), writable=True)
    values = Region(0x1000_0000, np.arange(200, dtype=np.uint8), False)
    arguments = config.address, values.address, out.address, 16
    bochs.Bochs(AMX).run(Image(CODE, code, {}), [*memory.regions, values], [Call(CODE, arguments)])
    assert out.data[[0, 16]].tolist() == expected


@pytest.mark.parametrize(
    "instruction",
    [
        "0f0b",  # ud2
        "c4e2f849 07",  # ldtilecfg with W
        "c4e27c49 07",  # with 256 bits
        "c4e37849 07",  # in another map of opcodes
        "c4e27849 0f",  # with a register number
        "c4e27949 c0",  # tilerelease with the prefix 66
        "c4e27b49 c1",  # tilezero with another number
        "c4e2784b 04 26",  # tileloadd without a prefix
        "c4e27b4b 06",  # tileloadd without SIB
        "c4e27a49 07",  # ldtilecfg with the prefix F3
        "c4e2785e 04 26",  # tdpbuud of memory
    ],
)
def test_other_invalid_instructions_are_errors(instruction: str) -> None:
    code = bytes.fromhex(f"{instruction} c3")
    with pytest.raises(AssertionError, match=r"^exception 6 at 0x0 of the function"):
        bochs.Bochs(AMX).run(Image(CODE, code, {}), [], [Call(CODE, ())])
