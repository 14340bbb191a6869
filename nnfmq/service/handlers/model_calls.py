"""Calls about models: what a device supports, preparing, releasing (IDevice)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nnfmq.channel import close_all
from nnfmq.engines.execution import TieredProgram
from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError, ProtocolError, status_for_error
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
from nnfmq.serialize.model_codec import decode_model
from nnfmq.service.caching.compilation_cache import CacheFiles
from nnfmq.service.compile_jobs import PrepareContext, no_progress, prepare_context
from nnfmq.service.driver_prepared_model import DriverPreparedModel
from nnfmq.service.error_translation import errors_to_status
from nnfmq.service.handle_table import NO_ID
from nnfmq.service.handlers.base import BlockingHandler, InlineHandler, reply
from nnfmq.service.io_binding import find_constant_ranges
from nnfmq.service.memory_quota import MemoryQuota, QuotaCharge
from nnfmq.service.private_memory import copy_to_private_pools

if TYPE_CHECKING:
    from nnfmq.service.session import Session


def _supported(session: Session, message: GetSupportedOperations, fds: list[int], _seen_ns: int) -> None:
    model, charge = _received_model(session.quota, message, fds)
    with closing(charge):
        supported = session.devices.find(message.device).supported_operations(model, session.interface.level)
        session.interface.check_consumers(model, message.consumers)
    session.send(SupportedOperations(message.call, tuple(supported)))


def _refuse_supported(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return (SupportedOperations(call, (), status, text),)


def _prepare(session: Session, message: PrepareModel, fds: list[int], _seen_ns: int) -> None:
    """Answer as the HAL orders it: bad arguments → callback, then the same status; else NONE, then the callback."""
    with ExitStack() as files:
        caches = _cache_files(message.caches, fds[len(message.pools) :], files)
        model, charge = _received_model(session.quota, message, fds[: len(message.pools)])
        with ExitStack() as undo:
            undo.callback(charge.close)
            session.models.require_capacity()
            device = session.devices.find(message.device)
            hints, extensions = hints_from_data(message.hints, message.extensions)
            deadline_ns = from_limit_field(message.deadline_ns)
            preference, priority, dialect = message.preference, message.priority, session.interface
            model = device.check_prepare_arguments(
                model, preference, priority, deadline_ns, dialect.level, hints, extensions
            )
            dialect.check_consumers(model, message.consumers)
            undo.pop_all()
        session.send(reply(message.call))
        on_progress = partial(_tell, session, message.call) if message.tells_progress else no_progress
        with prepare_context(PrepareContext(deadline_ns, on_progress)):
            _finish(session, message, charge, lambda: device.prepare_model(model, caches, preference))


def _tell(session: Session, call: int, done: int, total: int) -> None:
    session.send(PreparationProgress(call, done, total))


def _prepare_from_cache(session: Session, message: PrepareModelFromCache, fds: list[int], _seen_ns: int) -> None:
    """Answer as `_prepare` does; what is wrong with a cache is a bad argument."""
    with ExitStack() as files:
        caches = _cache_files(message.caches, fds, files)
        session.models.require_capacity()
        device = session.devices.find(message.device)
        deadline_ns = from_limit_field(message.deadline_ns)
        contents, size = device.load_caches(caches, deadline_ns, session.quota.free_bytes)
    charge = session.quota.charge(size)
    session.send(reply(message.call))
    _finish(session, message, charge, lambda: device.restore_model(contents))


def _cache_files(data: CachesData, fds: list[int], stack: ExitStack) -> CacheFiles:
    """Return the files that came with a message; `stack` closes them."""
    stack.callback(close_all, fds)
    return CacheFiles(data.token, fds[: data.model_count], fds[data.model_count :])


def _finish(
    session: Session,
    message: PrepareModel | PrepareModelFromCache,
    charge: QuotaCharge,
    make: Callable[[], DriverPreparedModel],
) -> None:
    """Make a model, whose cost `charge` is, and say so, or why not: the callback."""
    try:
        made = make()
        prepared = replace(
            made,
            charge=charge,
            priority=_priority(session, message),
            device=message.device,
            buffers=session.buffers,
            takes_unspecified=session.interface.takes_unspecified,
            constants=find_constant_ranges(made.model),
        )
    except NnfmqError as error:
        charge.close()
        session.send(PreparedModelReady(message.call, status_for_error(error), str(error), NO_ID))
        return
    session.send(PreparedModelReady(message.call, ErrorStatus.NONE, "", session.models.add(prepared)))
    if isinstance(prepared.program, TieredProgram):
        session.improve(prepared.program, prepared.priority)


def _priority(_session: Session, message: PrepareModel | PrepareModelFromCache) -> int:
    """Return how important a preparation is; what is no priority is refused when it is its turn."""
    priority = message.priority if isinstance(message, PrepareModel) else Priority.MEDIUM  # a cache says none
    return priority if priority in list(Priority) else Priority.MEDIUM


def _refuse_prepare(call: int, status: ErrorStatus, text: str) -> tuple[Message, ...]:
    return PreparedModelReady(call, status, text, NO_ID), Reply(call, status, text)


def _received_model(
    quota: MemoryQuota, message: PrepareModel | GetSupportedOperations, fds: list[int]
) -> tuple[Model, QuotaCharge]:
    """Return the model over private copies of its pools, as the client can write to its own, and what it costs.

    Takes over the fds, whatever is wrong with the rest, so call it first.
    """
    pools = copy_to_private_pools(quota.adopt_all(fds, message.pools), quota)
    charge = quota.charge(len(message.model) + sum(pool.size_bytes for pool in pools))
    with ExitStack() as undo:
        undo.callback(charge.close)
        try:
            with errors_to_status("reading the model"):
                model = decode_model(message.model, pools)
        except ProtocolError as error:
            raise InvalidArgument(str(error)) from error
        undo.pop_all()
    return model, charge


def _release_model(session: Session, message: ReleaseModel, _fds: list[int]) -> None:
    try:
        session.models.take(message.model_id)
    except InvalidArgument as error:
        session.send(reply(message.call, error))
    else:
        session.send(reply(message.call))


HANDLERS: dict[type[Message], InlineHandler | BlockingHandler] = {
    GetSupportedOperations: BlockingHandler(_supported, _refuse_supported),
    PrepareModel: BlockingHandler(_prepare, _refuse_prepare, _priority),
    PrepareModelFromCache: BlockingHandler(_prepare_from_cache, _refuse_prepare),
    ReleaseModel: _release_model,
}
