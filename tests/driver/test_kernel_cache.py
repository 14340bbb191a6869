"""Kernels that models have in common are compiled once: entries of the driver's cache, with its rules.

How many kernels are compiled is what `PrepareContext.on_progress` is told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.models import logistics_model, weighty_model

pytest.importorskip("llvmlite", exc_type=ImportError)

from nnfmq.base import settings
from nnfmq.driver.cache import files, programs
from nnfmq.driver.cache.files import KEY_NAME, DeviceIdentity
from nnfmq.driver.cache.programs import CacheEntry, entry_sizes, kernel_entries, store_bytes
from nnfmq.driver.compilation import kernel_cache
from nnfmq.driver.compilation.jobs import PrepareContext, prepare_context
from nnfmq.driver.compilation.kernel_cache import KernelCache
from nnfmq.driver.devices.builtin import CompiledDevice
from nnfmq.driver.devices.configuration import DeviceEntry
from nnfmq.engines.compiled import partition, target
from nnfmq.engines.compiled.kernels import symbol_name
from nnfmq.engines.compiled.kernels.elementwise import ElementwiseKernel
from nnfmq.engines.compiled.kernels.float_ops import FloatUnary
from nnfmq.engines.compiled.object_code import LoadedCode
from nnfmq.engines.compiled.target import host_target
from nnfmq.engines.compiled.thread_pool import default_thread_pool
from nnfmq.engines.execution import PreparedProgram
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Model

SIDE = 64
ONE, OTHER_WEIGHTS = weighty_model(1.0, SIDE), weighty_model(2.0, SIDE)
INPUT = np.arange(SIDE, dtype=np.float32).reshape(1, SIDE)


@pytest.fixture(autouse=True)
def _stop_thread_pool() -> Iterator[None]:
    yield
    default_thread_pool().stop()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of kernels, which does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(settings.CACHE_MIB.variable, raising=False)
    return tmp_path / "cache" / "nnfmq" / "kernels"


def prepared(model: Model, is_deterministic: bool = False) -> tuple[int, PreparedProgram]:
    """Prepare a model as if the cache had no program of it. Return how many kernels that compiled, and the program."""
    totals = [0]
    context = PrepareContext(on_progress=lambda _, total: totals.append(total), is_deterministic=is_deterministic)
    with prepare_context(context):
        program = CompiledDevice(DeviceEntry("compiled", "compiled")).compile(model)
    return totals[-1], program


def compiled_kernels(model: Model = ONE, is_deterministic: bool = False) -> int:
    """Prepare ONE or OTHER_WEIGHTS, check what it computes, and return how many kernels were compiled."""
    count, program = prepared(model, is_deterministic)
    result = np.empty((1, SIDE), np.float32)
    program.bind([INPUT], [result]).run()
    assert (result == INPUT.sum() * (2.0 if model is OTHER_WEIGHTS else 1.0)).all()
    return count


def test_a_model_with_the_kernels_of_an_earlier_one_compiles_none(folder: Path) -> None:
    count = compiled_kernels()
    assert count > 0 and len(list(folder.iterdir())) == count
    assert compiled_kernels(OTHER_WEIGHTS) == 0
    assert len(list(folder.iterdir())) == count


def test_a_model_compiles_only_the_kernels_that_no_earlier_one_had(folder: Path) -> None:
    assert [prepared(logistics_model(count))[0] for count in (3, 5, 4)] == [3, 2, 0]
    assert len(list(folder.iterdir())) == 5


def test_entries_are_private_to_the_user_and_counted(folder: Path) -> None:
    compiled_kernels()
    assert folder.stat().st_mode & 0o777 == 0o700
    found = [path.stat() for path in folder.iterdir()]
    assert {info.st_mode & 0o777 for info in found} == {0o600}
    assert set(entry_sizes()) > {info.st_size for info in found}


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_the_key(_path: Path) -> None:
    key = Path(os.environ["XDG_STATE_HOME"]) / "nnfmq" / KEY_NAME
    key.write_bytes(bytes(32))


def take_the_place_of_another(path: Path) -> None:
    """Give a kernel's name to the program, which this driver has sealed, too."""
    (program,) = (other for other in path.parent.parent.iterdir() if other.is_file())
    path.write_bytes(program.read_bytes())


CORRUPTIONS: dict[str, Callable[[Path], object]] = {
    "flipped": flip_a_bit,
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "appended": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "of another key": replace_the_key,
    "of a program": take_the_place_of_another,
    "removed": Path.unlink,
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_CACHE_12_a_kernel_without_a_valid_entry_is_compiled_again_and_replaced(
    corrupt: Callable[[Path], object], folder: Path
) -> None:
    count = compiled_kernels()
    for path in list(folder.iterdir()):
        corrupt(path)
    assert compiled_kernels(OTHER_WEIGHTS) == count
    assert compiled_kernels() == 0


def test_object_code_of_another_kernel_is_not_used(folder: Path) -> None:
    gemm, pool = kernel_entries(DeviceIdentity("compiled", "1"), "avx2", ["Gemm()", "Pool()"])
    store_bytes({gemm: b"gemm", pool: b"pool"})
    assert gemm.load_bytes() == b"gemm" and pool.load_bytes() == b"pool"
    os.rename(folder.parent / pool.name, folder.parent / gemm.name)
    assert gemm.load_bytes() is None


def named(version: str = "1", target: str = "avx2", kernel: str = "Gemm()") -> CacheEntry:
    (entry,) = kernel_entries(DeviceIdentity("compiled", version), target, [kernel])
    return entry


@pytest.mark.parametrize(
    "other", [named("2"), named(target="avx512"), named(kernel="Gemm(1)")], ids=["version", "target", "kernel"]
)
def test_another_version_target_or_kernel_has_another_entry(other: CacheEntry) -> None:
    store_bytes({named(): b"code"})
    assert named().load_bytes() is not None and other.load_bytes() is None


def test_another_build_uses_no_entry(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    count = compiled_kernels()
    for module in (programs, files):
        monkeypatch.setattr(module, "build_identity", lambda: bytes(32))
    assert compiled_kernels() == count
    assert len(list(folder.iterdir())) == 2 * count


def test_another_instruction_set_uses_no_entry(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("it has two instruction sets of x86-64")
    for name in ("sse4.1", "sse4.1-fma"):
        chosen = target.TARGETS[name]
        monkeypatch.setattr(target, "host_target", lambda chosen=chosen: chosen)
        monkeypatch.setattr(partition, "host_target", lambda chosen=chosen: chosen)
        assert compiled_kernels() > 0
        assert compiled_kernels(OTHER_WEIGHTS) == 0


def test_a_deterministic_program_uses_the_entries_of_its_instruction_set(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("SSE4.1 has another target for these")
    for module in (target, partition):
        monkeypatch.setattr(module, "host_target", lambda: target.TARGETS["sse4.1"])
    assert compiled_kernels() > 0
    assert compiled_kernels(is_deterministic=True) > 0
    assert compiled_kernels(OTHER_WEIGHTS, is_deterministic=True) == 0


def test_with_the_cache_disabled_all_kernels_are_compiled_and_none_is_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.CACHE_MIB.variable, "0")
    count = compiled_kernels()
    assert compiled_kernels(OTHER_WEIGHTS) == count > 0
    assert not folder.exists()


def test_the_kernels_that_were_used_last_stay_within_their_part_of_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.CACHE_MIB.variable, "1")  # 64 KiB for kernels
    code = bytes(18 << 10)
    entries = [named(kernel=str(number)) for number in range(4)]
    for age, entry in zip((30, 20, 10), entries, strict=False):
        store_bytes({entry: code})
        os.utime(folder.parent / entry.name, (1e9 - age, 1e9 - age))
    assert entries[0].load_bytes() is not None  # now it was used last
    store_bytes({entries[3]: code})
    assert [entry.load_bytes() is not None for entry in entries] == [True, False, True, True]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 64 << 10


def test_kernels_remove_no_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CACHE_MIB.variable, "1")
    compiled_kernels()
    (program,) = (path for path in folder.parent.iterdir() if path.is_file())
    os.utime(program, (1, 1))
    for number in range(10):
        store_bytes({named(kernel=str(number)): bytes(10 << 10)})
    assert program.exists()


def test_more_kernels_than_one_request_has_files_are_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "STORED_FILES_MAX", 2)
    contents = {named(kernel=str(number)): b"%d" % number for number in range(5)}
    store_bytes(contents)
    assert {entry: entry.load_bytes() for entry in contents} == contents


def test_the_next_writer_removes_a_killed_writer_s_temporary_file(folder: Path) -> None:
    store_bytes({named(): b"code"})
    unfinished = folder / f".{'0' * 64}.0123456789abcdef"
    unfinished.write_bytes(b"half")
    store_bytes({named("2"): b"code"})
    assert not unfinished.exists()
    assert len(list(folder.iterdir())) == 2


def test_object_code_that_cannot_be_linked_is_not_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(kernels: list[object], _target: object, meanwhile: Callable[[], None]) -> list[bytes]:
        meanwhile()
        return [b"no object file"] * len(kernels)

    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache, "compile_in_processes", damaged)
        with pytest.raises(GeneralFailure, match="cannot be loaded"):
            compiled_kernels()
    assert not folder.exists()
    assert compiled_kernels() > 0


def test_what_else_is_to_be_done_is_done_once_whether_or_not_something_is_compiled() -> None:
    done: list[int] = []
    unary = FloatUnary("floor", -np.inf)
    kernel = ElementwiseKernel(unary, (), ((),), 8, (1,), 4, 1, 8, 1, (False,))
    for _ in range(2):
        cache = KernelCache(DeviceIdentity("compiled", "1"))
        (code,) = cache.compile([kernel, kernel], host_target(), lambda: done.append(1))
        assert LoadedCode([code]).address(symbol_name(kernel))
        cache.store()
    assert done == [1, 1]
