"""The driver's own cache: an entry is loaded exactly as stored, for the same model and device, or not at all."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support.caching import chain
from support.descriptors import no_more_descriptors

from nnfmq.base import settings
from nnfmq.driver.cache import programs
from nnfmq.driver.cache.files import KEY_NAME, DeviceIdentity, PackedConstants
from nnfmq.driver.cache.programs import CacheEntry, entry_for, entry_sizes
from nnfmq.driver.devices import builtin
from nnfmq.driver.devices.builtin import CompiledDevice
from nnfmq.driver.devices.configuration import DeviceEntry
from nnfmq.hal.errors import DeviceUnavailable, GeneralFailure, ResourceExhaustedTransient
from nnfmq.hal.types import ExtensionNameAndPrefix, OperationType

SELF = DeviceIdentity("compiled", "1")
MODEL = chain(OperationType.ADD)
SMALL, LARGE = np.arange(7, dtype=np.float32), np.arange(1 << 20, dtype=np.uint8)
GROUPS: PackedConstants = [(SMALL, LARGE), (), (np.zeros((0, 3), np.int16),)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache's directory, which does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(settings.CACHE_MIB.variable, raising=False)
    return tmp_path / "cache" / "nnfmq"


def made_entry(identity: DeviceIdentity = SELF, code: OperationType = OperationType.ADD) -> CacheEntry:
    entry = entry_for(identity, chain(code))
    assert entry is not None
    return entry


@pytest.fixture
def entry() -> CacheEntry:
    """Return an entry that has been stored."""
    entry = made_entry()
    entry.store(GROUPS)
    return entry


def assert_found(entry: CacheEntry) -> None:
    found = entry.load()
    assert found is not None
    for group, expected in zip(found, GROUPS, strict=True):
        for array, stored in zip(group, expected, strict=True):
            assert array.dtype == stored.dtype
            np.testing.assert_array_equal(array, stored)


def test_a_program_will_be_kept_unless_the_cache_is_off_or_has_no_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert programs.will_keep(MODEL)
    with programs.cache_disabled():
        assert not programs.will_keep(MODEL)
    (folder.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / "file"))
    assert not programs.will_keep(MODEL)


@pytest.mark.parametrize("before", ["7", None])
def test_cache_disabled_restores_the_environment(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.CACHE_MIB.variable, raising=False)
    if before is not None:
        monkeypatch.setenv(settings.CACHE_MIB.variable, before)
    limit = programs.cache_limit_bytes()
    with programs.cache_disabled():
        assert programs.cache_limit_bytes() == 0
    assert programs.cache_limit_bytes() == limit
    assert os.environ.get(settings.CACHE_MIB.variable) == before


def test_a_stored_entry_is_loaded(entry: CacheEntry) -> None:
    assert_found(entry)
    assert_found(made_entry())


def test_a_missing_entry_is_not_created_by_loading(folder: Path) -> None:
    assert made_entry().load() is None
    assert not folder.exists()
    assert entry_sizes() == []


def test_large_arrays_are_aligned_to_cache_lines(entry: CacheEntry) -> None:
    found = entry.load()
    assert found is not None
    assert found[0][1].ctypes.data % 64 == 0


def test_directory_and_entries_are_private_to_the_user(entry: CacheEntry, folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
    assert entry_sizes() == [(folder / entry.name).stat().st_size]


@pytest.mark.parametrize(
    "other",
    [
        lambda: made_entry(DeviceIdentity("compiled", "2")),
        lambda: made_entry(DeviceIdentity("other", "1")),
        lambda: made_entry(code=OperationType.MUL),
    ],
    ids=["version", "device", "model"],
)
@pytest.mark.usefixtures("entry")
def test_an_entry_of_another_device_or_model_is_not_found(other: Callable[[], CacheEntry]) -> None:
    assert other().load() is None


def test_a_changed_constant_is_another_entry() -> None:
    values = bytearray(MODEL.operand_values)
    values[-1] ^= 1
    other = entry_for(SELF, replace(MODEL, operand_values=bytes(values)))
    assert other is not None
    assert other.name != made_entry().name


def test_an_entry_of_another_build_is_not_found(entry: CacheEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "build_identity", lambda: bytes(32))
    assert made_entry().load() is None
    monkeypatch.undo()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_the_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def append_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def replace_by_another_model(path: Path) -> None:
    other = made_entry(code=OperationType.MUL)
    other.store([(LARGE[::-1],)])
    os.rename(path.parent / other.name, path)


def replace_the_key(path: Path) -> None:
    key = Path(os.environ["XDG_STATE_HOME"]) / "nnfmq" / KEY_NAME
    key.write_bytes(bytes(32))


CORRUPTIONS: dict[str, Callable[[Path], object]] = {
    "flipped": flip_a_bit,
    "header": change_the_header,
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "shorter than a header": lambda path: os.truncate(path, 63),
    "appended": append_a_byte,
    "of another model": replace_by_another_model,
    "of another key": replace_the_key,
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_CACHE_12_a_corrupt_entry_is_removed_and_can_be_replaced(
    corrupt: Callable[[Path], object], entry: CacheEntry, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corrupt(folder / entry.name)
    assert entry.load() is None
    assert not (folder / entry.name).exists()
    assert "an entry of the cache is removed" in caplog.text
    entry.store(GROUPS)
    assert_found(entry)


@pytest.mark.parametrize("error", [MemoryError("none left"), ResourceExhaustedTransient("none left"), OSError("bad")])
def test_an_entry_that_cannot_be_read_for_now_is_kept(
    error: Exception, entry: CacheEntry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_fd: int, _size: int) -> memoryview:
        raise error

    monkeypatch.setattr(programs, "read_file", fail)
    assert entry.load() is None
    assert f"an entry of the cache is not used: {error}" in caplog.text
    assert len(entry_sizes()) == 1


def test_an_entry_is_kept_if_no_fd_is_free_to_read_the_key(entry: CacheEntry, caplog: pytest.LogCaptureFixture) -> None:
    with no_more_descriptors(but=1):  # that of the entry
        assert entry.load() is None
    assert "an entry of the cache is not used" in caplog.text
    assert_found(entry)


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_an_entry_that_is_not_a_regular_file_is_not_read(
    kind: str, entry: CacheEntry, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / entry.name
    os.rename(path, tmp_path / "elsewhere")
    {
        "directory": path.mkdir,
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "pipe": lambda: os.mkfifo(path),
    }[kind]()
    assert entry.load() is None
    assert "cache" in caplog.text


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o500])
def test_a_directory_that_others_can_access_is_rejected_and_logged(
    mode: int, entry: CacheEntry, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.chmod(mode)
    assert entry.load() is None
    entry.store(GROUPS)
    assert caplog.text.count(f"mode {mode:04o}") == 2
    with pytest.raises(DeviceUnavailable):
        entry_sizes()
    folder.chmod(0o700)
    assert_found(entry)


def test_a_directory_that_cannot_be_created_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    entry = made_entry()
    entry.store(GROUPS)
    assert entry.load() is None
    assert "a model was not added to the cache" in caplog.text


@contextmanager
def files_of_64_kib_at_most() -> Iterator[None]:
    """Limit the size of files to 64 KiB, as on a full disk. Python ignores SIGXFSZ, so writing raises OSError.

    For one call only: pytest writes its report, which can be a larger file, before and after the test.
    """
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_CACHE_4_a_full_disk_leaves_no_file_and_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = made_entry()
    with files_of_64_kib_at_most():
        entry.store(GROUPS)
    assert "a model was not added to the cache" in caplog.text
    assert os.listdir(folder) == []


def test_the_cache_can_be_disabled(entry: CacheEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CACHE_MIB.variable, "0")
    assert entry_for(SELF, MODEL) is None


def test_EXT_a_model_with_extensions_has_no_entry() -> None:
    named = replace(MODEL, extensions=(ExtensionNameAndPrefix("com.example.test", 1),))
    assert entry_for(SELF, named) is None


def test_the_least_recently_used_entry_is_evicted_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CACHE_MIB.variable, "3")
    entries = [made_entry(DeviceIdentity("compiled", str(number))) for number in range(4)]
    for age, entry in zip((30, 20, 10), entries, strict=False):
        entry.store([(LARGE[: 900 << 10],)])
        os.utime(folder / entry.name, (1e9 - age, 1e9 - age))
    assert entries[0].load() is not None  # now it was used last
    entries[3].store([(LARGE[: 900 << 10],)])
    assert [entry.load() is not None for entry in entries] == [True, False, True, True]
    assert sum(entry_sizes()) <= 3 << 20


@pytest.mark.usefixtures("entry")
def test_a_small_file_counts_as_a_block_of_the_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CACHE_MIB.variable, "1")
    for number in range(300):
        (folder / f"{number:064x}").write_bytes(b"x")
    made_entry(DeviceIdentity("compiled", "2")).store([(np.zeros(1),)])
    assert len(entry_sizes()) == 240  # of 256 blocks kernels have a 16th


def test_an_entry_over_the_cache_limit_is_not_stored(
    folder: Path, entry: CacheEntry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(settings.CACHE_MIB.variable, "1")
    made_entry(DeviceIdentity("compiled", "2")).store([(np.concatenate([LARGE, LARGE]),)])
    assert "more than the whole cache" in caplog.text
    assert os.listdir(folder) == [entry.name]


def test_the_next_writer_removes_a_killed_writer_s_temporary_file(folder: Path, entry: CacheEntry) -> None:
    unfinished = folder / f".{entry.name}.0123456789abcdef"
    unfinished.write_bytes(b"half")
    made_entry(DeviceIdentity("compiled", "2")).store(GROUPS)
    assert not unfinished.exists()
    assert len(entry_sizes()) == 2


def test_a_living_writer_s_temporary_file_is_kept(folder: Path, entry: CacheEntry) -> None:
    unfinished = folder / f".{entry.name}.0123456789abcdef"
    with unfinished.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made_entry(DeviceIdentity("compiled", "2")).store(GROUPS)
        assert unfinished.exists()


def test_threads_that_store_the_same_entry_concurrently_leave_one(folder: Path) -> None:
    entry = made_entry()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: entry.store(GROUPS), range(32)))
    assert os.listdir(folder) == [entry.name]
    assert_found(entry)


def compiled(**limits: list[str]) -> CompiledDevice:
    """Return a device of the compiling engine, perhaps limited to some operations."""
    pytest.importorskip("llvmlite", reason="llvmlite is not installed")
    return CompiledDevice(DeviceEntry("compiled", "compiled", **limits))


def test_SUP_1_a_cached_program_is_not_used_if_the_configuration_excludes_an_operation(folder: Path) -> None:
    everything = compiled()
    everything.prepare_model(MODEL)
    assert everything.load_cached(MODEL) is not None
    with pytest.raises(GeneralFailure, match="ADD"):
        compiled(except_operations=["ADD"]).prepare_model(MODEL)


def test_an_entry_that_cannot_be_linked_is_removed_and_the_model_compiled(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = compiled()
    entry = entry_for(device.identity, MODEL)
    assert entry is not None
    entry.store([(SMALL.view(np.uint8), LARGE)])  # sealed, and no plan
    assert device.load_cached(MODEL) is None
    assert not (folder / entry.name).exists()
    assert "cannot be linked" in caplog.text
    device.prepare_model(MODEL)
    assert device.load_cached(MODEL) is not None


def test_without_memory_for_the_shared_program_a_worker_uses_its_private_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(CacheEntry, "store", lambda self, groups: groups)
    monkeypatch.setattr(builtin, "_link", none_left)
    compiled().prepare_model(MODEL)
