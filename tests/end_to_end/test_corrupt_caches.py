"""Corrupt or unsuitable cache files, through a driver process.

After each the same client prepares the model again and gets the right result.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.caching import TOKEN, CachingClient, Loaded, Paths, chain, expected_result
from support.drivers import LIMIT_S, Daemon
from support.models import pool_bytes, relu_model, request_for, weighty_model
from support.protocol import ProtocolPeer

from nnfmq.base.channel import Channel
from nnfmq.base.memory import Memory
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import ExecutionConfig, Model, OperationType
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole

NONE, FAILURE, INVALID = ErrorStatus.NONE, ErrorStatus.GENERAL_FAILURE, ErrorStatus.INVALID_ARGUMENT
ADD, MUL = OperationType.ADD, OperationType.MUL
FILES = [0, 1]  # the model's, the data's
SEEDS = range(5)
ROUNDS = 100


class OverDaemon(CachingClient):
    """A caching client of a driver process."""

    def __init__(self, daemon: Daemon) -> None:
        self.peer = ProtocolPeer(
            Channel.connect(daemon.path, time.monotonic_ns() + int(LIMIT_S * 1e9)), PeerRole.CLIENT
        )
        self._calls = itertools.count(1)
        self.peer.send(messages.Hello(control_protocol.PROTOCOL, "AIDL v4", "caching"))
        self.peer.receive(messages.HelloReply)

    def result(self, model_id: int, value: float = 1.0) -> float:
        """Execute one of the chains of floats, and release it."""
        model = chain(ADD)
        with ExitStack() as stack:
            source, sink = (stack.enter_context(Memory.create(size)) for size in pool_bytes(model))
            np.frombuffer(source.view, np.float32, 1)[:] = value
            request = messages.request_to_data(request_for(model, (source, sink)))
            config = messages.config_to_data(ExecutionConfig())
            call = messages.Execute(next(self._calls), model_id, request, config, -1)
            self.peer.send(call, [source.fileno(), sink.fileno()])
            assert self.peer.receive(messages.Executed).status is NONE
            self.peer.send(messages.ReleaseModel(next(self._calls), model_id))
            assert self.peer.receive(messages.Reply).status is NONE
            return float(np.frombuffer(sink.view, np.float32, 1)[0])

    def close(self) -> None:
        """Close the connection."""
        self.peer.close()


@pytest.fixture(scope="module")
def speaking(shared_daemon: Daemon) -> Iterator[OverDaemon]:
    client = OverDaemon(shared_daemon)
    yield client
    client.close()


@pytest.fixture
def client(speaking: OverDaemon, tmp_path: Path) -> Iterator[OverDaemon]:
    """Return the one client of all tests, which saves and loads as it should after each."""
    yield speaking
    files = saved(speaking, Paths.new(tmp_path, "afterwards"))
    assert_right(speaking, speaking.load(files))


@pytest.fixture
def files(tmp_path: Path) -> Paths:
    return Paths.new(tmp_path)


def assert_right(client: OverDaemon, loaded: Loaded, code: OperationType = ADD) -> None:
    assert loaded.status is NONE, loaded.message
    assert client.result(loaded.model_id) == expected_result(code)


def saved(client: OverDaemon, files: Paths, model: Model | None = None, token: bytes = TOKEN) -> Paths:
    """Save a chain, and check that something was."""
    loaded = client.save(model or chain(ADD), files, token)
    assert loaded.status is NONE and all(files.contents())
    client.result(loaded.model_id)
    return files


HEADER_BYTES = 64  # of each file: it contains the digest


def test_CACHE_1_the_model_file_describes_the_model_and_the_data_file_has_its_constants(
    client: OverDaemon, tmp_path: Path
) -> None:
    side, files = 64, []
    for value in (0.1234567, 7.6543217):
        path = Paths.new(tmp_path, f"of {value}")
        loaded = client.save(weighty_model(value, side), path)
        assert loaded.status is NONE
        weights, (model, data) = np.full((side, side), value, np.float32).tobytes(), path.contents()
        assert weights in data and weights[:4] not in model
        files.append((model[HEADER_BYTES:], data[HEADER_BYTES:]))
    assert files[0][0] == files[1][0] and files[0][1] != files[1][1]
    other = Paths.new(tmp_path, "of a RELU")
    assert client.save(relu_model(), other).status is NONE
    assert other.contents()[0][HEADER_BYTES:] != files[0][0]


@pytest.mark.parametrize("number", FILES)
@pytest.mark.parametrize("mode", [os.O_WRONLY, os.O_RDONLY], ids=["write-only", "read-only"])
def test_N_CCH_5_a_model_is_prepared_and_not_saved_to_a_file_that_is_not_open_for_both(
    mode: int, number: int, client: OverDaemon, files: Paths
) -> None:
    assert_right(client, client.save(chain(ADD), files, modes={number: mode}))
    assert not any(files.contents())
    assert client.load(files).status is FAILURE


@pytest.mark.parametrize("number", FILES)
@pytest.mark.parametrize("mode", [os.O_WRONLY, os.O_RDONLY], ids=["write-only", "read-only"])
def test_CACHE_5_N_CCH_6_loading_from_a_file_that_is_not_open_for_both_is_rejected(
    mode: int, number: int, client: OverDaemon, files: Paths
) -> None:
    saved(client, files)
    assert client.load(files, modes={number: mode}).status is INVALID


def copying(source: Paths, target: Paths) -> threading.Thread:
    """Begin to copy a model cache over another, in place."""

    def copy() -> None:
        with open(target.model[0], "r+b", buffering=0) as file:
            file.write(source.model[0].read_bytes())

    thread = threading.Thread(target=copy)
    thread.start()
    return thread


def assert_rejected_or_correct(client: OverDaemon, loaded: Loaded) -> None:
    if loaded.status is not FAILURE:
        assert_right(client, loaded)


def test_N_CCH_7_N_CCH_8_concurrently_swapped_files_are_rejected_or_correct(
    client: OverDaemon, files: Paths, tmp_path: Path
) -> None:
    others = saved(client, Paths.new(tmp_path, "mul"), chain(MUL), TOKEN[::-1])
    for _ in range(ROUNDS):
        thread = copying(others, files)
        assert_right(client, client.save(chain(ADD), files))
        thread.join()
        assert_rejected_or_correct(client, client.load(files))
    good = saved(client, files).contents()
    for _ in range(ROUNDS):
        for path, content in zip(files.all, good, strict=True):
            path.write_bytes(content)
        thread = copying(others, files)
        assert_rejected_or_correct(client, client.load(files))
        thread.join()
        assert client.load(files).status is FAILURE  # the swap is complete now


def test_N_CCH_9_the_model_cache_of_another_model_is_rejected(client: OverDaemon, files: Paths, tmp_path: Path) -> None:
    saved(client, files)
    others = saved(client, Paths.new(tmp_path, "mul"), chain(MUL), TOKEN[::-1])
    files.model[0].write_bytes(others.model[0].read_bytes())
    assert client.load(files).status is FAILURE
    files.data[0].write_bytes(others.data[0].read_bytes())
    assert client.load(files).status is FAILURE
    assert_right(client, client.load(others, TOKEN[::-1]), MUL)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("number", FILES, ids=["N-CCH-10", "N-CCH-12"])
def test_a_flipped_bit_is_rejected(number: int, seed: int, client: OverDaemon, files: Paths) -> None:
    path = saved(client, files).all[number]
    content, draw = bytearray(path.read_bytes()), random.Random(seed)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    assert client.load(files).status is FAILURE


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("number", FILES, ids=["N-CCH-11", "N-CCH-13"])
def test_appended_bytes_are_rejected(number: int, seed: int, client: OverDaemon, files: Paths) -> None:
    path = saved(client, files).all[number]
    draw = random.Random(seed)
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 256)))
    assert client.load(files).status is FAILURE
