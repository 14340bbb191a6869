"""A model repository that violates the protocol loses its connection, and harms no client."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace
from support.descriptors import no_more_descriptors
from support.drivers import one, until
from support.fake_repository import FakeRepository, describe
from support.models import plus_model
from support.small_models import with_constants

import nnfmq
from nnfmq.base.channel import Channel
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.serialize.messages import MemoryData
from nnfmq.serialize.repository_protocol import (
    ModelDescription,
    ModelList,
    ModelOpened,
    OpenModel,
    RepositoryMessage,
    VersionChanged,
)

GOOD = describe("plus", 1, plus_model(1))
MEMORY = (MemoryData(4096),)


def info(shape: Sequence[int] = (1,), dtype: str = "float32", zero_point: int = 0) -> TensorInfo:
    return TensorInfo("x", tuple(shape), dtype, 0.0, zero_point)


def opened(description: ModelDescription | None, status: ErrorStatus = ErrorStatus.NONE) -> ModelOpened:
    """Return a reply, whose call id is set later."""
    return ModelOpened(0, status, "no", description)


BAD: dict[str, ModelOpened] = {
    "another model": opened(replace(GOOD, name="minus")),
    "version 0": opened(replace(GOOD, version=0)),
    "no model": opened(None),
    "an unknown dtype": opened(replace(GOOD, inputs=(info(dtype="object"),))),
    "a negative size": opened(replace(GOOD, inputs=(info((-1,)),))),
    "a huge size": opened(replace(GOOD, outputs=(info((2**40,)),))),
    "a huge rank": opened(replace(GOOD, outputs=(info((1,) * 65),))),
    "an unknown preference": opened(replace(GOOD, preference=9)),
    "an unknown priority": opened(replace(GOOD, priority=9)),
    "too few initial values": opened(replace(GOOD, states=(StateInfo(info(), b"123"),))),
    "an impossible zero point": opened(replace(GOOD, states=(StateInfo(info(dtype="uint8", zero_point=300)),))),
    "the status of a dead driver": opened(None, ErrorStatus.DEAD_OBJECT),
}


@pytest.mark.parametrize("reply", BAD.values(), ids=BAD)
def test_an_invalid_reply_is_a_protocol_error(
    reply: ModelOpened, repository: FakeRepository, client: nnfmq.Client
) -> None:
    def answer(repository: FakeRepository, channel: Channel, message: RepositoryMessage) -> bool:
        assert isinstance(message, OpenModel)
        repository.answer = None
        repository.send(channel, replace(reply, call=message.call))
        return True

    repository.answer = answer
    with pytest.raises(nnfmq.ProtocolError):
        client.model("plus")
    with client.model("plus") as model:  # over a new connection
        assert model.execute(one(5)) == (one(6),)
    assert repository.connections == 2


def test_a_reply_of_another_kind_is_a_protocol_error(repository: FakeRepository, client: nnfmq.Client) -> None:
    def answer(repository: FakeRepository, channel: Channel, message: RepositoryMessage) -> bool:
        repository.send(channel, ModelList(message.call, ()))  # type: ignore[attr-defined]
        return True

    repository.answer = answer
    with pytest.raises(nnfmq.ProtocolError, match="replied to a OpenModel with a ModelList"):
        client.model("plus")


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\xa9ListModels\x01\x02"])
def test_bytes_that_are_no_message_end_the_connection(
    data: bytes, repository: FakeRepository, client: nnfmq.Client
) -> None:
    def answer(_repository: FakeRepository, channel: Channel, _message: RepositoryMessage) -> bool:
        channel.send(data or b"\0" * 70000)
        return True

    repository.answer = answer
    with pytest.raises(nnfmq.ProtocolError):
        client.models()


def test_a_reply_that_nobody_waits_for_is_dropped_with_its_memories(
    repository: FakeRepository, client: nnfmq.Client
) -> None:
    def answer(repository: FakeRepository, channel: Channel, message: RepositoryMessage) -> bool:
        with nnfmq.Memory.create(4096) as memory:
            for call in (77, 78):
                repository.send(
                    channel, ModelOpened(call, ErrorStatus.NONE, "", replace(GOOD, pools=MEMORY)), [memory.fileno()]
                )
        return False

    repository.answer = answer
    assert [entry.name for entry in client.models()] == ["plus"]


BAD_MEMORIES: dict[str, Callable[[], int]] = {
    "too short": lambda: os.memfd_create("short", os.MFD_CLOEXEC),
    "a pipe": lambda: os.eventfd(0, os.EFD_CLOEXEC),
}


@pytest.mark.parametrize("make", BAD_MEMORIES.values(), ids=BAD_MEMORIES)
def test_an_invalid_memory_is_a_protocol_error(
    make: Callable[[], int], repository: FakeRepository, client: nnfmq.Client
) -> None:
    def answer(repository: FakeRepository, channel: Channel, message: RepositoryMessage) -> bool:
        assert isinstance(message, OpenModel)
        with nnfmq.Memory.create(4096) as memory:
            bad = make()
            reply = ModelOpened(message.call, ErrorStatus.NONE, "", replace(GOOD, pools=MEMORY * 3))
            repository.send(channel, reply, [memory.fileno(), bad, memory.fileno()])
            os.close(bad)
        return True

    repository.answer = answer
    with pytest.raises(nnfmq.ProtocolError, match="invalid memory"):
        client.model("plus")


def test_a_description_that_does_not_fit_the_model_is_an_error_of_the_request(
    repository: FakeRepository, client: nnfmq.Client
) -> None:
    """The driver validates requests against the model that it has, whatever the client believes."""
    repository.publish("wrong", 1, plus_model(1), outputs=(info((1000,)),))
    with client.model("wrong") as model, pytest.raises(nnfmq.NnfmqError):
        model.execute(one(5))

    def send_garbage(repository: FakeRepository, channel: Channel, message: RepositoryMessage) -> bool:
        assert isinstance(message, OpenModel)
        garbage = replace(GOOD, name="garbage", model=b"\xc1")
        repository.send(channel, ModelOpened(message.call, ErrorStatus.NONE, "", garbage))
        return True

    repository.answer = send_garbage
    with pytest.raises(nnfmq.InvalidArgument, match="not a model"):
        client.model("garbage")


def test_announcements_of_unknown_models_and_versions_are_ignored(
    repository: FakeRepository, client: nnfmq.Client
) -> None:
    def answer(repository: FakeRepository, channel: Channel, message: RepositoryMessage) -> bool:
        for name, version in (("minus", 3), ("plus", 0), ("plus", 1)):
            repository.send(channel, VersionChanged(name, version))
        return False

    with client.model("plus") as model:
        repository.answer = answer
        client.models()
        repository.answer = None
        repository.publish("plus", 2, plus_model(2))
        until(lambda: model.version == 2, "the model moves")


def test_a_client_without_free_fds_gets_the_model_later(repository: FakeRepository, client: nnfmq.Client) -> None:
    with nnfmq.Memory.create(4) as pool:
        pool.view[:] = np.float32(7).tobytes()
        repository.publish("seven", 1, with_constants(pool))
        client.models()
        with no_more_descriptors(), pytest.raises(nnfmq.ResourceExhaustedTransient, match="no free fds"):
            client.model("seven")
        with client.model("seven") as model:
            assert model.execute(one(5)) == (one(12),)
    assert repository.connections == 1


def test_a_bug_of_the_client_ends_only_the_connection(
    repository: FakeRepository, client: nnfmq.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_message: VersionChanged) -> None:
        raise ZeroDivisionError

    with client.model("plus") as model:
        (names,) = client._named_models.values()
        connection = names._connection
        assert connection is not None
        connection._on_change = fail
        repository.publish("plus", 2, plus_model(2))
        until(lambda: model.version == 2, "the client has connected again")
        assert not connection.is_open
    assert any("the callback for fd" in text for text in caplog.messages)
