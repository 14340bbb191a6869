"""A live driver as a fuzz target: bytes become a series of valid and invalid calls of one client.

A driver process and a neighbour, another client with a burst, live as long as the fuzzer's process. For each input a
client connects, prepares a model, and makes calls with fields, ids and numbers of descriptors that the bytes choose;
some are not even messages. Each call must get all its replies, or the driver must close the connection, within LIMIT_S.
Afterwards the neighbour's execution must be right, and the driver must not have logged a mistake of its own.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import msgspec
import numpy as np

import nnfmq
from nnfmq.base.channel import Channel
from nnfmq.hal.errors import DeadObject, MissedDeadlineTransient, ProtocolError
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import REPLIES, PeerRole
from nnfmq.serialize.models import encode_model
from support.choices import ByteChoices
from support.drivers import Daemon, one, running_daemon, short_folder
from support.fuzzing.decoders import example
from support.models import null_model
from support.protocol import ProtocolPeer

CALLS_MAX = 12
LIMIT_S = 20.0
CLOSED, REPLIED = "closed", "replied"
_MISTAKE = re.compile(r"Traceback|internal error|ended with status (?!-9|-15)")
_INTEGERS = (0, 1, 2, 3, 5, 64, 4096, 1 << 20, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, -1)
_CODEC = control_protocol._codec


def decode(data: bytes) -> str:
    """Return the calls that the bytes choose, as text."""
    choices = ByteChoices(data)
    return "\n".join(str(_Call(choices, number, 1)) for number in range(2, 2 + CALLS_MAX) if choices.has_more)


class _Call:
    """One call: its type, its bytes, and the number of descriptors that come with it."""

    def __init__(self, choices: ByteChoices, number: int, model_id: int) -> None:
        kinds = [kind for kind in control_protocol.message_types_of(PeerRole.CLIENT) if kind is not messages.Hello]
        self.kind = choices.one_of(kinds)
        self.number, self.place = 0, number
        message = _varied(example(msgspec.inspect.type_info(self.kind)), choices, model_id)
        if isinstance(message, messages.Call):
            self.number = choices.one_of((number, number, number, number, 1, 0))
            message = msgspec.structs.replace(message, call=self.number)
        if isinstance(message, messages.PrepareModel | messages.GetSupportedOperations):
            message = msgspec.structs.replace(message, model=encode_model(null_model())[0], pools=())
        needed = min(_CODEC.fd_count(message), 8)
        self.fd_count = choices.one_of((needed, needed, needed, 0, needed + 1))
        self.data = bytearray(_CODEC.encode(message))
        for _ in range(choices.one_of((0, 0, 0, 1, 3))):
            self.data[choices.between(0, len(self.data) - 1)] = choices.between(0, 255)
        self.message = message

    def replies(self) -> Sequence[type[messages.Message]]:
        """Return the types of the replies that must come: none if the protocol does not allow the call."""
        try:
            found = control_protocol.decode(self.data, sender=PeerRole.CLIENT, fds=self.fd_count)
        except ProtocolError:
            return ()
        if not isinstance(found, messages.Call):
            return ()
        self.number = found.call
        return REPLIES.get(type(found), ())

    def __repr__(self) -> str:
        return f"{self.message} as {bytes(self.data).hex()} with {self.fd_count} descriptors"


def _varied(value: Any, choices: ByteChoices, model_id: int) -> Any:
    """Return a message with some of its numbers, texts and flags changed."""
    changed: dict[str, Any] = {}
    for name in value.__struct_fields__:
        field = getattr(value, name)
        if name.endswith("_id"):
            changed[name] = choices.one_of((model_id, model_id, 0, 7))
        elif type(field) is bool:
            changed[name] = choices.flag()
        elif type(field) is int and choices.flag():
            changed[name] = choices.one_of(_INTEGERS)
        elif type(field) is str:
            changed[name] = choices.one_of(("reference", "compiled", field, "", "\N{SNOWMAN}" * 300))
        elif isinstance(field, msgspec.Struct):
            changed[name] = _varied(field, choices, model_id)
        elif isinstance(field, tuple) and field:
            first = _varied(field[0], choices, model_id) if isinstance(field[0], msgspec.Struct) else field[0]
            changed[name] = (first,) * choices.one_of((1, 0, 2, 40))
    return msgspec.structs.replace(value, **changed)


class _Live:
    """The driver, its neighbour, and the memory whose descriptor comes with calls."""

    def __init__(self, stack: ExitStack) -> None:
        path = stack.enter_context(short_folder()) / "d.sock"
        ends_with_us = ["--exit-with", str(os.getpid())]  # libFuzzer ends this process without its exit functions
        self.daemon: Daemon = stack.enter_context(running_daemon(path, options=ends_with_us))
        client = stack.enter_context(nnfmq.connect(self.daemon.path, timeout=LIMIT_S, recover=False))
        prepared = stack.enter_context(client.device("reference").prepare(null_model(), timeout=LIMIT_S))
        self._burst = stack.enter_context(prepared.burst(timeout=LIMIT_S))
        self.memory = stack.enter_context(nnfmq.Memory.create(4096, "fuzz"))
        self._executions = 0

    def check(self) -> None:
        """Check the neighbour and the log.

        Raises:
            AssertionError: If the neighbour's result is wrong, or the driver has logged a mistake.
        """
        self._executions += 1
        (found,) = self._burst.execute(one(self._executions), timeout=LIMIT_S)
        assert np.array_equal(found, one(self._executions)), f"the neighbour's result is {found}"
        text = self.daemon.program.errors()
        assert not _MISTAKE.search(text), text[-3000:]


@cache
def _live() -> _Live:
    stack = ExitStack()
    atexit.register(stack.close)
    return _Live(stack)


def run_live(data: bytes) -> str:
    """Make the calls that the bytes choose; return "closed" if the driver has closed the connection, else "replied".

    Raises:
        AssertionError: If a call gets no reply, the neighbour's result is wrong, or the driver has logged a mistake.
    """
    live, choices = _live(), ByteChoices(data)
    with ProtocolPeer(Channel.connect(live.daemon.path), PeerRole.CLIENT) as peer:
        outcome = _make_calls(live, peer, choices)
    live.check()
    return outcome


def _make_calls(live: _Live, peer: ProtocolPeer, choices: ByteChoices) -> str:
    peer.send(messages.Hello(control_protocol.PROTOCOL, "AIDL v4", "fuzz"))
    peer.receive(messages.HelloReply)
    model_id = _prepared(peer)
    for number in range(2, 2 + CALLS_MAX):
        if not choices.has_more:
            break
        call = _Call(choices, number, model_id)
        try:
            peer.send_bytes(bytes(call.data), [live.memory.fileno()] * call.fd_count)
            _receive_replies(peer, call)
        except DeadObject:
            return CLOSED
    return REPLIED


def _prepared(peer: ProtocolPeer) -> int:
    """Prepare a model; return its id."""
    prepare = example(msgspec.inspect.type_info(messages.PrepareModel))
    data, _ = encode_model(null_model())
    nothing: dict[str, Any] = dict.fromkeys(("pools", "consumers", "hints", "extensions"), ())
    peer.send(
        msgspec.structs.replace(
            prepare,
            device="reference",
            model=data,
            deadline_ns=-1,
            caches=messages.CachesData(bytes(32), 0, 0),
            **nothing,
        )
    )
    replies: Sequence[messages.Message] = [peer.receive_any(), peer.receive_any()]
    return next(reply.model_id for reply in replies if isinstance(reply, messages.PreparedModelReady))


def _receive_replies(peer: ProtocolPeer, call: _Call) -> None:
    """Receive the replies of a call, and then that of another one, which also follows what is no call or no message.

    Raises:
        DeadObject: If the driver closes the connection.
        AssertionError: If a reply does not come.
    """
    last = messages.ListDevices(1_000_000 + call.place)
    missing: list[tuple[type[messages.Message], int]] = [(messages.DeviceList, last.call)]
    missing += [(kind, call.number) for kind in call.replies()]
    peer.send(last)
    while missing:
        try:
            reply = peer.receive_any()
        except MissedDeadlineTransient:
            raise AssertionError(f"{missing} do not come after {call}") from None
        if isinstance(reply, messages.Call) and (type(reply), reply.call) in missing:
            missing.remove((type(reply), reply.call))
