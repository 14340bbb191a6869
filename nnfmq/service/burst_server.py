"""The driver's end of a burst: a listener thread between two queues (HAL 1.2 IBurstContext, ExecutionBurstServer).

    request queue → decode → fetch unknown slots from the client, once → execute → result queue, until the peer is gone

`BurstServer.create` takes a prepared model, or any executor with a cache of its own. The listener survives whatever a
client sends: a malformed packet, or a request ring whose counters are impossible, is answered with GENERAL_FAILURE and
the loop goes on; a result that does not fit is replaced by an error of two records. Where the result ring itself is
impossible no answer can be given: the client is woken, and finds that out by itself. A packet carries no text and no
late status, so the last failure is kept here for whoever asks. (REQUIREMENTS BUR-1..14, TIM-6)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic_ns
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from nnfmq import watcher
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    NnfmqError,
    QueueCorrupted,
    status_for_error,
)
from nnfmq.hal.timing import NO_TIMING
from nnfmq.hal.types import ExecutionConfig, OutputShape, Request
from nnfmq.queue import NOT_EMPTY, MessageQueue, PeerDeathFlag, PollingWindow
from nnfmq.serialize.codec import Decoder, decode_request, encode_result
from nnfmq.serialize.datum import DATUM_BYTES
from nnfmq.serialize.execution_stats import StatsArea
from nnfmq.serialize.packets import RequestPacket
from nnfmq.service.driver_prepared_model import (
    BoundExecution,
    DriverPreparedModel,
    ExecutionReply,
    StagedExecution,
    error_reply,
)
from nnfmq.service.error_translation import RECOVERABLE_ERRORS
from nnfmq.service.memory_cache import MemoryCache
from nnfmq.service.memory_quota import Received

RING_BYTES_MAX = 1 << 20  # a packet is the ring's length at most, and is copied and decoded
_NONE = ErrorStatus.NONE  # an attribute of an enum costs more than a record through the ring
_NOW = 0  # a deadline that has passed: never block
_log = logging.getLogger("nnfmq.burst")


class BurstCallback(Protocol):
    """The client as the burst needs it (IBurstCallback)."""

    def get_memories(self, slots: Sequence[int]) -> list[Received]:
        """Return one memory per slot, in order; the caller owns them. Blocks. Raises NnfmqError with the status."""
        ...


class BurstExecutorWithCache(Protocol):
    """What executes a burst's requests and keeps what its slots stand for (IBurstExecutorWithCache)."""

    def unknown_slots(self, slots: Sequence[int]) -> list[int]:
        """Return those of `slots` for which there is no cache entry."""
        ...

    def add_cache_entry(self, memory: Received, slot: int) -> None:
        """Take over `memory` as `slot`."""
        ...

    def remove_cache_entry(self, slot: int) -> None:
        """Forget `slot`; an unknown one is no error."""
        ...

    def execute(self, packet: RequestPacket, begin_ns: int) -> ExecutionReply:
        """Execute a request whose slots are all known. `begin_ns`: when it was dequeued. Never raises NnfmqError."""
        ...

    def close(self) -> None:
        """Give back every cached resource."""
        ...


class _CachingSlots:
    """The slot half of both executors below."""

    def __init__(self) -> None:
        self._cache = MemoryCache()

    def unknown_slots(self, slots: Sequence[int]) -> list[int]:
        return self._cache.unknown(slots)

    def add_cache_entry(self, memory: Received, slot: int) -> None:
        self._cache.add(slot, memory)

    def remove_cache_entry(self, slot: int) -> None:
        self._cache.remove(slot)

    def close(self) -> None:
        self._cache.close()


class PreparedModelExecutor(_CachingSlots):
    """Executes each request afresh through `execute_synchronously`: simple, and the yardstick for the one below."""

    def __init__(self, prepared_model: DriverPreparedModel) -> None:
        super().__init__()
        self._prepared_model = prepared_model

    def execute(self, packet: RequestPacket, begin_ns: int) -> ExecutionReply:
        """See `BurstExecutorWithCache.execute`."""
        try:
            _, memories = self._cache.memories(packet.slots)
        except InvalidArgument as error:
            return error_reply(error)
        request = Request(packet.inputs, packet.outputs, memories)
        return self._prepared_model.execute_synchronously(request, ExecutionConfig(packet.measure), begin_ns=begin_ns)


class BindingExecutor(_CachingSlots):
    """Binds a request to its memory once and runs it again while neither the packet nor any slot has changed."""

    def __init__(self, prepared_model: DriverPreparedModel) -> None:
        super().__init__()
        self._prepared_model = prepared_model
        self._packet: RequestPacket | None = None
        self._generation = -1
        self._bound: BoundExecution | StagedExecution | None = None

    def execute(self, packet: RequestPacket, begin_ns: int) -> ExecutionReply:
        """See `BurstExecutorWithCache.execute`."""
        bound = self._bound
        if packet is not self._packet or self._generation != self._cache.generation or bound is None:
            try:
                bound = self._bind(packet)
            except NnfmqError as error:
                return error_reply(error)
        return bound.run(packet.measure, begin_ns)

    def _bind(self, packet: RequestPacket) -> BoundExecution | StagedExecution:
        self._forget()
        generation, memories = self._cache.memories(packet.slots)
        bound = self._prepared_model.bind(Request(packet.inputs, packet.outputs, memories))
        self._packet, self._generation, self._bound = packet, generation, bound
        return bound

    def remove_cache_entry(self, slot: int) -> None:
        """Forget `slot`, and what was bound to its mapping: the number may come back with smaller memory behind it."""
        super().remove_cache_entry(slot)
        self._forget()

    def _forget(self) -> None:
        self._packet, self._generation, self._bound = None, -1, None

    def close(self) -> None:
        """See `BurstExecutorWithCache.close`."""
        self._forget()
        super().close()


@dataclass(frozen=True, slots=True)
class LastFailure:
    """The text and the exact status of the last failed execution: what the packet could not carry."""

    status: ErrorStatus = ErrorStatus.NONE
    message: str = ""
    sequence: int = 0


class BurstServer:
    """A running burst (IBurstContext): owns its listener thread, both queues and the executor. Close it."""

    def __init__(
        self,
        callback: BurstCallback,
        requests: MessageQueue,
        results: MessageQueue,
        executor: BurstExecutorWithCache,
        window_ns: int,
    ) -> None:
        self._callback = callback
        self._requests = requests
        self._results = results
        self._executor = executor
        self._window_ns = window_ns
        self._stages = StatsArea.over(results.stats_view)
        self._sequence = 0
        self._decoder = Decoder(decode_request)
        self._fetched: RequestPacket | None = None  # the last request whose slots are all known: most are the same one
        self._answered_shapes: tuple[OutputShape, ...] | None = None  # of the packet beside it
        self._answered = b""
        self.last_failure = LastFailure()
        self._peer_death = PeerDeathFlag()
        self.peer = watcher.DeathRecipients(self._peer_death)
        self._thread = threading.Thread(target=self._listen, name="nnfmq-burst", daemon=True)

    @classmethod
    def create(
        cls,
        callback: BurstCallback,
        requests: MessageQueue,
        results: MessageQueue,
        executor: BurstExecutorWithCache | DriverPreparedModel,
        *,
        polling_window_us: float | None = None,
    ) -> BurstServer:
        """Serve `requests` into `results` on a thread of its own, until `close` or until the peer is buried.

        `executor` is a prepared model (each request goes through `execute_synchronously`) or an executor with a cache.
        The server owns all four, unless this raises. The window defaults to $NNFMQ_BURST_SERVER_POLLING_WINDOW. Raises
        GeneralFailure for queues that are no burst's.
        """
        for queue in (requests, results):
            if queue.quantum != DATUM_BYTES:
                raise GeneralFailure(f"a burst's records have {DATUM_BYTES} bytes, not {queue.quantum}")
            if queue.event_flag is None:
                raise GeneralFailure("a burst's queues need an event word: without one nobody can wait (BUR-6)")
            if queue.count * queue.quantum > RING_BYTES_MAX:
                text = f"a burst's queue has a ring of {RING_BYTES_MAX} bytes at most"
                raise GeneralFailure(f"{text}; this one has {queue.count * queue.quantum}")
        if isinstance(executor, DriverPreparedModel):
            executor = PreparedModelExecutor(executor)
        server = cls(callback, requests, results, executor, PollingWindow.server(polling_window_us).ns)
        requests.peer_death = results.peer_death = server._peer_death
        server.peer.add(requests, results)
        server._thread.start()
        return server

    def free_memory(self, slot: int) -> None:
        """Forget a slot (IBurstContext.freeMemory); an unknown one is no error."""
        self._executor.remove_cache_entry(slot)
        self._fetched = None

    @property
    def request_count(self) -> int:
        """How many requests came so far, whatever they were."""
        return self._sequence

    def close(self) -> None:
        """End the listener and give everything back. Blocks until a running execution is done."""
        watcher.notify_peer_death(self.peer)
        self._thread.join()
        self.peer.discard(self._requests, self._results)
        self._executor.close()
        self._stages.close()
        self._requests.close()
        self._results.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _listen(self) -> None:
        try:
            with np.errstate(all="ignore"):  # here once, not in every execution
                while True:
                    self._listen_once()
        except DeadObject:
            _log.debug("burst ended: its peer is gone or has closed it")

    def _listen_once(self) -> None:
        try:
            packet = self._requests.receive(None, self._window_ns)
        except QueueCorrupted as error:
            self._answer_impossible(error)
            return
        if packet is not None:
            self._serve(packet, monotonic_ns())

    def _answer_impossible(self, error: QueueCorrupted) -> None:
        """Answer a request that cannot be found, since the client wrote impossible counters; wait for the next one.

        Waking is all that is left of the request ring: each time is a request. It may be put right by the client.
        """
        _log.info("request refused: %s", error)
        requested = self._requests.event_flag
        assert requested is not None  # `create` has looked
        requested.wait(NOT_EMPTY, _NOW)  # what woke us must not count again
        self._sequence += 1
        self._note(status_for_error(error), str(error))
        self._put(encode_result(status_for_error(error), ()))
        requested.wait(NOT_EMPTY)

    def _put(self, packet: bytes) -> bool:
        """Send a result; False where there is no room.

        A client whose result ring is impossible is woken: there, too, no wait can go on with it.
        """
        try:
            return self._results.send(packet)
        except QueueCorrupted as error:
            _log.info("a result is lost: %s", error)
            self._note(status_for_error(error), str(error))
            self._results.wake_all()
            return True

    def _note(self, status: ErrorStatus, message: str) -> None:
        self.last_failure = LastFailure(status, message, self._sequence)

    def _serve(self, packet: bytes, taken_ns: int) -> None:
        self._sequence += 1
        ready_ns = taken_ns
        try:
            request = self._decoder.decode(packet)
            if request is not self._fetched:
                self._fetched = request  # first: a slot that is freed meanwhile sets it back
                self._fetch(self._executor.unknown_slots(request.slots))
                ready_ns = monotonic_ns()
            result = self._executor.execute(request, taken_ns)
        except DeadObject:
            raise
        except NnfmqError as error:
            self._fetched, ready_ns = None, 0
            result = error_reply(error)
        except RECOVERABLE_ERRORS as error:
            _log.exception("an executor failed")
            self._fetched = None
            result = error_reply(GeneralFailure(f"the executor failed: {error!r}"))
        self._answer(result, taken_ns, ready_ns)

    def _fetch(self, slots: Sequence[int]) -> None:
        """Ask the client once for all unknown slots; a wrong number of answers caches nothing (N-BUX-5)."""
        if not slots:
            return
        memories = self._callback.get_memories(slots)
        with ExitStack() as unused:
            for memory in memories:
                unused.callback(memory.close)
            if len(memories) != len(slots):
                raise GeneralFailure(f"asked for {len(slots)} memories, the client gave {len(memories)}")
            unused.pop_all()
        for slot, memory in zip(slots, memories, strict=True):
            self._executor.add_cache_entry(memory, slot)

    def _encoded(self, result: ExecutionReply) -> bytes:
        """Return the result's packet, and remember it where a program of known shapes will give the same again."""
        packet = encode_result(result.status, result.output_shapes, result.timing)
        if result.status is ErrorStatus.NONE and result.timing is NO_TIMING:
            self._answered_shapes, self._answered = result.output_shapes, packet
        return packet

    def _answer(self, result: ExecutionReply, taken_ns: int, ready_ns: int) -> None:
        is_good = result.status is _NONE
        if is_good and result.output_shapes is self._answered_shapes and result.timing is NO_TIMING:
            packet = self._answered
        else:
            packet = self._encoded(result)
        if not is_good:
            self._note(result.status, result.message)
            self._stages.count_failure()
        self._stages.record(
            self._sequence, taken_ns, ready_ns, result.engine_begin_ns, result.engine_end_ns, result.timing
        )
        if not self._put(packet):
            self._answer_too_large(packet, is_good, taken_ns, ready_ns)

    def _answer_too_large(self, packet: bytes, was_good: bool, taken_ns: int, ready_ns: int) -> None:
        records = len(packet) // DATUM_BYTES
        text = f"the result of {records} records does not fit into the result queue of {self._results.count}"
        self._note(ErrorStatus.GENERAL_FAILURE, text)
        if was_good:
            self._stages.count_failure()
        self._stages.record(self._sequence, taken_ns, ready_ns, 0, 0)
        self._put(encode_result(ErrorStatus.GENERAL_FAILURE, ()))
