"""Files that a runtime has opened in this worker: what its client is charged for them, and the one that is kept.

The memory of a runtime is its own: nobody charges it before it is taken. So the client is charged with what the
process's private memory in use has grown by while the file was opened, and again in the first execution, in which
runtimes allocate their arenas. The first file of a runtime pays for what importing that takes as well, and of two files
that are opened at the same time each may pay for both. What a quota cannot see before, RLIMIT_DATA ends: an allocation
beyond the client's limit fails (`driver.memory.quota`).

That limit counts memory when it is reserved, not when it is used, so it is raised by the stacks of the threads of each
open file.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from nnfmq.driver.cache.shared_files import SharedFile
from nnfmq.driver.memory.object_limits import return_threads, take_threads
from nnfmq.driver.memory.quota import add_to_limit
from nnfmq.engines import memory
from nnfmq.engines.memory import Charge
from nnfmq.hal.errors import HalError, InvalidArgument, NnfmqError, ResourceExhausted, ResourceExhaustedTransient

__all__ = ["KeptFile", "OpenFile", "errors_of", "runtime_error"]

ModelT = TypeVar("ModelT")
ResultT = TypeVar("ResultT")
_STACK_BYTES_MAX = 64 << 20  # of a thread that a runtime starts; usually 8 MiB
_OUT_OF_MEMORY = (
    "bad_alloc", "bad allocation", "cannot allocate memory", "failed to allocate", "not enough memory",
    "out of memory", "resource_exhausted",
)  # fmt: skip


def runtime_error(device: str, error: Exception, otherwise: type[HalError]) -> HalError:
    """Return the error of a client with a runtime's text: ResourceExhausted if memory is missing, or `otherwise`."""
    text = str(error) or repr(error)
    is_out_of_memory = isinstance(error, MemoryError) or any(phrase in text.lower() for phrase in _OUT_OF_MEMORY)
    return (ResourceExhaustedTransient if is_out_of_memory else otherwise)(f"{device}: {text}")


@contextmanager
def errors_of(device: str) -> Iterator[None]:
    """Make InvalidArgument or ResourceExhausted of what a runtime raises in the block about a client's file."""
    try:
        yield
    except NnfmqError:
        raise
    except Exception as error:
        raise runtime_error(device, error, InvalidArgument) from error


class OpenFile(Generic[ModelT]):
    """An open file, and the memory that its client is charged for it, until the last reference is dropped.

    It keeps `shared`, the memory of its bytes that other workers have, too.

    Attributes:
        model: What the runtime has opened.
        threads: How many threads an execution uses.
        is_charged: Whether everything is charged, also what the first execution took.
    """

    def __init__(self, threads: int, open_file: Callable[[], ModelT], shared: Sequence[SharedFile | None] = ()) -> None:
        """Open a file.

        Raises:
            ResourceExhausted: If the client's limits do not allow the memory, or the threads.
            Exception: What `open_file` raises.
        """
        self.is_charged = False
        self._shared = tuple(shared)
        self._charges: list[Charge | None] = []
        self._before_run: int | None = None
        self.threads = threads
        self._taken = self._stack_bytes = 0
        take_threads(threads - 1)
        self._taken, self._stack_bytes = threads - 1, (threads - 1) * _stack_bytes()
        add_to_limit(self._stack_bytes)
        before = _private_bytes()
        self.model = open_file()
        memory.trim_heap()  # what a runtime frees again is several times what it keeps of a small model
        self._charge(before)

    def run_first(self, run: Callable[[], ResultT]) -> ResultT:
        """Return the result of the first execution, and charge what that took; several threads may be the first.

        Raises:
            ResourceExhausted: If the client's limit does not allow it; the next execution is then the first again.
            Exception: What `run` raises.
        """
        if self._before_run is None:
            self._before_run = _private_bytes()
        result = run()
        if not self.is_charged:  # another thread's may have ended meanwhile
            self._charge(self._before_run)
            self.is_charged = True
        return result

    def _charge(self, before: int) -> None:
        self._charges.append(memory.charge(max(_private_bytes() - before, 0)))

    def __del__(self) -> None:
        self.__dict__.pop("model", None)  # first: its threads end
        add_to_limit(-self._stack_bytes)
        return_threads(self._taken)


def _stack_bytes() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _STACK_BYTES_MAX if soft == resource.RLIM_INFINITY else min(soft, _STACK_BYTES_MAX)


def _private_bytes() -> int:
    """Return the private memory of this process that is in use."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class _Kept(NamedTuple, Generic[ModelT]):
    key: object
    opened: OpenFile[ModelT]
    parts: Sequence[memoryview]  # mapped as long as the key may be compared with that of another file
    charge: Charge | None


class KeptFile(Generic[ModelT]):
    """At most one open file, for the preparation that follows a question about it. Thread-safe.

    An idle worker drops it, and so does one whose client reaches its limit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: _Kept[ModelT] | None = None
        memory.register(self)

    def keep(self, key: object, opened: OpenFile[ModelT], parts: Sequence[memoryview]) -> None:
        """Keep an open file, unless the client's limit does not allow its parts; they are charged meanwhile."""
        with suppress(ResourceExhausted):
            charge = memory.charge(sum(len(part) for part in parts))
            self._exchange(_Kept(key, opened, parts, charge))

    def take(self, key: object) -> OpenFile[ModelT] | None:
        """Return the open file with this key, which is then not kept any more; None if another one is kept."""
        with self._lock:
            found = self._kept
            if found is None or found.key != key:
                return None
            self._kept = None
        return found.opened

    def trim(self) -> None:
        """Drop the file (`engines.memory.Trimmable`)."""
        self._exchange(None)

    def _exchange(self, kept: _Kept[ModelT] | None) -> None:
        with self._lock:
            previous, self._kept = self._kept, kept
        del previous  # outside of the lock: a runtime may take long to close a file
