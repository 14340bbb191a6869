"""The application's end of an AIDL burst (IBurst): executions over the control channel whose memories the driver keeps.

Slower than the queues of `nnfmq.runtime.burst_controller`, but it carries what a packet cannot: deadlines, loop
timeouts, hints.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from nnfmq.deadlines import deadline_after
from nnfmq.hal.errors import GeneralFailure, InvalidArgument, NnfmqError
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import BufferToken, ExecutionConfig, Pool, Request
from nnfmq.runtime.burst_slots import TokenAllocator
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.execution_result import ExecutionResult, to_wire_deadline
from nnfmq.runtime.prepared_model import PreparedModel, request_execution
from nnfmq.serialize import messages

NO_TOKEN = -1
_CLOSE_NS = 5_000_000_000  # the driver ends a running execution first


class AidlBurst:
    """A burst of one prepared model. Close it, or use `with`. One execution at a time: a second one is refused."""

    def __init__(self, connection: Connection, described: Sequence[TensorInfo]) -> None:
        self._connection = connection
        self._described = described  # the model's outputs
        self._burst_id = 0
        self._tokens = TokenAllocator()
        self._running = threading.Lock()

    @classmethod
    def configure(cls, connection: Connection, model: PreparedModel, deadline_ns: int | None) -> Self:
        """Create the burst in the driver (configureExecutionBurst); blocks."""
        burst = cls(connection, model.outputs)
        message = messages.ConfigureAidlBurst(connection.new_call(), model.model_id)
        connection.call(message, messages.BurstConfigured, (), deadline_ns, on_answer=burst._configured)
        return burst

    def _configured(self, answer: messages.BurstConfigured) -> None:
        self._burst_id = answer.burst_id

    def cache_memory(self, memory: Pool) -> int:
        """Let the driver keep its mapping of `memory` from the next execution with it on; return its token.

        The memory stays the caller's. Its token is released by `release_memory_resource`, or at the next execution
        after it was closed or dropped. Tokens count up from 0 and are never used again.
        """
        return self._tokens.number_of(memory)

    def execute_synchronously(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        tokens: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute one request (executeSynchronously, and ...WithConfig where `config` has hints); blocks.

        `tokens` has one for each pool; by default those of memories that were cached, and -1 for the others. `timeout`
        in seconds is also the execution's deadline. Return the shapes and the timing. Raises GeneralFailure while
        another thread executes, what the driver answers, MissedDeadline, DeadObject.
        """
        deadline_ns = deadline_after(timeout)
        if not self._running.acquire(blocking=False):
            raise GeneralFailure("this burst is executing in another thread; make one burst for each")
        try:
            self._release(self._tokens.gone(), deadline_ns)
            given = self._tokens_of(request.pools) if tokens is None else tuple(tokens)
            message = messages.ExecuteAidlBurst(
                self._connection.new_call(),
                self._open_id(),
                messages.request_to_data(request),
                given,
                messages.config_to_data(config),
                to_wire_deadline(self._connection, deadline_ns),
            )
            return request_execution(self._connection, message, self._described, request, config, deadline_ns)
        finally:
            self._running.release()

    def _tokens_of(self, pools: Sequence[Pool | BufferToken]) -> tuple[int, ...]:
        known = [None if isinstance(pool, BufferToken) else self._tokens.known(pool) for pool in pools]
        return tuple(NO_TOKEN if token is None else token for token in known)

    def release_memory_resource(self, token: int, *, timeout: float | None = 10.0) -> None:
        """Let the driver forget the memory of `token`; unknown ones, and -1, are no error. Blocks.

        Raises InvalidArgument below -1.
        """
        self._release([token], deadline_after(timeout))

    def _release(self, tokens: Sequence[int], deadline_ns: int | None) -> None:
        for token in tokens:
            message = messages.ReleaseMemoryResource(self._connection.new_call(), self._open_id(), token)
            self._connection.call(message, messages.Reply, (), deadline_ns)
            self._tokens.free(token)

    def _open_id(self) -> int:
        if not self._burst_id:
            raise InvalidArgument("this burst is closed")
        return self._burst_id

    def close(self) -> None:
        """End the burst in the driver; waits for a running execution, up to 5 seconds. Harmless when repeated."""
        burst_id, self._burst_id = self._burst_id, 0
        if not burst_id or not self._connection.is_open:
            return
        try:
            message = messages.CloseBurst(self._connection.new_call(), burst_id)
            self._connection.ask(message, messages.Reply, (), time.monotonic_ns() + _CLOSE_NS)
        except NnfmqError:
            pass  # the driver is gone, and the burst with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
