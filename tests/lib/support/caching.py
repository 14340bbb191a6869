"""For tests of compilation caching: files in a folder, a client that exchanges single messages, and two models.

The models are those of the HAL's own tests: a chain of a hundred ADDs of 1, whose result is 101, and one of MULs by 1,
whose result is 1, so the result shows which of them was executed.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nnfmq.base.channel import Channel
from nnfmq.driver.session.calls import HANDLERS
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import ExecutionPreference, Model, Operand, OperandType, Operation, OperationType, Priority
from nnfmq.operations.declaration import NUMPY_TYPES
from nnfmq.serialize import control_protocol, messages
from nnfmq.serialize.control_protocol import PeerRole
from nnfmq.serialize.models import encode_model
from support.executors import LIMIT_S
from support.protocol import ProtocolPeer
from support.small_models import INPUT, OUTPUT, graph, scalar

FLOAT, QUANT8 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM
TYPES = [FLOAT, QUANT8]
LENGTH = 100
TOKEN = bytes(range(32))
NONE = ErrorStatus.NONE


def chain(code: OperationType, type: OperandType = FLOAT, length: int = LENGTH) -> Model:
    """Return a model that adds 1 to its input, or multiplies it by 1, `length` times."""
    is_coded = type == QUANT8
    scale, second_scale = (1.0, 0.5 if code == OperationType.MUL else 1.0) if is_coded else (0.0, 0.0)
    one = np.array([2 if is_coded and code == OperationType.MUL else 1], NUMPY_TYPES[type]).tobytes()
    operands: list[Operand] = [scalar(0)[0]]
    constants = {0: scalar(0)[1]}
    operations = []
    for _ in range(length):
        given = len(operands)
        operands += [Operand(type, (1,), scale), Operand(type, (1,), second_scale)]
        constants[given + 1] = one
        operations.append(Operation(code, (given, given + 1, 0), (given + 2,)))
    operands.append(Operand(type, (1,), scale))
    operands[1] = Operand(type, (1,), scale, lifetime=INPUT)
    operands[-1] = Operand(type, (1,), scale, lifetime=OUTPUT)
    return graph(operands, operations, constants)


def expected_result(code: OperationType, length: int = LENGTH) -> float:
    """Return the result of `chain(code)` for the input 1."""
    return 1.0 + length if code == OperationType.ADD else 1.0


class Paths(NamedTuple):
    """Paths of the model cache files and the data cache files."""

    model: tuple[Path, ...]
    data: tuple[Path, ...]

    @classmethod
    def new(cls, folder: Path, name: str = "cache", model: int = 1, data: int = 1) -> Paths:
        """Create empty files; their number may be wrong."""
        made = cls(
            tuple(folder / f"{name}.model{i}" for i in range(model)),
            tuple(folder / f"{name}.data{i}" for i in range(data)),
        )
        for path in made.all:
            path.touch()
        return made

    @property
    def all(self) -> tuple[Path, ...]:
        """All paths, model cache files first."""
        return self.model + self.data

    def open(self, stack: ExitStack, modes: dict[int, int] | None = None) -> tuple[list[int], list[int]]:
        """Open the files for reading and writing, or with the flags in `modes`, whose keys are indexes in `all`."""
        fds = [os.open(path, (modes or {}).get(i, os.O_RDWR) | os.O_CLOEXEC) for i, path in enumerate(self.all)]
        for fd in fds:
            stack.callback(os.close, fd)
        return fds[: len(self.model)], fds[len(self.model) :]

    def contents(self) -> list[bytes]:
        """Return the contents of all files."""
        return [path.read_bytes() for path in self.all]


class Loaded(NamedTuple):
    """The outcome of a preparation: status, model id (0 without a model) and message."""

    status: ErrorStatus
    model_id: int
    message: str = ""


class CachingClient:
    """A client of a session that runs in a thread of this process. Close it."""

    def __init__(self) -> None:
        driver_end, client_end = Channel.pair()
        self.peer = ProtocolPeer(client_end, PeerRole.CLIENT)
        self.session = Session(driver_end, "driver under test", HANDLERS)
        self._calls = itertools.count(1)
        self._thread = threading.Thread(target=self.session.run, name="session under test")
        self._thread.start()
        self.peer.send(messages.Hello(control_protocol.PROTOCOL, "AIDL v4", "caching"))
        self.peer.receive(messages.HelloReply)

    def save(
        self, model: Model, files: Paths, token: bytes = TOKEN, modes: dict[int, int] | None = None, **changes: Any
    ) -> Loaded:
        """Prepare a model and save it to `files`."""
        with ExitStack() as stack:
            return self.save_to(model, *files.open(stack, modes), token=token, **changes)

    def save_to(
        self, model: Model, model_fds: Sequence[int], data_fds: Sequence[int], token: bytes = TOKEN, **changes: Any
    ) -> Loaded:
        """Prepare a model and save it to fds."""
        data, pools = encode_model(model)
        assert not pools
        fields: dict[str, Any] = {
            "device": "reference",
            "preference": ExecutionPreference.SUSTAINED_SPEED,
            "priority": Priority.MEDIUM,
            "deadline_ns": -1,
            "model": data,
            "caches": messages.CachesData(token, len(model_fds), len(data_fds)),
            **changes,
        }
        self.peer.send(messages.PrepareModel(next(self._calls), **fields), [*model_fds, *data_fds])
        return self._outcome()

    def load(self, files: Paths, token: bytes = TOKEN, modes: dict[int, int] | None = None, **changes: Any) -> Loaded:
        """Prepare the model that was saved to `files`."""
        with ExitStack() as stack:
            return self.load_from(*files.open(stack, modes), token=token, **changes)

    def load_from(
        self, model_fds: Sequence[int], data_fds: Sequence[int], token: bytes = TOKEN, **changes: Any
    ) -> Loaded:
        """Prepare the model that was saved to fds."""
        caches = messages.CachesData(token, len(model_fds), len(data_fds))
        fields: dict[str, Any] = {"device": "reference", "deadline_ns": -1, "caches": caches, **changes}
        self.peer.send(messages.PrepareModelFromCache(next(self._calls), **fields), [*model_fds, *data_fds])
        return self._outcome()

    def _outcome(self) -> Loaded:
        """Receive the reply and the callback in the HAL's order: one callback on every path (PREP-1 to PREP-3)."""
        first = self.peer.receive_any()
        if isinstance(first, messages.Reply):
            assert first.status is NONE
            ready = self.peer.receive(messages.PreparedModelReady)
        else:
            assert isinstance(first, messages.PreparedModelReady)
            ready, reply = first, self.peer.receive(messages.Reply)
            assert (reply.status, reply.message) == (ready.status, ready.message) and reply.status is not NONE
        assert (ready.model_id == 0) == (ready.status is not NONE)
        return Loaded(ready.status, ready.model_id, ready.message)

    def result(self, model_id: int, value: float = 1.0) -> float:
        """Execute one of the chains."""
        prepared = self.session.models.lookup(model_id)
        main = prepared.model.main
        dtype = NUMPY_TYPES[main.operands[main.input_indexes[0]].type]
        out = np.zeros(1, dtype)
        prepared.program.bind([np.array([value], dtype)], [out]).run()
        return float(out[0])

    def close(self) -> None:
        """Close the connection, and wait until the session has ended."""
        self.peer.close()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self.session.join()
