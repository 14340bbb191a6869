"""The loader of object code: relocations on both machines, protection and release of memory, and damaged files."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import struct
from collections import defaultdict
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.emulated import Call, Memory
from support.instruction_sets import initialize_all_targets

from nnfmq.engines.compiled.code_generator import compile_ir
from nnfmq.engines.compiled.object_code import RELOCATIONS, Linker, LoadedCode, parse_object
from nnfmq.engines.compiled.target import TARGETS, host_target
from nnfmq.hal.errors import GeneralFailure

# Stores constants of all sizes in args[0], an element of a table, and a copy of args[1]; `other` stores one more.
_FIRST = """
@byte = private constant i8 17
@half = private constant i16 1000
@word = private constant i32 100000
@double = private constant i64 -5
@quad = private constant <2 x i64> <i64 7, i64 8>
@table = private constant [4 x i64] [i64 10, i64 11, i64 12, i64 13]
declare void @other(ptr, i64, i64, ptr)
declare ptr @memcpy(ptr, ptr, i64)
define void @first(ptr %args, i64 %begin, i64 %end, ptr %scratch) {
  %out = load ptr, ptr %args
  %in.at = getelementptr i64, ptr %args, i64 1
  %in = load ptr, ptr %in.at
  %copy = getelementptr i64, ptr %out, i64 7
  call ptr @memcpy(ptr %copy, ptr %in, i64 16)
  %byte = load volatile i8, ptr @byte
  %half = load volatile i16, ptr @half
  %word = load volatile i32, ptr @word
  %double = load volatile i64, ptr @double
  %quad = load volatile <2 x i64>, ptr @quad
  %element = getelementptr i64, ptr @table, i64 %begin
  %entry = load volatile i64, ptr %element
  %out1 = getelementptr i64, ptr %out, i64 1
  %out2 = getelementptr i64, ptr %out, i64 2
  %out3 = getelementptr i64, ptr %out, i64 3
  %out4 = getelementptr i64, ptr %out, i64 4
  %out6 = getelementptr i64, ptr %out, i64 6
  %byte.wide = zext i8 %byte to i64
  %half.wide = zext i16 %half to i64
  %word.wide = zext i32 %word to i64
  store i64 %byte.wide, ptr %out
  store i64 %half.wide, ptr %out1
  store i64 %word.wide, ptr %out2
  store i64 %double, ptr %out3
  store <2 x i64> %quad, ptr %out4, align 8
  store i64 %entry, ptr %out6
  tail call void @other(ptr %args, i64 %begin, i64 %end, ptr %scratch)
  ret void
}
"""
_SECOND = """
@number = private constant i64 99
define void @other(ptr %args, i64 %begin, i64 %end, ptr %scratch) {
  %out = load ptr, ptr %args
  %out9 = getelementptr i64, ptr %out, i64 9
  %number = load volatile i64, ptr @number
  store i64 %number, ptr %out9
  ret void
}
"""
_EXPECTED = [17, 1000, 100000, -5, 7, 8, 13, 21, 22, 99]
_BEGIN = 3


@cache
def object_files(target_name: str) -> list[bytes]:
    initialize_all_targets()
    return [compile_ir(text, TARGETS[target_name]) for text in (_FIRST, _SECOND)]


def host_files() -> list[bytes]:
    return object_files(host_target().name)


@pytest.mark.parametrize(("target", "machine"), [("sse4.1", "x86_64"), ("neon", "aarch64")])
def test_the_example_has_every_relocation_type_of_its_machine(target: str, machine: str) -> None:
    found = {relocation.kind for code in object_files(target) for relocation in parse_object(code).relocations}
    assert found == set(RELOCATIONS[machine])


def test_loaded_code_refers_to_its_constants_to_other_files_and_to_the_c_library() -> None:
    loaded, out, source = LoadedCode(host_files()), np.zeros(10, np.int64), np.array([21, 22])
    args = np.array([out.ctypes.data, source.ctypes.data])
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    function(loaded.address("first"))(args.ctypes.data, _BEGIN, 0, 0)
    assert out.tolist() == _EXPECTED


def test_linked_code_for_aarch64_does_the_same_in_an_emulator() -> None:
    if importlib.util.find_spec("unicorn") is None:
        pytest.skip("unicorn is not installed")
    from support.arm import Arm

    machine, memory = Arm(), Memory()
    out = memory.add(np.zeros(10, np.int64), writable=True)
    source = memory.add(np.array([21, 22]))
    args = memory.add(np.array([out.address, source.address]))
    image = machine.load(*object_files("neon"))
    machine.run(image, memory.regions, [Call(image.functions["first"], (args.address, _BEGIN, 0, 0))])
    assert out.data.view(np.int64).tolist() == _EXPECTED


# -- memory -----------------------------------------------------------------------------------------------------------


def mappings() -> list[tuple[range, str]]:
    """Return the address range and the permissions of each mapping of this process."""
    lines = (line.split(maxsplit=2) for line in Path("/proc/self/maps").read_text().splitlines())
    return [(range(*(int(end, 16) for end in addresses.split("-"))), rights) for addresses, rights, _ in lines]


def test_code_is_executable_constants_are_read_only_and_both_are_unmapped_with_the_last_reference() -> None:
    loaded = LoadedCode(host_files())
    code = loaded.address("first")
    constants = loaded._base + Linker(host_files()).code_bytes
    rights = {address: right for address in (code, constants) for span, right in mappings() if address in span}
    assert rights == {code: "r-xp", constants: "r--p"}
    assert not [right for span, right in mappings() if span.start in range(loaded._base, constants) and "w" in right]
    del loaded
    gc.collect()
    assert not [right for span, right in mappings() if code in span and "x" in right]


# -- errors -----------------------------------------------------------------------------------------------------------


def host_code(text: str) -> bytes:
    return compile_ir(text, host_target())


def test_an_undefined_function_is_named() -> None:
    calling = "declare void @system()\ndefine void @f() {\n  call void @system()\n  ret void\n}"
    with pytest.raises(GeneralFailure, match="refers to 'system', which nothing defines"):
        LoadedCode([host_code(calling)])
    with pytest.raises(GeneralFailure, match="nothing defines 'absent'"):
        LoadedCode(host_files()).address("absent")


def test_a_function_that_two_files_define_is_an_error() -> None:
    with pytest.raises(GeneralFailure, match="other is defined twice"):
        LoadedCode([*host_files(), host_files()[1]])


def test_variables_are_not_supported() -> None:
    text = "@variable = global i64 1\ndefine ptr @f() {\n  ret ptr @variable\n}"
    with pytest.raises(GeneralFailure, match="is writable"):
        LoadedCode([host_code(text)])


def test_code_for_another_machine_is_not_loaded() -> None:
    foreign = "neon" if os.uname().machine == "x86_64" else "sse4.1"
    with pytest.raises(GeneralFailure, match="it is for"):
        LoadedCode(object_files(foreign))
    with pytest.raises(GeneralFailure, match="it is for aarch64 and x86_64"):
        LoadedCode([*object_files("neon"), *object_files("sse4.1")])


def with_relocation(code: bytes, **changes: int) -> bytes:
    """Return a file whose first relocation, of a section with code, has changed fields."""
    first = parse_object(code).relocations[0]
    for at in range(0, len(code) - 24, 8):
        offset, kind, index, addend = struct.unpack_from("<QIIq", code, at)
        if (offset, kind, addend) == (first.offset, first.kind, first.addend) and index:
            fields = {"offset": offset, "kind": kind, "symbol": index, "addend": addend, **changes}
            changed = struct.pack("<QIIq", *(fields[name] for name in ("offset", "kind", "symbol", "addend")))
            return code[:at] + changed + code[at + 24 :]
    pytest.fail("the file has no such relocation")


@pytest.mark.parametrize("target", ["sse4.1", "neon"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": 1000}, "relocation type 1000 of .* is unknown"),
        ({"offset": 1 << 40}, "a relocation is at byte 1099511627776 of a section with"),
        ({"offset": (1 << 64) - 2}, "a relocation is at byte 18446744073709551614 of"),
        ({"symbol": 1 << 20}, "refers to symbol 1048576 of"),
        ({"addend": 1 << 40}, "cannot refer to"),
        ({"symbol": 0, "kind": -1}, "refers to '', which nothing defines"),
    ],
)
def test_impossible_relocations_are_named(target: str, changes: dict[str, int], message: str) -> None:
    if changes.get("kind") == -1:  # one that is no branch
        changes = {**changes, "kind": 2 if target == "sse4.1" else 275}
    damaged = with_relocation(object_files(target)[0], **changes)
    with pytest.raises(GeneralFailure, match=message):
        link_somewhere([damaged, object_files(target)[1]])


def link_somewhere(files: list[bytes]) -> bytes:
    linker = Linker(files)
    data = bytearray(linker.size_bytes)
    linker.write(memoryview(data), 0x7F00_0000_0000, defaultdict(lambda: 0x5500_0000_0000))
    return bytes(data)


@pytest.mark.parametrize("target", ["sse4.1", "neon"])
def test_a_file_that_ends_early_is_an_error_at_every_length(target: str) -> None:
    """LLVM writes the section header table last, so nothing of it may be missing."""
    code = object_files(target)[1]
    link_somewhere([code])
    for length in range(len(code)):
        with pytest.raises(GeneralFailure):
            link_somewhere([code[:length]])


@st.composite
def damaged_files(draw: Any, target: str) -> list[bytes]:
    """Object files with changed bytes and a changed word, perhaps cut off."""
    first, second = object_files(target)
    code = bytearray(first)
    for at, value in draw(st.lists(st.tuples(st.integers(0, len(code) - 1), st.integers(0, 255)), max_size=4)):
        code[at] = value
    if draw(st.booleans()):
        word = draw(st.integers(0, len(code) // 8 - 1))
        code[8 * word : 8 * word + 8] = draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    return [bytes(code[: draw(st.integers(0, len(code)))] if draw(st.integers(0, 9)) == 0 else code), second]


@pytest.mark.parametrize("target", ["sse4.1", "neon"])
@given(data=st.data())
def test_damaged_files_are_linked_or_rejected_with_the_error_of_the_loader(target: str, data: Any) -> None:
    """Nothing else is raised: each access was checked before it was made."""
    files = data.draw(damaged_files(target))
    with suppress(GeneralFailure):
        link_somewhere(files)


@pytest.mark.parametrize("target", ["sse4.1", "neon"])
@pytest.mark.parametrize("value", [0, 0x7F, 0xFF])
def test_each_byte_may_be_damaged(target: str, value: int) -> None:
    """Set every byte once, those of headers, symbols, names and relocations among them."""
    code = object_files(target)[1]
    for at in range(len(code)):
        damaged = code[:at] + bytes([value]) + code[at + 1 :]
        with suppress(GeneralFailure):
            link_somewhere([damaged])
