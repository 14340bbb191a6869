"""Calls about models and devices, and about traces: support, preparation, release, status (`IDevice`)."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import NoReturn, Protocol

from msgspec.structs import replace

from nnfmq.base.channel import close_all
from nnfmq.base.ownership import Uncopyable
from nnfmq.base.verbose_log import vlog
from nnfmq.driver.cache import programs
from nnfmq.driver.cache.files import CacheFiles
from nnfmq.driver.compilation.jobs import PrepareContext, no_progress, prepare_context
from nnfmq.driver.compilation.unfinished import UnfinishedCompilation
from nnfmq.driver.execution.binding import find_constant_ranges
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.memory.private import copy_constant_pools
from nnfmq.driver.memory.quota import QuotaCharge, adopt_files
from nnfmq.driver.process.trace import WORKER_TRACE
from nnfmq.driver.session.calls import BlockingHandler, InlineHandler, SessionContext, error_as_reply, reply
from nnfmq.driver.session.error_translation import errors_to_status
from nnfmq.driver.session.handle_table import NO_ID
from nnfmq.engines.execution import TieredProgram
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    status_for_error,
)
from nnfmq.hal.preparation import ProgramKind
from nnfmq.hal.timing import NO_LIMIT, from_limit_field
from nnfmq.hal.types import Model, Priority, Protection
from nnfmq.serialize.messages import (
    CachesData,
    DeviceCapabilities,
    DeviceList,
    DriverTraced,
    GetCapabilities,
    GetStatistics,
    GetSupportedOperations,
    ListDevices,
    MemoryData,
    Message,
    PreparationProgress,
    PreparedModelReady,
    PrepareModel,
    PrepareModelFromCache,
    ReleaseModel,
    Reply,
    SetDeviceStatus,
    StartTrace,
    StatisticsMemory,
    SupportedOperations,
    TraceDriver,
    capabilities_to_data,
    hints_from_data,
)
from nnfmq.serialize.models import decode_model, decoded_model_bytes

__all__ = ["HANDLERS", "Checkpoint", "receive_model"]


# ----------------------------------------------------------------------------------------------------------------------
# A check that long work for a client calls between its parts: it ends the work once nobody waits for the result.


_LOOK_INTERVAL_NS = 5_000_000  # a look at the client's process takes 0.1 ms
_EXIT_S = 0.05


class _Session(Protocol):
    """What a checkpoint needs of the session."""

    @property
    def is_closed(self) -> bool: ...

    def client_was_killed(self) -> bool: ...

    def stop(self) -> None: ...


class Checkpoint(Uncopyable):
    """Call it often: a call takes microseconds. Used by one thread.

    Args:
        session: The session of the client that waits for the result.
        deadline_ns: The deadline on the monotonic clock; NO_LIMIT if there is none.
    """

    def __init__(self, session: _Session, deadline_ns: int = NO_LIMIT) -> None:
        self._session = session
        self._deadline_ns = deadline_ns
        begin_ns = time.monotonic_ns()
        self._had_passed = NO_LIMIT < deadline_ns <= begin_ns
        self._look_ns = begin_ns + _LOOK_INTERVAL_NS

    def __call__(self) -> None:
        """Return if the work must go on.

        Raises:
            DeadObject: If the session has ended, or the client has been killed, which ends the session.
            MissedDeadlinePersistent: If the deadline had passed when this checkpoint was made.
            MissedDeadlineTransient: If the deadline has passed since.
        """
        if self._session.is_closed:
            self._end("the client has exited")
        now_ns = time.monotonic_ns()
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + _LOOK_INTERVAL_NS
            if self._session.client_was_killed():
                self._end("the client has been killed")
        if self._had_passed:
            raise MissedDeadlinePersistent("the deadline had passed before the model was received")
        if NO_LIMIT < self._deadline_ns <= now_ns:
            raise MissedDeadlineTransient("the deadline passed while the model was received")

    def _end(self, reason: str) -> NoReturn:
        """End the session, whose main thread exits the process, and raise DeadObject if that takes long."""
        self._session.stop()
        # Without this pause, this thread would free what it has made, perhaps millions of objects, and so keep the GIL
        # from the main thread.
        time.sleep(_EXIT_S)
        raise DeadObject(reason)


# ----------------------------------------------------------------------------------------------------------------------
# Receiving a client's model: its pools are copied, and its bytes decoded, in slices.
#
# A model may have gigabytes of constants and millions of operands. Between slices the driver lets other threads run,
# charges the client, and ends the work if nobody waits for the result.


_FROZEN_SLICES = 64  # each time; 32,768 operands, which few models have


def receive_model(
    context: SessionContext, message: PrepareModel | GetSupportedOperations, fds: list[int]
) -> tuple[Model, QuotaCharge]:
    """Return the model over private copies of its pools, and the charge for it.

    Takes ownership of `fds` also if it raises, so call it before anything else that can raise.

    Raises:
        InvalidArgument: If a memory or the model's encoding is invalid.
        ResourceExhausted: If the quota is exhausted.
        MissedDeadlineTransient: If the deadline passes meanwhile.
        MissedDeadlinePersistent: If it had passed before, and much would have to be copied.
        DeadObject: If the session ends meanwhile.
    """
    check = Checkpoint(context, getattr(message, "deadline_ns", NO_LIMIT))
    with ExitStack() as files, ExitStack() as undo:
        memories = adopt_files(fds, message.pools)
        for memory in memories:
            files.callback(memory.close)
        try:
            decoded_bytes = decoded_model_bytes(message.model)
            charge = context.quota.charge(decoded_bytes + sum(memory.size_bytes for memory in memories))
            undo.callback(charge.close)
            pools = copy_constant_pools(memories, check)
            with errors_to_status("reading the model"):
                model = decode_model(message.model, pools, _frozen_often(check))
        except ProtocolError as error:
            raise InvalidArgument(str(error)) from error
        undo.pop_all()
    return model, charge


def _frozen_often(check: Checkpoint) -> Callable[[], None]:
    """Return a function that calls `check`, and keeps what was decoded until now out of garbage collections.

    They would visit all of these objects again and again, with the GIL held: 0.4 s each time for two million operands.
    The objects have no cycles, so reference counts free them.
    """
    slices = itertools.count(1)

    def check_and_freeze() -> None:
        check()
        if next(slices) % _FROZEN_SLICES == 0:
            gc.freeze()

    return check_and_freeze


# ----------------------------------------------------------------------------------------------------------------------
# Calls about models: which operations a device supports, preparing, releasing (`IDevice`).


def _get_supported_operations(
    context: SessionContext, message: GetSupportedOperations, fds: list[int], _received_ns: int
) -> None:
    model, charge = receive_model(context, message, fds)
    with closing(charge):
        supported = context.devices.find(message.device).supported_operations(model, context.interface.level)
        context.interface.check_consumers(model, message.consumers)
    context.send(SupportedOperations(message.call, tuple(supported)))


def _supported_operations_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (SupportedOperations(call, (), status, text),)


def _prepare(context: SessionContext, message: PrepareModel, fds: list[int], _received_ns: int) -> None:
    """Prepare a model, with messages in the HAL's order.

    If the arguments are invalid, the callback comes first and then a reply with the same status (`_prepare_error`);
    otherwise the reply NONE comes first and then the callback.
    """
    unfinished = UnfinishedCompilation.of(message, fds)
    with ExitStack() as files:
        if unfinished is not None:
            files.callback(_close_unless_begun, context, unfinished)
        caches = _receive_caches(message.caches, fds[len(message.pools) :], files)
        model, charge = receive_model(context, message, fds[: len(message.pools)])
        with ExitStack() as undo:
            undo.callback(charge.close)
            context.models.require_capacity()
            device = context.devices.find(message.device)
            hints, extensions = hints_from_data(message.hints, message.extensions)
            deadline_ns = from_limit_field(message.deadline_ns)
            interface = context.interface
            model = device.check_prepare_arguments(
                model, message.preference, message.priority, deadline_ns, interface.level, hints, extensions
            )
            interface.check_consumers(model, message.consumers)
            undo.pop_all()
        if unfinished is not None and device.compiled_kind is ProgramKind.COMPILED:
            context.unfinished.append(unfinished)
        context.send(reply(message.call))
        on_progress = partial(_send_progress, context, message, model) if message.tells_progress else no_progress
        with prepare_context(PrepareContext(deadline_ns, on_progress)):
            _prepare_and_call_back(
                context, message, charge, lambda: device.prepare_model(model, caches, message.preference), unfinished
            )


def _close_unless_begun(context: SessionContext, unfinished: UnfinishedCompilation) -> None:
    """Close what is not being compiled: a compilation that has begun is closed when it ends."""
    if unfinished not in context.unfinished:
        unfinished.close()


def _send_progress(context: SessionContext, message: PrepareModel, model: Model, done: int, total: int) -> None:
    is_kept = bool(message.caches.model_count) or programs.will_keep(model)
    context.send(PreparationProgress(message.call, done, total, is_kept))


def _prepare_from_cache(
    context: SessionContext, message: PrepareModelFromCache, fds: list[int], _received_ns: int
) -> None:
    """Prepare a model from cache files, with messages in the same order as `_prepare`.

    Invalid caches are invalid arguments.
    """
    with ExitStack() as files:
        caches = _receive_caches(message.caches, fds, files)
        context.models.require_capacity()
        device = context.devices.find(message.device)
        deadline_ns = from_limit_field(message.deadline_ns)
        contents, size = device.load_caches(caches, deadline_ns, context.quota.free_bytes)
    charge = context.quota.charge(size)
    context.send(reply(message.call))
    _prepare_and_call_back(context, message, charge, lambda: device.restore_model(contents))


def _receive_caches(data: CachesData, fds: list[int], resources: ExitStack) -> CacheFiles:
    """Return the cache files of a message. `resources` takes ownership of `fds`."""
    resources.callback(close_all, fds)
    return CacheFiles(data.token, fds[: data.model_count], fds[data.model_count :])


def _prepare_and_call_back(
    context: SessionContext,
    message: PrepareModel | PrepareModelFromCache,
    charge: QuotaCharge,
    prepare: Callable[[], DriverPreparedModel],
    unfinished: UnfinishedCompilation | None = None,
) -> None:
    """Call `prepare` and send its result in the callback. The model takes ownership of `charge`.

    If the deadline passes, a process of its own goes on with `unfinished`.
    """
    version = message.version if isinstance(message, PrepareModel) else 0  # the repository uses no cache files
    try:
        prepared = prepare()
        model_id = context.models.next_id()
        prepared = replace(
            prepared,
            charge=charge,
            priority=_priority(context, message),
            order=context.order if context.devices.find(message.device).uses_cores else None,
            device=message.device,
            buffers=context.buffers,
            recorder=context.statistics.model(model_id, message.name, message.device, version),
            takes_unspecified=context.interface.takes_unspecified,
            constants=find_constant_ranges(prepared.model),
        ).without_constants()
    except NnfmqError as error:
        charge.close()
        if unfinished in context.unfinished:
            context.end_compilation(unfinished, is_finished=not isinstance(error, MissedDeadline))
        vlog("compilation", "device %s does not prepare model %r: %s", message.device, message.name, error)
        context.send(PreparedModelReady(message.call, status_for_error(error), str(error), NO_ID))
        return
    vlog("compilation", "device %s has prepared model %r with id %d", message.device, message.name, model_id)
    context.trim_soon()  # the messages and the constants are dropped when this call has returned
    context.models.insert(prepared, model_id)
    kind, compiled = prepared.kind, prepared.compiled_operations
    context.send(PreparedModelReady(message.call, ErrorStatus.NONE, "", model_id, kind, compiled))
    begun = unfinished if unfinished in context.unfinished else None
    if isinstance(prepared.program, TieredProgram):
        context.tier_up(prepared.program, prepared.priority, begun)
    elif begun is not None:
        context.end_compilation(begun, is_finished=True)


def _priority(_context: SessionContext, message: PrepareModel | PrepareModelFromCache) -> int:
    """Return a preparation's priority, or MEDIUM if it is invalid, which the handler rejects; a cache has none."""
    priority = message.priority if isinstance(message, PrepareModel) else Priority.MEDIUM
    return priority if priority in list(Priority) else Priority.MEDIUM


def _prepare_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return PreparedModelReady(call, status, text, NO_ID), Reply(call, status, text)


def _release_model(context: SessionContext, message: ReleaseModel, _fds: list[int]) -> None:
    try:
        context.models.pop(message.model_id)
    except InvalidArgument as error:
        context.send(reply(message.call, error))
    else:
        context.send(reply(message.call))


_MODEL_HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    GetSupportedOperations: BlockingHandler(_get_supported_operations, _supported_operations_error),
    PrepareModel: BlockingHandler(_prepare, _prepare_error, _priority),
    PrepareModelFromCache: BlockingHandler(_prepare_from_cache, _prepare_error),
    ReleaseModel: _release_model,
}


# ----------------------------------------------------------------------------------------------------------------------
# Calls about devices: their list, capabilities, and the status that an administrator sets; and the statistics.


def _list_devices(context: SessionContext, message: ListDevices, _fds: list[int]) -> None:
    context.send(DeviceList(message.call, tuple(device.info for device in context.devices.values())))


def _get_capabilities(context: SessionContext, message: GetCapabilities, _fds: list[int], _received_ns: int) -> None:
    capabilities = capabilities_to_data(context.devices.find(message.device).get_capabilities())
    context.send(DeviceCapabilities(message.call, ErrorStatus.NONE, "", capabilities))


def _capabilities_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (DeviceCapabilities(call, status, text),)


def _set_device_status(context: SessionContext, message: SetDeviceStatus, _fds: list[int], _received_ns: int) -> None:
    _require_administrator(context)
    if not context.options.allows_device_status:
        raise GeneralFailure(
            "this driver lets no client set the status of devices: start it with `nnfmq serve --allow-device-status`"
        )
    context.devices.set_status(message.device, message.status, is_kept=message.is_kept)
    context.send(reply(message.call))


def _require_administrator(context: SessionContext) -> None:
    if context.client_uid not in (os.getuid(), 0):  # a driver may serve other users, too
        raise GeneralFailure(f"uid {context.client_uid} does not administer this driver, which runs as {os.getuid()}")


def _get_statistics(context: SessionContext, message: GetStatistics, _fds: list[int], _received_ns: int) -> None:
    _require_administrator(context)
    fd, size_bytes = context.statistics_area.open_for_reading()
    try:
        data = MemoryData(size_bytes, 0, Protection.READ.value)
        context.send(StatisticsMemory(message.call, ErrorStatus.NONE, "", (data,)), [fd])
    finally:
        os.close(fd)


def _statistics_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (StatisticsMemory(call, status, text),)


_DEVICE_HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    ListDevices: _list_devices,
    GetCapabilities: BlockingHandler(_get_capabilities, _capabilities_error),
    SetDeviceStatus: BlockingHandler(_set_device_status, error_as_reply),
    GetStatistics: BlockingHandler(_get_statistics, _statistics_error),
}


# ----------------------------------------------------------------------------------------------------------------------
# Calls about traces: the ring of one client, and the area of all.


def _start_trace(context: SessionContext, message: StartTrace, fds: list[int], _received_ns: int) -> None:
    (memory,) = context.quota.adopt_mapped(fds)
    WORKER_TRACE.record_to(memory)
    context.send(reply(message.call))


def _trace_driver(context: SessionContext, message: TraceDriver, _fds: list[int], _received_ns: int) -> None:
    if context.client_uid not in (os.getuid(), 0):  # it would see what other users' clients do
        raise GeneralFailure(f"uid {context.client_uid} does not administer this driver, which runs as {os.getuid()}")
    fd = WORKER_TRACE.open_area()
    try:
        context.send(DriverTraced(message.call, ErrorStatus.NONE, "", 1), [fd])
    finally:
        os.close(fd)


def _traced_error(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (DriverTraced(call, status, text),)


_TRACE_HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    StartTrace: BlockingHandler(_start_trace, error_as_reply, is_launch=True),
    TraceDriver: BlockingHandler(_trace_driver, _traced_error),
}

HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    **_MODEL_HANDLERS,
    **_DEVICE_HANDLERS,
    **_TRACE_HANDLERS,
}
