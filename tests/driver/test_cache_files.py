"""What is read from cache files is what was saved, or nothing: any change of any byte, anywhere, is seen."""

from __future__ import annotations

import errno
import hmac
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfmq.driver.cache.files import CacheContents, CacheFiles, DeviceIdentity, find_key, read_files, save_files
from nnfmq.driver.devices import installation
from nnfmq.hal.capabilities import NumberOfCacheFiles
from nnfmq.hal.errors import GeneralFailure

TOKEN = bytes(range(32))
SELF = DeviceIdentity("reference", "nnfmq-1")
LIMIT = 1 << 20
HEADER = 64
buffers = st.lists(st.binary(max_size=200), max_size=3).map(tuple)
contents = st.builds(CacheContents, buffers, buffers).filter(lambda c: c.model or c.data)


@contextmanager
def files_of(model: int, data: int) -> Iterator[CacheFiles]:
    fds = [os.memfd_create("cache") for _ in range(model + data)]
    try:
        yield CacheFiles(TOKEN, fds[:model], fds[model:])
    finally:
        for fd in fds:
            os.close(fd)


def counts(saved: CacheContents) -> NumberOfCacheFiles:
    return NumberOfCacheFiles(len(saved.model), len(saved.data))


@settings(deadline=None)
@given(contents)
def test_CACHE_6_contents_are_read_in_the_order_in_which_they_were_saved(saved: CacheContents) -> None:
    with files_of(len(saved.model), len(saved.data)) as files:
        save_files(files, counts(saved), SELF, lambda: saved)
        found, size = read_files(files, counts(saved), SELF, LIMIT)
    assert tuple(map(bytes, found.model)) == saved.model
    assert tuple(map(bytes, found.data)) == saved.data
    assert size == sum(map(len, saved.model + saved.data))


def test_the_file_format_is_as_documented() -> None:
    """A header of 64 bytes, and a digest over everything with its length (docs/how-to/caching.md)."""
    saved = CacheContents((b"model",), (b"da", b"ta"))
    with files_of(1, 2) as files:
        save_files(files, counts(saved), SELF, lambda: saved)
        written = [os.pread(fd, 1000, 0) for fd in files.fds]
    headers = [
        b"nnfmqCCH" + struct.pack("<HBBIQQ", 1, kind, index, 0, size, 0)
        for kind, index, size in [(1, 0, 5), (2, 0, 2), (2, 1, 2)]
    ]
    mac = hmac.new(find_key(), digestmod="sha256")
    for field in (b"reference", b"nnfmq-1", installation.build_identity(), TOKEN):
        mac.update(struct.pack("<Q", len(field)) + field)
    for header, content in zip(headers, (b"model", b"da", b"ta"), strict=True):
        mac.update(header + bytes(32) + content)
    expected = [h + mac.digest() + content for h, content in zip(headers, (b"model", b"da", b"ta"), strict=True)]
    assert written == expected


@settings(deadline=None)
@given(contents, st.data())
def test_N_CCH_10_to_13_N_CCX_1_any_change_of_any_file_is_rejected(saved: CacheContents, data: st.DataObject) -> None:
    with files_of(len(saved.model), len(saved.data)) as files:
        save_files(files, counts(saved), SELF, lambda: saved)
        fd = data.draw(st.sampled_from(files.fds))
        before = os.pread(fd, 1 << 20, 0)
        after = data.draw(changed(before))
        os.ftruncate(fd, 0)
        os.pwrite(fd, after, 0)
        with pytest.raises(GeneralFailure):
            read_files(files, counts(saved), SELF, LIMIT)
        os.ftruncate(fd, 0)
        os.pwrite(fd, before, 0)
        read_files(files, counts(saved), SELF, LIMIT)


@st.composite
def changed(draw: st.DrawFn, content: bytes) -> bytes:
    """Return `content` with bits flipped, cut, extended, or with a part of it moved: never as it was."""
    kind = draw(st.sampled_from(["flip", "cut", "extend", "splice", "other"]))
    place = draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        return content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]
    if kind == "cut":
        return content[:place]
    if kind == "extend":
        return content + draw(st.binary(min_size=1, max_size=256))
    if kind == "splice":
        spliced = content[place:] + content[:place]
        return spliced if spliced != content else content + b"\0"
    other = draw(st.binary(max_size=300))
    return other if other != content else other + b"\0"


@settings(deadline=None)
@given(st.binary(min_size=HEADER, max_size=200), st.integers(0, 199))
def test_a_flip_of_any_header_bit_is_rejected(payload: bytes, start: int) -> None:
    saved = CacheContents((payload,))
    with files_of(1, 0) as files:
        save_files(files, counts(saved), SELF, lambda: saved)
        (fd,) = files.fds
        content = os.pread(fd, 1 << 20, 0)
        place = start % HEADER
        for bit in range(8):
            os.pwrite(fd, bytes([content[place] ^ 1 << bit]), place)
            with pytest.raises(GeneralFailure):
                read_files(files, counts(saved), SELF, LIMIT)
        os.pwrite(fd, content, 0)
        read_files(files, counts(saved), SELF, LIMIT)


@pytest.mark.parametrize(
    "identity",
    [
        DeviceIdentity("reference2", "nnfmq-1"),
        DeviceIdentity("reference", "nnfmq-2"),
        DeviceIdentity("referencen", "nfmq-1"),
    ],
    ids=["another device", "another version", "the same letters"],
)
def test_CACHE_12_a_cache_is_valid_for_one_device_in_one_version(identity: DeviceIdentity) -> None:
    saved = CacheContents((b"x",))
    with files_of(1, 0) as files:
        save_files(files, counts(saved), SELF, lambda: saved)
        with pytest.raises(GeneralFailure):
            read_files(files, counts(saved), identity, LIMIT)


def test_bytes_cannot_be_moved_between_files() -> None:
    with files_of(2, 0) as files:
        needed = NumberOfCacheFiles(2, 0)
        save_files(files, needed, SELF, lambda: CacheContents((b"ab", b"c")))
        one, other = (os.pread(fd, 100, 0) for fd in files.fds)
        save_files(files, needed, SELF, lambda: CacheContents((b"a", b"bc")))
        for fd, content in zip(files.fds, (one, other), strict=True):
            read_files(files, needed, SELF, LIMIT)
            before = os.pread(fd, 100, 0)
            os.ftruncate(fd, 0)
            os.pwrite(fd, content, 0)
            with pytest.raises(GeneralFailure):
                read_files(files, needed, SELF, LIMIT)
            os.ftruncate(fd, 0)
            os.pwrite(fd, before, 0)


@pytest.mark.parametrize("limit", [0, 99, 149])
def test_N_CCX_1_the_size_limit_is_for_all_files_together(limit: int) -> None:
    saved = CacheContents((bytes(100),), (bytes(50),))
    with files_of(1, 1) as files:
        save_files(files, counts(saved), SELF, lambda: saved)
        with pytest.raises(GeneralFailure, match="not read"):
            read_files(files, counts(saved), SELF, limit)
        assert read_files(files, counts(saved), SELF, 150)[1] == 150


@pytest.mark.parametrize("call", ["fstat", "pread", "preadv"])
def test_a_file_that_cannot_be_read_is_rejected(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a file of a server that is gone, or of the client's process."""

    def fails(*_: object) -> None:
        raise OSError(errno.ESTALE, "stale file handle")

    saved = CacheContents((b"x",))
    with files_of(1, 0) as files:
        save_files(files, counts(saved), SELF, lambda: saved)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails)
            with pytest.raises(GeneralFailure, match="stale"):
                read_files(files, counts(saved), SELF, LIMIT)
