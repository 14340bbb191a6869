"""The client's end of an AIDL burst (IBurst): executions over the control channel with memories that the driver caches.

Slower than the queues of `burst`, but a message carries what a packet cannot: deadlines, loop timeouts, hints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from nnfmq.base.deadlines import deadline_after
from nnfmq.base.ownership import Claims, Closable, exclusive
from nnfmq.client.burst.channel import TokenAllocator, close_in_driver
from nnfmq.client.connection.garbage import ClosedWhenDropped
from nnfmq.client.execution.late_run import LateRun
from nnfmq.client.execution.requests import RequestRun, memory_fds, to_wire_config, to_wire_deadline
from nnfmq.client.execution.synchronous import exchange_execution, execute_after_failure
from nnfmq.client.model.arrays import ExecutionResult
from nnfmq.client.model.handle import ModelHandle
from nnfmq.hal.errors import BadState, NnfmqError
from nnfmq.hal.types import BufferToken, ExecutionConfig, HalExecutionMode, Pool, Request
from nnfmq.serialize import messages

NO_TOKEN = -1


class AidlBurst(ClosedWhenDropped, Closable):
    """A burst of one prepared model. Close it, or use `with`. One execution at a time; a second one is rejected.

    After a call that ended early, at its deadline or by a signal handler, the next one first waits until the driver has
    ended that execution.
    """

    def __init__(self, model: ModelHandle) -> None:
        self._model = model
        self._location = model.location.without_id()
        self._burst_id = 0
        self._is_closed = False
        self._tokens = TokenAllocator()
        self._claims: Claims = {}
        self._late = LateRun()

    @classmethod
    def configure(cls, model: ModelHandle, deadline_ns: int | None) -> Self:
        """Configure the burst in the driver (configureExecutionBurst); blocks.

        If the driver fails, and others may execute the model, each execution tries to configure it again.
        """
        burst = cls(model)
        try:
            burst._configure(deadline_ns)
        except NnfmqError as error:
            if not model.can_execute_again(error, deadline_ns):
                raise
        return burst

    def _configure(self, deadline_ns: int | None) -> None:
        location = self._model.location
        message = messages.ConfigureAidlBurst(location.connection.next_call_id(), location.require_id())
        self._location = location.without_id()
        location.connection.call(message, messages.BurstConfigured, (), deadline_ns, on_reply=self._on_configured)

    def _on_configured(self, reply: messages.BurstConfigured) -> None:
        self._burst_id = reply.burst_id

    def _busy_error(self) -> Exception:
        return BadState("this burst is executing in another thread; make one burst for each")  # BUR-16

    def cache_memory(self, memory: Pool) -> int:
        """Return a token for `memory`; the driver keeps its mapping from the next execution with it. Borrows `memory`.

        The token is released by `release_memory_resource`, or by the next execution after the memory was closed or
        garbage-collected. Tokens count up from 0 and are never reused.
        """
        return self._tokens.find_or_add(memory)

    @exclusive
    def execute_synchronously(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        tokens: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> ExecutionResult:
        """Execute a HAL request and return the reported shapes and the timing; blocks. Borrows the request's pools.

        This is executeSynchronously, or executeSynchronouslyWithConfig if `config` has hints.

        Args:
            request: The request.
            config: Its configuration.
            tokens: One for each pool; by default those of cached memories, and -1 for the others.
            timeout: In seconds; also the execution's deadline. None = no limit.

        Raises:
            BadState: If another thread is executing, or the burst is closed.
            MissedDeadline: If the timeout passes.
            DeadObject: If the driver exits.
            NnfmqError: The error that the driver replied.
        """
        deadline_ns = deadline_after(timeout)
        self._late.wait(deadline_ns)
        try:
            return self._execute(request, config, tokens, deadline_ns)
        except NnfmqError as error:
            if not self._model.can_execute_again(error, deadline_ns):
                raise
            return execute_after_failure(self._model, request, config, deadline_ns, error, self._late)

    def _execute(
        self, request: Request, config: ExecutionConfig, tokens: Sequence[int] | None, deadline_ns: int | None
    ) -> ExecutionResult:
        self._release_tokens(self._tokens.expired(), deadline_ns)
        if tokens is None:
            found = [None if isinstance(pool, BufferToken) else self._tokens.find(pool) for pool in request.pools]
            tokens = [NO_TOKEN if token is None else token for token in found]
        burst_id = self._configured_id(deadline_ns)
        message = messages.ExecuteAidlBurst(
            self._location.connection.next_call_id(),
            burst_id,
            messages.request_to_data(request),
            tuple(tokens),
            to_wire_config(self._model, config),
            to_wire_deadline(self._location.connection, deadline_ns),
        )
        run = RequestRun(self._model, request, config)
        fds, mode = memory_fds(request.pools), HalExecutionMode.AIDL_BURST
        return exchange_execution(self._location, message, run, fds, deadline_ns, mode, self._late)

    def release_memory_resource(self, token: int, *, timeout: float | None = 10.0) -> None:
        """Make the driver unmap the memory of `token`; blocks. Unknown tokens and -1 have no effect.

        Raises:
            InvalidArgument: If `token` is less than -1.
        """
        self._release_tokens([token], deadline_after(timeout))

    def _release_tokens(self, tokens: Sequence[int], deadline_ns: int | None) -> None:
        for token in tokens:
            burst_id = self._configured_id(deadline_ns)
            message = messages.ReleaseMemoryResource(self._location.connection.next_call_id(), burst_id, token)
            self._location.connection.call(message, messages.Reply, (), deadline_ns)
            self._tokens.free(token)

    def _configured_id(self, deadline_ns: int | None) -> int:
        """Return the burst's id in the driver, which configures it if it has not done so; blocks."""
        if self._is_closed:
            raise BadState("this burst is closed")
        if not self._burst_id or self._model.has_moved_from(self._location.connection):
            self._configure(deadline_ns)
        return self._burst_id

    def close(self) -> None:
        """Close the burst in the driver; waits up to 5 s for an execution in progress. Idempotent."""
        self._is_closed = True
        self._late.close()
        burst_id, self._burst_id = self._burst_id, 0
        close_in_driver(self._location.connection, burst_id)

    def _is_left_open(self) -> bool:
        return bool(self._burst_id) and self._location.connection.is_open

    def _close_dropped(self) -> None:
        self.close()
