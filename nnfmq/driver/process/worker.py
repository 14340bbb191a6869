"""A worker: the driver process that serves one client and owns all its objects.

The supervisor forks it when the client's Hello has arrived; if the driver starts workers by exec, the forked process
becomes an interpreter of its own first (`executed_worker`). From then on it depends on the client alone, and outlives a
killed supervisor. SIGTERM (from the supervisor) and the client's exit both end it immediately, with everything that it
owns. The workers of a driver share one page with the devices' status, and compiled programs (`cache.shared`).

A worker of a driver that serves several users runs under a uid of its own from its begin on (`enter_account`). Plug-ins
are imported here, after the fork: the supervisor runs no code of others. Then the worker enters its sandbox
(`sandboxes`), before it looks at the first byte of its client.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from nnfmq.base.accounts import become, note_holder
from nnfmq.base.channel import Channel
from nnfmq.base.memory import Memory
from nnfmq.base.sandbox.sandbox import enter
from nnfmq.driver.cache import shared
from nnfmq.driver.cache.files import find_or_create_key, use_key
from nnfmq.driver.cache.user_caches import cache_of
from nnfmq.driver.compilation import jobs
from nnfmq.driver.devices import hosted_runtimes, installation, plugins
from nnfmq.driver.devices.configuration import DeviceEntry
from nnfmq.driver.devices.installation import DriverOptions
from nnfmq.driver.devices.registry import make_devices
from nnfmq.driver.execution.order import ClientOrder
from nnfmq.driver.execution.turns import CoreTurns
from nnfmq.driver.memory.quota import MemoryShare, MemoryShares, map_shares, quota_limit_bytes
from nnfmq.driver.process.heartbeats import beat_for_ever
from nnfmq.driver.process.sandboxes import prepare_worker_sandbox, worker_sandbox
from nnfmq.driver.process.statistics_area import SharedStatistics, WorkerStatistics
from nnfmq.driver.process.trace import WORKER_TRACE, TraceArea
from nnfmq.driver.session.calls import HANDLERS
from nnfmq.driver.session.session import Session, run_session
from nnfmq.engines.compiled.perf_map import open_perf_map
from nnfmq.engines.compiled.thread_pool import divide_cores
from nnfmq.hal.errors import NnfmqError
from nnfmq.hal.types import Protection
from nnfmq.operations import load_all

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "WorkerFds",
    "WorkerMemories",
    "WorkerSetup",
    "enter_account",
    "inherited_memories",
    "main",
    "mapped_memories",
    "preload",
]

_log = logging.getLogger("nnfmq.worker")


class WorkerFds(NamedTuple):
    """The fds of a worker, which it owns.

    Attributes:
        control: The connection to the client.
        status: The memory of the devices' status, STATUS_PAGE_BYTES.
        shares: The memory of `MemoryShares`.
        core_shares: The memory of `CoreShares`.
        trace: The memory of `TraceArea`; -1 if the client may not trace others.
        shared_cache: The connection to the supervisor's shared program cache.
        compile_relay: The connection over which the supervisor takes requests for compile processes.
        statistics: The memory of the statistics where the worker counts.
        page: The memory of what the client counts itself.
        heartbeat: The pipe by which the supervisor knows that it does not hang (`heartbeats`).
        uid_lock: The lock on the worker's uid (`UidPool`); -1 if it has none of its own.
    """

    control: int
    status: int
    shares: int
    core_shares: int
    trace: int
    shared_cache: int
    compile_relay: int
    statistics: int
    page: int
    heartbeat: int
    uid_lock: int = -1


class WorkerSetup(NamedTuple):
    """The parts that all workers of a driver have in common.

    Attributes:
        entries: The devices of the configuration.
        plugins: The entry points of the installed plug-ins.
        options: What a session needs to know of the driver.
        is_executed: Whether each is an interpreter of its own, with an address layout of its own ($NNFMQ_WORKER_START).
    """

    entries: Sequence[DeviceEntry]
    plugins: Sequence[EntryPoint]
    options: DriverOptions
    is_executed: bool = False


class WorkerMemories(NamedTuple):
    """The mappings of a worker of which it may write to a part only, or which other processes must not write to.

    Attributes:
        statistics: Where the worker counts.
        statistics_slot: Its slot there.
        trace: The memory of `TraceArea`; None if the client may not trace others.
        own_words: Its words of `MemoryShares`.
        shares: The memory of `MemoryShares`, for reading.
    """

    statistics: SharedStatistics | WorkerStatistics
    statistics_slot: int
    trace: Memory | None
    own_words: memoryview
    shares: Memory


def inherited_memories(
    fds: WorkerFds,
    slot: int,
    statistics: tuple[SharedStatistics | WorkerStatistics, int],
    traces: TraceArea,
    shares: MemoryShares,
) -> WorkerMemories:
    """Return the memories of a forked worker: the supervisor's mappings, which it inherits, and its children do not."""
    statistics[0].memory.keep_from_children()
    trace = traces.memory if fds.trace >= 0 else None
    if trace is not None:
        trace.keep_from_children()
    all_shares = Memory.adopt(fds.shares, protection=Protection.READ)
    return WorkerMemories(*statistics, trace, shares.own_words(slot), all_shares)


def mapped_memories(fds: WorkerFds, slot: int) -> WorkerMemories:
    """Return the memories of a worker that inherits no mappings: it maps them."""
    statistics = WorkerStatistics(Memory.adopt(fds.statistics))
    trace = Memory.adopt(fds.trace) if fds.trace >= 0 else None
    return WorkerMemories(statistics, 0, trace, *map_shares(fds.shares, slot))


def preload(*, has_cache: bool = True) -> None:
    """Do once, in the supervisor, what every worker would do again. Importing this module is a part of it.

    `has_cache`: workers open the files of the driver's own cache.
    """
    load_all()
    with suppress(ImportError, OSError):  # the compiling engine may be unable to run on this machine
        import nnfmq.engines.compiled.partition  # noqa: F401  everything that prepares a model, except LLVM
        from nnfmq.engines.compiled.kernel_compilation import kernel_types

        kernel_types()
    installation.read_in_child()
    hosted_runtimes.preload()
    prepare_worker_sandbox(has_cache)


def enter_account(uid: int, uid_lock: int, client_uid: int) -> None:
    """Run under a uid of workers from now on, with the key of the cache of the client's user. Raises OSError."""
    note_holder(uid_lock)
    try:
        with cache_of(client_uid):
            use_key(find_or_create_key())
    except (NnfmqError, OSError, RuntimeError) as error:  # RuntimeError: the account has no home directory
        _log.info("nothing is cached: %s", error)
    become(uid)


def main(
    hello: bytes,
    fds: WorkerFds,
    slot: int,
    setup: WorkerSetup,
    open_memories: Callable[[], WorkerMemories],
) -> NoReturn:
    """Serve the client whose first message was `hello`, with the configured devices and those of plug-ins.

    `slot` is this worker's place among the shares of memory and of the cores, counted from 1.
    """
    memories = open_memories()
    if memories.trace is not None:
        WORKER_TRACE.use_area(memories.trace, slot)
    plugins.load_extensions(setup.plugins)
    shared.connect(fds.shared_cache, opens_files=setup.options.uid != os.getuid())
    jobs.connect_compile_server(fds.compile_relay)
    devices = make_devices(setup.entries, setup.plugins)
    status_access = Protection.READ_WRITE if setup.options.allows_device_status else Protection.READ
    status = Memory.adopt(fds.status, protection=status_access)  # until the process exits
    devices.share_status(status.view)
    share = MemoryShare(memories.own_words, memories.shares, quota_limit_bytes(), slot)
    assert setup.options.supervisor_pid is not None  # this is not the embedded driver
    turns = CoreTurns(Memory.adopt(fds.core_shares), slot, setup.options.supervisor_pid)
    divide_cores(turns.division)
    channel, order = Channel.adopt(fds.control), ClientOrder(turns)
    sandbox = worker_sandbox(devices.values(), has_own_uid=fds.uid_lock >= 0)
    memories.statistics.use_page(Memory.adopt(fds.page))  # until the process exits
    open_perf_map()

    def enter_sandbox() -> None:
        enter(sandbox)
        beat_for_ever(fds.heartbeat)  # by a thread, which must not be older than the sandbox

    own_statistics = memories.statistics, memories.statistics_slot
    run_session(
        Session(channel, "nnfmq", HANDLERS, devices, setup.options, hello, share, order, own_statistics, enter_sandbox)
    )
