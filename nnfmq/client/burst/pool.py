"""BurstPool: bursts of one model that threads share.

A burst executes one request at a time. The pool gives each burst to one thread at a time. The burst that was returned
last is lent first: its receivers are the most likely still to poll.

A loan ends with its `with` block, or when nothing refers to it any more, for instance because its thread has ended. The
garbage collector may end it at any instruction of any thread, and a signal handler may raise anywhere. So the pool has
no lock: each burst moves between pool and loan within one call into C, and `SimpleQueue.put` is reentrant. A free burst
has at least one token in `_tokens`, for which threads wait. A token too many costs one more turn of a loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import starmap
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nnfmq.base.deadlines import deadline_after, remaining_s
from nnfmq.base.ownership import Closable
from nnfmq.client.model.arrays import Array, InputValue, Outputs
from nnfmq.client.model.handle import CompiledHandle
from nnfmq.hal.errors import BadState, InvalidArgument, MissedDeadlineTransient

if TYPE_CHECKING:
    from nnfmq.client.burst.burst import Burst

_ONCE = ((),)  # the arguments of one call, for starmap


class BurstLoan:
    """A burst that a pool has lent to a thread. Use `with`: it gives the burst, and returns it to the pool."""

    def __init__(self, pool: BurstPool) -> None:
        self._pool = pool
        self._bursts: list[Burst] = []  # one, until it is returned

    def take(self, free: deque[Burst]) -> None:
        """Take the last burst of `free`. Raises IndexError if there is none."""
        self._bursts.extend(starmap(free.pop, _ONCE))

    def release(self) -> None:
        """Return the burst to the pool. Idempotent."""
        for burst in self._bursts:
            burst.discard_inputs()
            self._pool.put_back(self._bursts)

    def __enter__(self) -> Burst:
        for burst in self._bursts:
            return burst
        raise InvalidArgument("this burst was returned to its pool; call acquire() again")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        try:
            self.release()
        finally:
            if self._bursts:  # a signal handler has raised
                self.release()


class _Wakeup:
    """Wakes the threads that wait for a burst when the driver dies. Bursts refer to it, and it to none of them."""

    waiters = 0  # each thread that wakes wakes the next one, so once is enough

    def __init__(self, tokens: SimpleQueue[None]) -> None:
        self._tokens = tokens

    def wake_all(self) -> None:
        self._tokens.put(None)


class BurstPool(Closable):
    """Bursts of one model, for any number of threads. Close it, or use `with`. Thread-safe.

    A thread borrows a burst with `acquire`, or executes once with `execute`; both wait for a free burst. A borrowed
    burst has no inputs yet, even if another thread has written some. If a thread ends without returning its burst, the
    pool gets it back. Do not close a borrowed burst.
    """

    def __init__(self, model: CompiledHandle) -> None:
        self._model = model
        self._is_closed = False
        self._resources = ExitStack()
        self._free: deque[Burst] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._wakeup = _Wakeup(self._tokens)
        self.size = 0
        """The number of bursts."""

    @classmethod
    def configure(cls, model: CompiledHandle, count: int, configure_burst: Callable[[], Any]) -> Self:
        """Configure `count` bursts of `model`; blocks. `configure_burst` returns one: a Burst or a CompoundBurst.

        Raises:
            InvalidArgument: If `count` is less than 1, or as `configure_burst`.
            NnfmqError: The error of the driver's reply.
        """
        if count < 1:
            raise InvalidArgument(f"a pool has 1 burst or more, not {count}")
        pool = cls(model)
        try:
            for _ in range(count):
                burst = pool._resources.enter_context(configure_burst())
                burst.peer.add(pool._wakeup)
                pool._free.append(burst)
                pool._tokens.put(None)
            pool.size = count
        except BaseException:
            pool.close()
            raise
        return pool

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._free)} of {self.size} bursts free"
        return f"<BurstPool, {state}: {self._model.signature}>"

    def acquire(self, *, timeout: float | None = None) -> BurstLoan:
        """Wait for a free burst and borrow it: `with pool.acquire() as burst:`. Blocks; `timeout` is in seconds.

        Raises:
            MissedDeadline: If no burst becomes free within `timeout` (None = no limit).
            BadState: If the pool is closed.
            DeadObject: If the driver exits.
        """
        deadline_ns, loan = deadline_after(timeout), BurstLoan(self)
        while not loan._bursts:
            self._require_usable()
            try:
                self._tokens.get(timeout=_wait_s(deadline_ns))
                loan.take(self._free)
            except Empty:
                raise self._none_free(timeout) from None
            except IndexError:  # a token too many
                pass
            except BaseException:  # raised by a signal handler, perhaps when the token was taken
                self._tokens.put(None)
                raise
        return loan

    def execute(
        self,
        *inputs: InputValue,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> Outputs:
        """Run the model once over a free burst and return its outputs; blocks.

        Arguments and errors as for `Burst.execute`; the inputs are required. `timeout` includes the wait for a burst.
        """
        deadline_ns = deadline_after(timeout)
        with self.acquire(timeout=timeout) as burst:
            return burst.execute(*inputs, out=out, measure=measure, timeout=remaining_s(deadline_ns))

    def put_back(self, lent: list[Burst]) -> None:
        """Take the only burst out of the list; for loans."""
        try:
            self._free.extend(starmap(lent.pop, _ONCE))
        except IndexError:  # another thread has returned it meanwhile
            pass
        finally:
            self._tokens.put(None)

    def _require_usable(self) -> None:
        try:
            self._model.require_usable()
            if self._is_closed:
                raise BadState("this pool of bursts is closed")
        except BaseException:
            if self._tokens.empty():  # the next thread that waits gets this token, and so on
                self._tokens.put(None)
            raise

    def _none_free(self, timeout: float | None) -> MissedDeadlineTransient:
        return MissedDeadlineTransient(f"none of the {self.size} bursts of this pool became free within {timeout} s")

    def close(self) -> None:
        """Close all bursts, those in use too; waits up to 5 s for each execution in progress. Idempotent."""
        self._is_closed = True
        self._tokens.put(None)
        self._resources.close()


def _wait_s(deadline_ns: int | None) -> float | None:
    left = remaining_s(deadline_ns)
    return None if left is None else min(left, threading.TIMEOUT_MAX)
