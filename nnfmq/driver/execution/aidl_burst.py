"""Driver's end of an AIDL burst (`IBurst`): synchronous executions whose memory is identified by tokens.

A token of 0 or more identifies a memory within one burst: the first memory received with it is mapped and kept, and is
used for this token whatever memory comes later, until the token is released. -1 marks a memory without identity, which
is used once. (BUR-19, BUR-20, BUR-21)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from nnfmq.base.channel import close_all
from nnfmq.driver.execution.prepared_model import DriverPreparedModel, ExecutionReply
from nnfmq.driver.memory.quota import MemoryQuota, ReceivedMemory
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import ExecutionConfig
from nnfmq.serialize.messages import MemoryData, RequestData, request_from_data

NO_IDENTITY = -1


class AidlBurstServer:
    """One AIDL burst. Thread-safe; a second concurrent execution is rejected. Close it."""

    def __init__(self, prepared: DriverPreparedModel, quota: MemoryQuota) -> None:
        self._prepared = prepared
        self._quota = quota
        self._running = threading.Lock()
        self._lock = threading.Lock()
        self._memories: dict[int, ReceivedMemory] = {}  # by token
        self._released: list[ReceivedMemory] = []  # may still be in use by the running execution (BUR-21)

    def execute_synchronously(
        self,
        data: RequestData,
        tokens: Sequence[int],
        fds: Sequence[int],
        config: ExecutionConfig,
        deadline_ns: int | None,
        received_ns: int,
    ) -> ExecutionReply:
        """Execute a request and return the reply. Blocks.

        Takes ownership of `fds`, which are the memories of the pools that are not managed buffers, in order. For a
        known token the fd is closed and the kept memory is used.

        Raises:
            InvalidArgument: If there is not one valid token for each pool, or a memory is invalid.
            GeneralFailure: If another execution of this burst is running.
        """
        remaining = list(fds)
        with ExitStack() as stack:
            stack.callback(lambda: close_all(remaining))
            if len(tokens) != len(data.pools):
                raise InvalidArgument(
                    f"a request of {len(data.pools)} pools came with {len(tokens)} memory tokens (N-REQ-7)"
                )
            for token in tokens:
                _check_token(token)
            if not self._running.acquire(blocking=False):
                raise GeneralFailure("this burst is executing already; make one burst for each thread")
            stack.callback(self._end_execution)
            memories = [
                self._memory(token, remaining.pop(0), pool, stack)
                for token, pool in zip(tokens, data.pools, strict=True)
                if isinstance(pool, MemoryData)
            ]
            request = request_from_data(data, memories)
            return self._prepared.execute_synchronously(request, config, deadline_ns, received_ns)

    def _memory(self, token: int, fd: int, data: MemoryData, stack: ExitStack) -> ReceivedMemory:
        known = self._memories.get(token)
        if known is not None:
            os.close(fd)
            return known
        (memory,) = self._quota.adopt_all([fd], [data])
        if token == NO_IDENTITY:
            stack.callback(memory.close)
        else:
            with self._lock:
                self._memories[token] = memory
        return memory

    def _end_execution(self) -> None:
        with self._lock:
            released, self._released = self._released, []
            self._running.release()
        for memory in released:
            memory.close()

    def release_memory_resource(self, token: int) -> None:
        """Forget the memory of `token`. Does nothing if the token is unknown.

        Raises:
            InvalidArgument: If the token is below -1 (N-REQ-8).
        """
        _check_token(token)
        with self._lock:
            memory = self._memories.pop(token, None)
            if memory is not None and self._running.locked():
                self._released.append(memory)
                return
        if memory is not None:
            memory.close()

    def close(self) -> None:
        """Close all memory. Blocks until a running execution has ended. Idempotent."""
        with self._running:
            memories, self._memories = self._memories, {}
        for memory in memories.values():
            memory.close()


def _check_token(token: int) -> None:
    if token < NO_IDENTITY:
        raise InvalidArgument(f"a memory token is 0 or more, or {NO_IDENTITY} for none; got {token} (N-REQ-6)")
