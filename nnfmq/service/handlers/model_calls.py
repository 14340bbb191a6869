"""Calls about models: which operations a device supports, preparing, releasing (`IDevice`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

from msgspec.structs import replace

from nnfmq.channel import close_all
from nnfmq.engines.execution import TieredProgram
from nnfmq.hal.errors import (
    ErrorStatus,
    InvalidArgument,
    MissedDeadline,
    NnfmqError,
    status_for_error,
)
from nnfmq.hal.program_kind import ProgramKind
from nnfmq.hal.timing import from_limit_field
from nnfmq.hal.types import Model, Priority
from nnfmq.serialize.messages import (
    CachesData,
    GetSupportedOperations,
    Message,
    PreparationProgress,
    PreparedModelReady,
    PrepareModel,
    PrepareModelFromCache,
    ReleaseModel,
    Reply,
    SupportedOperations,
    hints_from_data,
)
from nnfmq.service.caching import program_cache
from nnfmq.service.caching.compilation_cache import CacheFiles
from nnfmq.service.compile_jobs import PrepareContext, no_progress, prepare_context
from nnfmq.service.constant_overlap import find_constant_ranges
from nnfmq.service.driver_prepared_model import DriverPreparedModel
from nnfmq.service.handle_table import NO_ID
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, reply
from nnfmq.service.memory_quota import QuotaCharge
from nnfmq.service.received_models import receive_model
from nnfmq.service.session_context import SessionContext
from nnfmq.service.unfinished_compilation import UnfinishedCompilation
from nnfmq.verbose_log import vlog


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
    is_kept = bool(message.caches.model_count) or program_cache.will_keep(model)
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


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    GetSupportedOperations: BlockingHandler(_get_supported_operations, _supported_operations_error),
    PrepareModel: BlockingHandler(_prepare, _prepare_error, _priority),
    PrepareModelFromCache: BlockingHandler(_prepare_from_cache, _prepare_error),
    ReleaseModel: _release_model,
}
