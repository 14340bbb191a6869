"""A driver's session in a thread of this process, for tests that exchange messages with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from nnfmq.base.channel import Channel
from nnfmq.base.memory import Memory
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.session.calls import HANDLERS
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import (
    ExecutionConfig,
    ExecutionPreference,
    Model,
    OperandType,
    OperationType,
    Priority,
    Request,
)
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.models import encode_model
from support import control_flow_models, models
from support.executors import LIMIT_S, Held
from support.protocol import ProtocolPeer

ADD = models.add_model()
NONE = ErrorStatus.NONE
HELLO = messages.Hello(control_protocol.PROTOCOL, "AIDL v4", "test")
NO_LIMIT = -1


class Running:
    """A session that runs in a thread of this process, and its client's end of the channel."""

    def __init__(self) -> None:
        driver_end, client_end = Channel.pair()
        self.client = ProtocolPeer(client_end, PeerRole.CLIENT)
        self.session = Session(driver_end, "driver under test", HANDLERS)
        self.thread = threading.Thread(target=self.session.run, name="session under test")
        self.thread.start()

    def ends(self) -> bool:
        self.thread.join(LIMIT_S)
        return not self.thread.is_alive()

    def close(self) -> None:
        self.client.close()
        assert self.ends()
        for burst in self.session.bursts.values():  # a driver process leaves them to the kernel
            burst.close()
        self.session.join()


def assert_alive(client: ProtocolPeer) -> None:
    """Check that the driver replies, and that no other message precedes the reply."""
    client.send(messages.ListDevices(999_999))
    assert client.receive(messages.DeviceList).call == 999_999


def prepare(client: ProtocolPeer, model: Model = ADD, call: int = 500) -> int:
    data, pools = encode_model(model)
    assert not pools
    client.send(prepare_message(call, data))
    assert client.receive(messages.Reply).status is NONE
    ready = client.receive(messages.PreparedModelReady)
    assert ready.status is NONE
    return ready.model_id


def prepare_message(call: int = 1, model: bytes | None = None, **changes: Any) -> messages.PrepareModel:
    data = encode_model(ADD)[0] if model is None else model
    message = messages.PrepareModel(
        call, "reference", ExecutionPreference.SUSTAINED_SPEED, Priority.MEDIUM, NO_LIMIT, data
    )
    replaced: messages.PrepareModel = replace_message(message, **changes)
    return replaced


KNOWN = set(OperandType), set(OperationType)


def encoded(model: Model) -> bytes:
    """Return a model's bytes; it may contain codes that nnfmq's encoder rejects."""
    main = model.main
    operands = tuple(replace(o, type=OperandType.FLOAT32) if o.type not in KNOWN[0] else o for o in main.operands)
    operations = tuple(replace(o, type=OperationType.ADD) if o.type not in KNOWN[1] else o for o in main.operations)
    written = replace(model, main=replace(main, operands=operands, operations=operations))
    data = msgspec.msgpack.decode(encode_model(written)[0])
    codes: list[list[int]] = [[int(o.type) for o in main.operands], [int(o.type) for o in main.operations]]
    for place, types in enumerate(codes):
        for position, code in enumerate(types):
            data[0][place][position][0] = code
    return msgspec.msgpack.encode(data)


def statuses_of(
    client: ProtocolPeer, data: bytes, pools: Sequence[messages.MemoryData] = (), fds: Sequence[int] = ()
) -> tuple[ErrorStatus, ErrorStatus, int, ErrorStatus]:
    """Return the statuses of getSupportedOperations and prepareModel's callback, the model id, and the reply status."""
    client.send(messages.GetSupportedOperations(8, "reference", data, tuple(pools)), fds)
    supported = client.receive(messages.SupportedOperations)
    client.send(prepare_message(10, model=data, pools=tuple(pools)), fds)
    ready, reply = client.receive(messages.PreparedModelReady), client.receive(messages.Reply)
    return supported.status, ready.status, ready.model_id, reply.status


def replace_message(message: Any, **changes: Any) -> Any:
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return type(message)(**{**fields, **changes})


# ------------------------------------------------------------------------------------------------ what is executed

CallT = TypeVar("CallT", bound=messages.Call)
HELD_ID = 777_777  # of the model whose executions block until a test releases them


@dataclass(frozen=True)
class PooledRequest:
    """A model's request with its memory pools, ready to be sent."""

    request: Request
    pools: tuple[Memory, ...]

    @property
    def fds(self) -> list[int]:
        """The fds of the pools."""
        return [pool.fileno() for pool in self.pools]

    def call(self, kind: Callable[..., CallT], call: int, model_id: int, config: Any = None, **rest: Any) -> CallT:
        """Return a call with this request."""
        data = messages.config_to_data(config or ExecutionConfig())
        return kind(call, model_id=model_id, request=messages.request_to_data(self.request), config=data, **rest)

    def result(self, count: int = 4) -> list[float]:
        """Return the content of the first output."""
        return [float(value) for value in np.frombuffer(self.pools[1].view, np.float32, count)]


def create_request(resources: ExitStack, model: Model, *inputs: Sequence[float]) -> PooledRequest:
    """Return a request of `model` over new memories, with floats in its first inputs."""
    sizes = models.pool_bytes(model)
    source = resources.enter_context(Memory.create(sizes[0], one_writer=True))
    sink = resources.enter_context(Memory.create(sizes[1]))
    request = models.request_for(model, (source, sink))
    for argument, values in zip(request.inputs, inputs, strict=False):
        np.frombuffer(source.view, np.float32, len(values), argument.location.offset)[:] = values
    return PooledRequest(request, (source, sink))


def create_endless_request(resources: ExitStack) -> tuple[Model, PooledRequest]:
    """Return a WHILE model and a request with which it counts for hours."""
    loop = control_flow_models.counting()
    pooled = create_request(resources, loop)
    rounds = pooled.request.inputs[1].location
    pooled.pools[0].view[rounds.offset : rounds.offset + 4] = (2**31 - 1).to_bytes(4, "little")
    return loop, pooled


def hold(running: Running, model: Model = ADD, **fields: Any) -> Held:
    """Add a model with id HELD_ID to the session, whose executions block until the test releases them."""
    held = Held(model)
    running.session.models.insert(DriverPreparedModel(model, held, **fields), HELD_ID)
    return held
