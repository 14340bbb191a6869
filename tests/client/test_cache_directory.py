"""Caching in a directory of the application: files, tokens, and preparing from the cache first."""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from support.caching import TOKEN, Paths, chain
from support.hints import with_extension
from support.models import unsupported_model

from nnfmq.base.memory import Memory
from nnfmq.client.connection.cache_directory import CacheDirectory, compilation_token, file_names, model_token
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.device import Device
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, MissedDeadline
from nnfmq.hal.types import (
    ExecutionPreference,
    ExtensionNameAndPrefix,
    LifeTime,
    Model,
    OperationType,
    Priority,
    TokenValuePair,
)
from nnfmq.serialize import messages
from nnfmq.serialize.messages import DeviceInfo
from nnfmq.serialize.models import encode_model

ADD = chain(OperationType.ADD)
MUL = chain(OperationType.MUL)
ONE = np.ones(1, np.float32)
INFO = DeviceInfo("reference", 2, "nnfmq-1", 8, 0, (), 2, 1)  # type: ignore[arg-type]
HINT = TokenValuePair(0x0001_0005, b"\x01")
EXTENSION = ExtensionNameAndPrefix("com.example.hints", 1)


class Counting:
    """A device over a real session, and how often the session compiled and restored."""

    def __init__(self, connection: Connection, session: Session, patch: pytest.MonkeyPatch) -> None:
        served = session.devices.find("reference")
        self.device = with_extension(Device(served.info, connection), EXTENSION.name)
        self.compiled = self.restored = 0
        compile, restore = served.compile, served.restore

        def counted_compile(model: Model) -> Any:
            self.compiled += 1
            return compile(model)

        def counted_restore(contents: Any) -> Any:
            self.restored += 1
            return restore(contents)

        patch.setattr(served, "compile", counted_compile)
        patch.setattr(served, "restore", counted_restore)

    def prepare(self, model: Model = ADD, **options: Any) -> float:
        """Prepare a model, and return the prepared model."""
        with self.device.prepare(model, **options) as prepared:
            return float(prepared.execute(ONE)[0][0])


@pytest.fixture
def served(real: tuple[Connection, Session], monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(*real, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "caches"
    made.mkdir()
    return made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


# ------------------------------------------------------------------------------------------------ a folder


def test_CACHE_11_the_second_preparation_comes_from_the_cache(served: Counting, folder: Path) -> None:
    for _ in range(3):
        assert served.prepare(cache_dir=folder, token=TOKEN) == 101.0
    assert (served.compiled, served.restored) == (1, 2)
    assert len(os.listdir(folder)) == 2
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_without_a_token_the_model_is_identified_by_its_content(served: Counting, folder: Path) -> None:
    assert [served.prepare(model, cache_dir=folder) for model in (ADD, MUL, ADD, MUL)] == [101.0, 1.0, 101.0, 1.0]
    assert (served.compiled, served.restored) == (2, 2)


def test_without_a_folder_nothing_is_cached(served: Counting) -> None:
    assert [served.prepare() for _ in range(2)] == [101.0, 101.0]
    assert (served.compiled, served.restored) == (2, 0)


@pytest.mark.parametrize(
    "option",
    [
        {"preference": ExecutionPreference.LOW_POWER},
        {"priority": Priority.HIGH},
        {"token": bytes(32)},
        {"hints": (HINT,), "extensions": (EXTENSION,)},
    ],
    ids=lambda option: next(iter(option)),
)
def test_CACHE_10_each_compilation_of_a_model_has_separate_files(
    option: dict[str, Any], served: Counting, folder: Path
) -> None:
    for _ in range(2):
        served.prepare(cache_dir=folder, token=TOKEN)
        served.prepare(cache_dir=folder, **{"token": TOKEN, **option})
    assert (served.compiled, served.restored) == (2, 2)
    assert len(os.listdir(folder)) == 4


@pytest.mark.parametrize("damage", ["changed", "emptied", "one is missing", "not to be opened"])
def test_CACHE_11_an_unusable_cache_is_replaced(
    damage: str, served: Counting, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served.prepare(cache_dir=folder, token=TOKEN)
    path = sorted(folder.iterdir())[0]
    if damage == "changed":
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    elif damage == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()
        if damage == "not to be opened":
            path.symlink_to("/dev/null")
    with caplog.at_level(logging.INFO, "nnfmq.client"):
        assert [served.prepare(cache_dir=folder, token=TOKEN) for _ in range(2)] == [101.0, 101.0]
    assert (served.compiled, served.restored) == (2, 1)
    assert caplog.records or damage == "one is missing"
    assert all(path.is_file() and not path.is_symlink() for path in folder.iterdir())


def test_CACHE_4_a_missing_folder_does_not_affect_the_preparation(
    served: Counting, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert served.prepare(cache_dir=folder / "none") == 101.0
    assert "no directory" in caplog.text
    assert not (folder / "none").exists()


def test_CACHE_4_an_unwritable_folder_does_not_affect_the_preparation(
    served: Counting, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served.prepare(cache_dir=folder, token=TOKEN)
    for path in folder.iterdir():
        path.unlink()
        path.mkdir()  # in place of the file, which therefore cannot be opened, unlinked or created
    assert served.prepare(cache_dir=folder, token=TOKEN) == 101.0
    assert "cannot be opened" in caplog.text
    assert "cannot be created" in caplog.text


@pytest.mark.parametrize("token", [b"", TOKEN[1:], TOKEN + b"x"])
def test_N_VAL_23_an_application_s_token_has_32_bytes(token: bytes, served: Counting, folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="32"):
        served.prepare(cache_dir=folder, token=token)
    assert not os.listdir(folder)


def test_a_model_that_cannot_be_prepared_leaves_no_files(served: Counting, folder: Path) -> None:
    with pytest.raises(GeneralFailure):
        served.device.prepare(unsupported_model(), cache_dir=folder)
    assert not os.listdir(folder)


def test_a_device_that_saves_nothing_gets_no_files(served: Counting, folder: Path) -> None:
    info = msgspec.structs.replace(served.device.info, model_cache_files=0, data_cache_files=0)
    device = replace(served.device, info=info)
    device.prepare(ADD, cache_dir=folder).close()
    assert not os.listdir(folder)


def test_files_that_another_process_has_opened_are_not_truncated(served: Counting, folder: Path) -> None:
    served.prepare(cache_dir=folder, token=TOKEN)
    paths = sorted(folder.iterdir())
    with open(paths[0], "rb") as opened:
        content = opened.read()
        paths[1].unlink()
        served.prepare(cache_dir=folder, token=TOKEN)  # replaces the cache
        opened.seek(0)
        assert opened.read() == content


def test_pools_are_saved_with_the_model(served: Counting, folder: Path, stack: ExitStack) -> None:
    """The constants are in shared memory, which the second preparation does not need."""
    model = with_pool(stack)
    assert [served.prepare(model, cache_dir=folder) for _ in range(2)] == [101.0, 101.0]
    assert (served.compiled, served.restored) == (1, 1)


def with_pool(stack: ExitStack) -> Model:
    """Return ADD with its constants in a pool."""
    pool = stack.enter_context(closing(Memory.create(len(ADD.operand_values))))
    pool.view[:] = ADD.operand_values
    operands = tuple(
        replace(o, lifetime=LifeTime.CONSTANT_REFERENCE) if o.lifetime == LifeTime.CONSTANT_COPY else o
        for o in ADD.main.operands
    )
    return Model(replace(ADD.main, operands=operands), pools=(pool,))


# ------------------------------------------------------------------------------------------------ files of the caller


def test_caches_are_saved_to_and_loaded_from_the_caller_s_fds(
    served: Counting, tmp_path: Path, stack: ExitStack
) -> None:
    model_cache, data_cache = Paths.new(tmp_path).open(stack)
    served.prepare(token=TOKEN, model_cache=model_cache, data_cache=data_cache)
    with served.device.prepare_from_cache(TOKEN, model_cache, data_cache, model=ADD) as prepared:
        assert prepared.execute(ONE)[0][0] == 101.0
    assert (served.compiled, served.restored) == (1, 1)
    with pytest.raises(GeneralFailure):
        served.device.prepare_from_cache(bytes(32), model_cache, data_cache, model=ADD)
    with pytest.raises(InvalidArgument):
        served.device.prepare_from_cache(TOKEN, model_cache, [], model=ADD)
    with pytest.raises(InvalidArgument):
        served.device.prepare_from_cache(TOKEN[1:], model_cache, data_cache, model=ADD)
    with pytest.raises(MissedDeadline):
        served.device.prepare_from_cache(TOKEN, model_cache, data_cache, model=ADD, timeout=0)


def test_a_model_is_prepared_from_its_cache_with_its_inputs_and_outputs_only(
    served: Counting, tmp_path: Path, stack: ExitStack
) -> None:
    model_cache, data_cache = Paths.new(tmp_path).open(stack)
    with served.device.prepare(ADD, token=TOKEN, model_cache=model_cache, data_cache=data_cache) as first:
        kept = SimpleNamespace(inputs=first.inputs, outputs=first.outputs)
    with served.device.prepare_from_cache(TOKEN, model_cache, data_cache, model=kept) as prepared:
        assert prepared.execute(ONE)[0][0] == 101.0
    wrong = SimpleNamespace(inputs=first.inputs, outputs=first.outputs * 2)
    with (
        served.device.prepare_from_cache(TOKEN, model_cache, data_cache, model=wrong) as prepared,
        pytest.raises(InvalidArgument),
    ):
        prepared.execute(ONE)


def test_a_folder_and_fds_together_are_rejected(
    served: Counting, folder: Path, tmp_path: Path, stack: ExitStack
) -> None:
    model_cache, data_cache = Paths.new(tmp_path).open(stack)
    with pytest.raises(InvalidArgument, match="not both"):
        served.device.prepare(ADD, cache_dir=folder, model_cache=model_cache, data_cache=data_cache)


def test_N_VAL_22_hints_are_validated_by_the_driver(served: Counting) -> None:
    with pytest.raises(InvalidArgument, match="N-VAL-22"):
        served.prepare(hints=(HINT, HINT), extensions=(EXTENSION,))
    assert served.prepare(hints=(HINT,), extensions=(EXTENSION,)) == 101.0


# ------------------------------------------------------------------------------------------------ tokens and names


def prepare_message(**changes: Any) -> messages.PrepareModel:
    plain = messages.PrepareModel(1, "reference", 1, 1, -1, encode_model(ADD)[0])
    return msgspec.structs.replace(plain, **changes)


def test_CACHE_10_the_token_is_a_hash_of_everything_that_a_compilation_depends_on() -> None:
    digest = hashlib.sha256()
    for field in (TOKEN, b"reference", b"nnfmq-1", struct.pack("<iiI", 1, 1, 0)):
        digest.update(struct.pack("<Q", len(field)) + field)
    assert compilation_token(TOKEN, INFO, prepare_message()) == digest.digest()


def test_CACHE_10_the_token_changes_with_each_of_its_inputs() -> None:
    device = msgspec.structs.replace
    hint = (messages.HintData(1 << 16, b"v"),)
    tokens = [
        compilation_token(TOKEN, INFO, prepare_message()),
        compilation_token(TOKEN[::-1], INFO, prepare_message()),
        compilation_token(TOKEN, device(INFO, name="referencen", version="nfmq-1"), prepare_message()),
        compilation_token(TOKEN, device(INFO, version="nnfmq-2"), prepare_message()),
        compilation_token(TOKEN, INFO, prepare_message(preference=2)),
        compilation_token(TOKEN, INFO, prepare_message(priority=2)),
        compilation_token(TOKEN, INFO, prepare_message(hints=hint)),
        compilation_token(TOKEN, INFO, prepare_message(extensions=(messages.PrefixData("a.b", 1),))),
    ]
    assert len(set(tokens)) == len(tokens)


def test_CACHE_10_file_names_encode_the_token_in_letters_low_half_byte_first() -> None:
    token = bytes([0x01, 0xF2]) + bytes(30)
    assert file_names(token, 2, 1) == (["BACP" + "A" * 60 + "10", "BACP" + "A" * 60 + "11"], ["BACP" + "A" * 60 + "20"])
    folder = CacheDirectory.of("/caches", INFO, prepare_message(), TOKEN)
    names = file_names(compilation_token(TOKEN, INFO, prepare_message()), 2, 1)
    assert [[path.name for path in paths] for paths in (folder.model, folder.data)] == list(names)
    assert {path.parent for path in folder.model + folder.data} == {Path("/caches")}


def test_a_model_s_default_token_depends_on_its_bytes_and_its_pools(stack: ExitStack) -> None:
    model = with_pool(stack)
    data, pools = encode_model(model)
    message = prepare_message(model=data)
    first = model_token(message, pools)
    assert first == hashlib.sha256(data + ADD.operand_values).digest()
    pools[0].view[0] ^= 1
    assert model_token(message, pools) != first
