"""Compilation caching through a session: saved and loaded files, and all that is rejected.

The rows N-CCH are the HAL's own tests, with its models, seeds and rounds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.caching import FLOAT, QUANT8, TOKEN, TYPES, CachingClient, Loaded, Paths, chain, expected_result
from support.models import invalid_model, unsupported_model
from support.tiers import IS_DEEP

import nnfmq
from nnfmq.driver.cache.files import CacheContents, encode_program
from nnfmq.driver.devices import device, installation
from nnfmq.driver.devices.builtin import InterpreterDevice
from nnfmq.driver.devices.device import DeviceBase
from nnfmq.driver.devices.registry import DeviceRegistry
from nnfmq.engines import interpreter
from nnfmq.engines.program import Program
from nnfmq.hal.capabilities import NumberOfCacheFiles
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import DeviceStatus, ExtensionNameAndPrefix, Model, Operation, OperationType, Subgraph
from nnfmq.operations import packed_matmul
from nnfmq.serialize import messages

ADD, MUL = OperationType.ADD, OperationType.MUL
NONE, INVALID, FAILURE = ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE
ROUNDS = 100 if IS_DEEP else 40
SEEDS = range(10)
EACH_FILE = [pytest.param(0, id="model"), pytest.param(1, id="data")]
WRONG_COUNTS = [(2, 1), (0, 1), (1, 2), (1, 0)]
WRONG_TOKENS = [b"", TOKEN[:-1], TOKEN + b"x"]
every_type = pytest.mark.parametrize("type", TYPES, ids=["float32", "quant8"])


@pytest.fixture
def client() -> Iterator[CachingClient]:
    made = CachingClient()
    yield made
    made.close()


@pytest.fixture
def files(tmp_path: Path) -> Paths:
    return Paths.new(tmp_path)


def assert_right(client: CachingClient, loaded: Loaded, code: OperationType = ADD) -> None:
    assert loaded.status is NONE, loaded.message
    assert client.result(loaded.model_id) == expected_result(code)


def saved(client: CachingClient, files: Paths, model: Model | None = None, token: bytes = TOKEN) -> Paths:
    """Save a model, and check that it can be loaded unchanged, so that later rejections have another reason."""
    assert client.save(chain(ADD) if model is None else model, files, token).status is NONE
    assert client.load(files, token).status is NONE
    return files


def other(token: bytes) -> bytes:
    return bytes([token[0] ^ 1]) + token[1:]


# ------------------------------------------------------------------------------------------------ what works


@every_type
def test_N_CCH_16_a_saved_model_can_be_loaded_repeatedly(type: Any, client: CachingClient, files: Paths) -> None:
    assert_right(client, client.save(chain(ADD, type), files))
    assert all(files.contents())
    for _ in range(2):
        assert_right(client, client.load(files))


@every_type
@pytest.mark.parametrize("flags", [0, os.O_APPEND], ids=["anywhere", "appending"])
def test_N_CCH_16_CACHE_5_old_content_and_file_position_do_not_matter(
    type: Any, flags: int, client: CachingClient, files: Paths
) -> None:
    for path in files.all:
        path.write_bytes(b"old" * 100_000)
    with ExitStack() as stack:
        model, data = files.open(stack, dict.fromkeys(range(2), os.O_RDWR | flags))
        for fd in (*model, *data):
            os.lseek(fd, 1234, os.SEEK_SET)
        assert_right(client, client.save_to(chain(ADD, type), model, data))
        for fd in (*model, *data):
            os.lseek(fd, 777, os.SEEK_SET)
        assert_right(client, client.load_from(model, data))
    assert not any(b"old" in content for content in files.contents())


def test_DEV_6_CACHE_1_the_interpreter_s_devices_need_a_file_of_each_kind(client: CachingClient) -> None:
    counts = {name: (d.info.model_cache_files, d.info.data_cache_files) for name, d in client.session.devices.items()}
    assert set(counts.values()) == {(1, 1)}


@pytest.mark.parametrize("name", ["digits.tflite", "digits_quant.tflite"])
def test_a_cached_model_returns_the_same_bits_without_validation_or_packing(
    name: str, client: CachingClient, files: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = nnfmq.load(nnfmq.example_path(name))
    fresh = client.save(loaded.model, files)

    def not_again(*_: object) -> None:
        pytest.fail("this was done when it was saved")

    monkeypatch.setattr(device, "validate_model", not_again)
    monkeypatch.setattr(packed_matmul, "bound_accumulator", not_again)
    cached = client.load(files)
    (info,), (result,) = loaded.inputs, loaded.outputs
    image = np.random.default_rng(1).integers(0, 17, info.shape).astype(info.dtype)
    outputs = [np.zeros(result.shape, result.dtype) for _ in range(2)]
    for outcome, out in zip((fresh, cached), outputs, strict=True):
        assert outcome.status is NONE
        client.session.models.lookup(outcome.model_id).program.bind([image], [out]).run()
    assert outputs[0].tobytes() == outputs[1].tobytes() and outputs[0].any()


def test_a_model_from_its_cache_is_charged_until_it_is_released(client: CachingClient, files: Paths) -> None:
    assert client.save(chain(ADD), files).status is NONE
    before = client.session.quota.charged_bytes
    loaded = client.load(files)
    assert client.session.quota.charged_bytes - before == sum(map(len, files.contents())) - 2 * 64
    client.peer.send(messages.ReleaseModel(999, loaded.model_id))
    client.peer.receive(messages.Reply)
    assert client.session.quota.charged_bytes == before


# ------------------------------------------------------------------------------------------------ wrong arguments


@every_type
@pytest.mark.parametrize(("model_count", "data_count"), WRONG_COUNTS)
def test_N_CCH_1_CACHE_6_with_a_wrong_number_of_files_the_model_is_prepared_and_not_saved(
    model_count: int, data_count: int, type: Any, client: CachingClient, tmp_path: Path
) -> None:
    wrong = Paths.new(tmp_path, model=model_count, data=data_count)
    assert_right(client, client.save(chain(ADD, type), wrong))
    assert not any(wrong.contents())
    assert client.load(wrong).status is INVALID
    assert client.load(Paths.new(tmp_path)).status is FAILURE


@pytest.mark.parametrize(("model_count", "data_count"), [*WRONG_COUNTS, (0, 0), (32, 32)])
def test_N_CCH_2_CACHE_6_loading_from_a_wrong_number_of_files_is_rejected(
    model_count: int, data_count: int, client: CachingClient, files: Paths, tmp_path: Path
) -> None:
    saved(client, files)
    wrong = Paths.new(tmp_path, model=model_count, data=data_count)
    assert client.load(wrong).status is INVALID


@every_type
@pytest.mark.parametrize("number", EACH_FILE)
@pytest.mark.parametrize("mode", [os.O_RDONLY, os.O_WRONLY, os.O_PATH], ids=["read-only", "write-only", "path"])
def test_N_CCH_5_a_model_is_prepared_and_not_saved_to_a_file_that_is_not_open_for_both(
    mode: int, number: int, type: Any, client: CachingClient, files: Paths
) -> None:
    assert_right(client, client.save(chain(ADD, type), files, modes={number: mode}))
    assert not any(files.contents())
    assert client.load(files).status is FAILURE


@every_type
@pytest.mark.parametrize("number", EACH_FILE)
@pytest.mark.parametrize("mode", [os.O_WRONLY, os.O_RDONLY, os.O_PATH], ids=["write-only", "read-only", "path"])
def test_N_CCH_6_loading_from_a_file_that_is_not_open_for_both_is_rejected(
    mode: int, number: int, type: Any, client: CachingClient, files: Paths
) -> None:
    saved(client, files, chain(ADD, type))
    assert client.load(files, modes={number: mode}).status is INVALID


@pytest.mark.parametrize("token", WRONG_TOKENS, ids=["none", "31", "33"])
def test_N_VAL_23_a_token_of_another_length_saves_nothing_and_loads_nothing(
    token: bytes, client: CachingClient, files: Paths
) -> None:
    assert_right(client, client.save(chain(ADD), files, token))
    assert not any(files.contents())
    saved(client, files)
    assert client.load(files, token).status is INVALID


@pytest.mark.parametrize("token", [*WRONG_TOKENS, TOKEN])
def test_N_VAL_23_CACHE_7_a_token_without_files_is_ignored(token: bytes, client: CachingClient) -> None:
    assert_right(client, client.save_to(chain(ADD), [], [], token))


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "device"])
def test_N_CCX_1_only_regular_files_are_written_or_read(
    kind: str, client: CachingClient, files: Paths, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        model, data = files.open(stack)
        strange = odd_descriptor(kind, stack, tmp_path)
        assert_right(client, client.save_to(chain(ADD), model, [strange]))
        assert client.load_from([strange], data).status is INVALID
        assert client.load_from(model, [strange]).status is INVALID


def odd_descriptor(kind: str, stack: ExitStack, folder: Path) -> int:
    if kind == "socket":
        pair = socket.socketpair()
        stack.callback(pair[0].close)
        stack.callback(pair[1].close)
        return pair[0].fileno()
    if kind == "pipe":
        path = folder / "pipe"
        os.mkfifo(path)
        fd = os.open(path, os.O_RDWR)
    else:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY) if kind == "directory" else os.open("/dev/zero", os.O_RDWR)
    stack.callback(os.close, fd)
    return fd


HINT = messages.HintData(0x0001_0005, b"\x01")
PREFIX = messages.PrefixData("com.example.hints", 1)


def test_PREP_10_hints_that_no_device_knows_are_ignored(client: CachingClient, files: Paths) -> None:
    assert_right(client, client.save(chain(ADD), files, hints=(HINT,), extensions=(PREFIX,)))
    assert_right(client, client.load(files))


@pytest.mark.parametrize(
    "fields",
    [
        {"hints": (HINT, HINT), "extensions": (PREFIX,)},
        {"hints": (HINT,)},
        {"hints": (HINT,), "extensions": (messages.PrefixData("no name", 1),)},
        {"extensions": (PREFIX, messages.PrefixData("com.example.other", 1))},
    ],
    ids=["a token twice", "a prefix without a name", "a bad name", "a prefix twice"],
)
def test_N_VAL_22_contradictory_hints_are_rejected(fields: dict[str, Any], client: CachingClient, files: Paths) -> None:
    for path in files.all:
        path.write_bytes(b"untouched")
    rejected = client.save(chain(ADD), files, **fields)
    assert rejected.status is INVALID and "N-VAL-22" in rejected.message
    assert files.contents() == [b"untouched"] * 2


def test_PREP_6_CACHE_8_a_deadline_that_has_passed_ends_a_preparation_from_the_cache(
    client: CachingClient, files: Paths
) -> None:
    saved(client, files)
    late = client.load(files, deadline_ns=time.monotonic_ns())
    assert late.status is ErrorStatus.MISSED_DEADLINE_PERSISTENT
    assert client.load(files, deadline_ns=-2).status is INVALID  # N-VAL-23
    assert_right(client, client.load(files, deadline_ns=time.monotonic_ns() + 10**11))


def test_PREP_11_CACHE_8_a_driver_without_memory_reports_it_in_the_callback(
    client: CachingClient, files: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    saved(client, files)
    with monkeypatch.context() as patch:
        patch.setattr("nnfmq.driver.cache.files.decode_program", no_memory)
        assert client.load(files).status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert_right(client, client.load(files))


def test_DEV_14_a_busy_device_loads_nothing(
    client: CachingClient, files: Paths, request: pytest.FixtureRequest
) -> None:
    saved(client, files)
    busy = client.session.devices.find("reference")
    request.addfinalizer(lambda: client.session.devices.set_status("reference", DeviceStatus.AVAILABLE))
    client.session.devices.set_status("reference", DeviceStatus.BUSY)
    assert client.load(files).status is ErrorStatus.DEVICE_UNAVAILABLE
    assert client.load(files, TOKEN[1:]).status is ErrorStatus.DEVICE_UNAVAILABLE
    assert busy.status is DeviceStatus.BUSY


def test_an_unknown_device_loads_nothing(client: CachingClient, files: Paths) -> None:
    rejected = client.load(saved(client, files), device="nobody")
    assert rejected.status is INVALID and "'nobody'" in rejected.message


# ------------------------------------------------------------------------------------------------ changed files


@every_type
def test_N_CCH_9_the_model_cache_of_another_model_is_rejected(
    type: Any, client: CachingClient, files: Paths, tmp_path: Path
) -> None:
    saved(client, files, chain(ADD, type))
    others = saved(client, Paths.new(tmp_path, "mul"), chain(MUL, type), other(TOKEN))
    files.model[0].write_bytes(others.model[0].read_bytes())
    assert client.load(files).status is FAILURE
    files.data[0].write_bytes(others.data[0].read_bytes())  # and so is all of it, under this token
    assert client.load(files).status is FAILURE


@every_type
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("number", EACH_FILE)
def test_N_CCH_10_N_CCH_12_CACHE_2_CACHE_3_a_flipped_bit_is_rejected(
    number: int, seed: int, type: Any, client: CachingClient, files: Paths
) -> None:
    path = saved(client, files, chain(ADD, type)).all[number]
    content, draw = bytearray(path.read_bytes()), random.Random(seed)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    assert client.load(files).status is FAILURE


@every_type
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("number", EACH_FILE)
def test_N_CCH_11_N_CCH_13_appended_bytes_are_rejected(
    number: int, seed: int, type: Any, client: CachingClient, files: Paths
) -> None:
    path = saved(client, files, chain(ADD, type)).all[number]
    draw = random.Random(seed)
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 256)))
    assert client.load(files).status is FAILURE


@every_type
@pytest.mark.parametrize("seed", SEEDS)
def test_N_CCH_14_another_token_is_rejected(seed: int, type: Any, client: CachingClient, files: Paths) -> None:
    saved(client, files, chain(ADD, type))
    token, draw = bytearray(TOKEN), random.Random(seed)
    token[draw.randrange(32)] ^= 1 << draw.randrange(8)
    assert client.load(files, bytes(token)).status is FAILURE


@pytest.mark.parametrize("number", EACH_FILE)
@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.999])
def test_N_CCX_1_a_truncated_file_is_rejected(part: float, number: int, client: CachingClient, files: Paths) -> None:
    path = saved(client, files).all[number]
    os.truncate(path, int(path.stat().st_size * part))
    assert client.load(files).status is FAILURE


def test_CACHE_6_files_in_each_other_s_place_are_rejected(client: CachingClient, files: Paths) -> None:
    saved(client, files)
    assert client.load(Paths(files.data, files.model)).status is FAILURE


def test_files_saved_twice_are_interchangeable_and_those_of_two_models_are_not(
    client: CachingClient, files: Paths, tmp_path: Path
) -> None:
    saved(client, files)
    again = saved(client, Paths.new(tmp_path, "again"))
    longer = saved(client, Paths.new(tmp_path, "longer"), chain(ADD, length=101))
    assert_right(client, client.load(Paths(files.model, again.data)))
    assert client.load(Paths(files.model, longer.data)).status is FAILURE


def test_N_CCX_1_a_huge_file_is_rejected_unread(client: CachingClient, files: Paths) -> None:
    saved(client, files)
    os.truncate(files.data[0], 1 << 42)  # sparse: its length is all that there is of it
    assert client.load(files).status is FAILURE


def test_N_CCX_1_a_huge_file_with_a_matching_header_is_rejected_unread(client: CachingClient, files: Paths) -> None:
    content = bytearray(saved(client, files).data[0].read_bytes())
    size = 1 << 42
    content[16:24] = struct.pack("<Q", size - 64)
    files.data[0].write_bytes(content)
    os.truncate(files.data[0], size)
    rejected = client.load(files)
    assert rejected.status is FAILURE and "not read" in rejected.message


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda d, patch: patch.setattr(type(d), "version_string", "nnfmq-0.0.0"), id="another version"),
        pytest.param(lambda d, patch: patch.setattr(d, "name", "reference2"), id="another device"),
        pytest.param(
            lambda d, patch: patch.setattr("nnfmq.driver.cache.files.build_identity", lambda: bytes(32)),
            id="another build",
        ),
    ],
)
def test_N_CCX_1_CACHE_12_a_cache_of_another_driver_is_rejected(
    change: Callable[[DeviceBase, pytest.MonkeyPatch], None],
    client: CachingClient,
    files: Paths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved(client, files)
    change(client.session.devices.find("reference"), monkeypatch)
    assert client.load(files).status is FAILURE


def test_CACHE_12_the_processor_s_features_are_part_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    here = installation.read().build_identity
    assert bytes.fromhex(here) == installation.build_identity()
    monkeypatch.setattr(installation, "_cpu_features", lambda: {"none"})
    assert installation.read().build_identity != here


def test_N_CCX_1_a_cache_of_another_user_s_key_is_rejected(
    client: CachingClient, files: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(client, files)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert client.load(files).status is FAILURE  # without any key
    saved(client, Paths.new(tmp_path, "own"))
    assert client.load(files).status is FAILURE


# ------------------------------------------------------------------------------------------------ changed meanwhile


def copying(source: Paths, target: Paths) -> threading.Thread:
    """Begin to copy model caches over others, in place."""

    def copy() -> None:
        for come_from, go_to in zip(source.model, target.model, strict=True):
            with open(go_to, "r+b", buffering=0) as file:
                file.write(come_from.read_bytes())

    thread = threading.Thread(target=copy)
    thread.start()
    return thread


def assert_rejected_or_correct(client: CachingClient, loaded: Loaded) -> None:
    if loaded.status is not FAILURE:
        assert_right(client, loaded)
        client.session.models.pop(loaded.model_id)


@every_type
def test_N_CCH_7_files_that_are_swapped_while_they_are_saved(
    type: Any, client: CachingClient, files: Paths, tmp_path: Path
) -> None:
    others = saved(client, Paths.new(tmp_path, "mul"), chain(MUL, type), other(TOKEN))
    for _ in range(ROUNDS):
        thread = copying(others, files)
        assert_right(client, client.save(chain(ADD, type), files))
        thread.join()
        assert_rejected_or_correct(client, client.load(files))


@every_type
def test_N_CCH_8_files_that_are_swapped_while_they_are_loaded(
    type: Any, client: CachingClient, files: Paths, tmp_path: Path
) -> None:
    others = saved(client, Paths.new(tmp_path, "mul"), chain(MUL, type), other(TOKEN))
    good = saved(client, files, chain(ADD, type)).contents()
    for _ in range(ROUNDS):
        for path, content in zip(files.all, good, strict=True):
            path.write_bytes(content)
        thread = copying(others, files)
        assert_rejected_or_correct(client, client.load(files))
        thread.join()
        assert client.load(files).status is FAILURE  # the swap is complete now


# ------------------------------------------------------------------------------------------------ nothing to save


class Plain(DeviceBase):
    """A device that saves nothing: the least that one is."""

    name = "reference"

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        return True

    def compile(self, model: Model) -> Program:
        return interpreter.prepare(model)


class Saving(Plain):
    """A device with two model files and no data file, in its own format."""

    restored: CacheContents | None = None
    contents = CacheContents((b"first", b"second"))

    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        return NumberOfCacheFiles(2, 0)

    def save(self, model: Model, program: Any) -> CacheContents | None:
        return self.contents

    def restore(self, contents: CacheContents) -> tuple[Model, Program]:
        self.restored = contents
        return chain(ADD), interpreter.prepare(chain(ADD))


def test_N_CCH_15_DEV_6_a_device_without_caching_declares_no_files_and_loads_nothing(
    client: CachingClient, files: Paths, tmp_path: Path
) -> None:
    client.session.devices = DeviceRegistry([Plain()])
    info = client.session.devices.find("reference").info
    assert (info.model_cache_files, info.data_cache_files) == (0, 0)
    assert_right(client, client.save(chain(ADD), files))
    assert not any(files.contents())
    assert client.load(files).status is FAILURE
    assert client.load(Paths.new(tmp_path, model=0, data=0)).status is FAILURE


def test_a_device_gets_back_what_it_saved_in_its_order(client: CachingClient, tmp_path: Path) -> None:
    saving = Saving()
    client.session.devices = DeviceRegistry([saving])
    two = Paths.new(tmp_path, model=2, data=0)
    saved(client, two)
    assert saving.restored is not None
    assert [bytes(file) for file in saving.restored.model] == [b"first", b"second"]
    assert client.load(Paths(two.model[::-1], ())).status is FAILURE


@pytest.mark.parametrize("change", ["nothing", "too little", "an error"])
def test_CACHE_9_CACHE_4_files_are_empty_if_the_device_does_not_save_the_model(
    change: str, client: CachingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.session.devices = DeviceRegistry([Saving()])
    two = saved(client, Paths.new(tmp_path, model=2, data=0))

    def save(*_: object) -> CacheContents | None:
        if change == "an error":
            raise RuntimeError("out of order")
        return None if change == "nothing" else CacheContents((b"one",))

    monkeypatch.setattr(Saving, "save", save)
    assert_right(client, client.save(chain(ADD), two))
    assert not any(two.contents())
    assert client.load(two).status is FAILURE


def test_CACHE_9_the_interpreter_does_not_save_a_model_with_extensions() -> None:
    plain = chain(ADD)
    named = Model(plain.main, operand_values=plain.operand_values, extensions=(ExtensionNameAndPrefix("a.b", 1),))
    assert encode_program(plain, ()) is not None
    assert encode_program(named, ()) is None


def test_files_are_not_changed_if_the_model_is_not_prepared(client: CachingClient, files: Paths) -> None:
    files.data[0].write_bytes(b"mine")
    assert client.save(unsupported_model(), files).status is FAILURE
    assert client.save(invalid_model(), files).status is INVALID
    assert files.contents() == [b"", b"mine"]


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_CACHE_4_on_a_full_disk_the_model_is_prepared_and_not_saved(
    writes: int, client: CachingClient, files: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(client, files)
    left = [writes]
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "no space")
        left[0] -= 1
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert_right(client, client.save(chain(ADD), files))
    assert not any(files.contents())
    assert client.load(files).status is FAILURE


def test_CACHE_5_a_sealed_file_is_not_saved_to(client: CachingClient) -> None:
    fds = [os.memfd_create("cache", os.MFD_ALLOW_SEALING) for _ in range(2)]
    try:
        fcntl.fcntl(fds[1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert_right(client, client.save_to(chain(ADD), fds[:1], fds[1:]))
        assert client.load_from(fds[:1], fds[1:]).status is FAILURE
    finally:
        for fd in fds:
            os.close(fd)


def test_a_model_that_the_device_no_longer_supports_is_not_restored(
    client: CachingClient, files: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(client, files)
    monkeypatch.setattr(InterpreterDevice, "supports", lambda *_: False)
    assert client.load(files).status is FAILURE


def test_chains_of_both_operations_return_different_results() -> None:
    """The results differ in both types, so that the tests above can distinguish the two models."""
    for type in (FLOAT, QUANT8):
        results = []
        for code in (ADD, MUL):
            out = np.zeros(1, np.float32 if type == FLOAT else np.uint8)
            interpreter.prepare(chain(code, type)).execute([np.ones(1, out.dtype)], [out])
            results.append(float(out[0]))
        assert results == [expected_result(ADD), expected_result(MUL)] == [101.0, 1.0]
