"""AIDL's burst (IBurst): executions as messages, each with its memories, and tokens by which they are known again.

A token from 0 on is a memory's identity within one burst: the first memory seen for it is kept, mapped, and used for it
whatever comes later, until the token is released. -1 is a memory without identity, used once. (REQUIREMENTS BUR-19,
BUR-20, BUR-21)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from nnfmq.channel import close_all
from nnfmq.hal.errors import GeneralFailure, InvalidArgument
from nnfmq.hal.types import ExecutionConfig
from nnfmq.serialize.messages import MemoryData, RequestData, request_from_data
from nnfmq.service.driver_prepared_model import DriverPreparedModel, ExecutionReply
from nnfmq.service.memory_quota import MemoryQuota, Received

NO_TOKEN = -1


class AidlBurstServer:
    """One burst of a client's. One execution at a time; tokens may be released while it runs. Close it."""

    def __init__(self, prepared: DriverPreparedModel, quota: MemoryQuota) -> None:
        self._prepared = prepared
        self._quota = quota
        self._running = threading.Lock()
        self._lock = threading.Lock()
        self._memories: dict[int, Received] = {}  # by token
        self._released: list[Received] = []  # that the running execution may use (BUR-21)

    def execute_synchronously(
        self,
        data: RequestData,
        tokens: Sequence[int],
        fds: Sequence[int],
        config: ExecutionConfig,
        deadline_ns: int | None,
        begin_ns: int,
    ) -> ExecutionReply:
        """Execute a request over the memories behind `fds`, or those known for their tokens. Blocks.

        Takes over the fds. Raises InvalidArgument for what is no token, no memory, or not one token for each pool;
        GeneralFailure while another execution runs. What the execution itself answers is in the result.
        """
        rest = list(fds)
        with ExitStack() as stack:
            stack.callback(lambda: close_all(rest))
            _check_tokens(tokens, len(data.pools))
            if not self._running.acquire(blocking=False):
                raise GeneralFailure("this burst is executing already; make one burst for each thread")
            stack.callback(self._end_execution)
            memories = [
                self._memory(token, rest.pop(0), pool, stack)
                for token, pool in zip(tokens, data.pools, strict=True)
                if isinstance(pool, MemoryData)  # a buffer of the driver's needs no token
            ]
            request = request_from_data(data, memories)
            return self._prepared.execute_synchronously(request, config, deadline_ns, begin_ns)

    def _memory(self, token: int, fd: int, lent: MemoryData, stack: ExitStack) -> Received:
        known = self._memories.get(token)
        if known is not None:
            os.close(fd)
            return known
        (memory,) = self._quota.adopt_all([fd], [lent])
        if token == NO_TOKEN:
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
        """Forget what `token` stands for; nothing, for most. Raises InvalidArgument below -1 (N-REQ-8)."""
        _check_token(token)
        with self._lock:
            memory = self._memories.pop(token, None)
            if memory is not None and self._running.locked():
                self._released.append(memory)
                return
        if memory is not None:
            memory.close()

    def close(self) -> None:
        """Give every memory back. Blocks until a running execution is done."""
        with self._running:
            memories, self._memories = self._memories, {}
        for memory in memories.values():
            memory.close()


def _check_tokens(tokens: Sequence[int], pools: int) -> None:
    if len(tokens) != pools:
        raise InvalidArgument(f"N-REQ-7: a request of {pools} pools came with {len(tokens)} memory tokens")
    for token in tokens:
        _check_token(token)


def _check_token(token: int) -> None:
    if token < NO_TOKEN:
        raise InvalidArgument(f"N-REQ-6: a memory token is 0 or more, or {NO_TOKEN} for none; got {token}")
