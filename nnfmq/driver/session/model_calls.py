"""Calls about models: which operations a device supports, preparing, releasing (`IDevice`)."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from nnfmq.base.channel import close_all
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.logs import about, rate_limited
from nnfmq.base.ownership import Uncopyable
from nnfmq.base.verbose_log import vlog
from nnfmq.driver.cache import programs
from nnfmq.driver.cache.files import CacheFiles
from nnfmq.driver.cache.shared_files import SharedFile, shared_file
from nnfmq.driver.compilation.jobs import PrepareContext, no_progress, prepare_context
from nnfmq.driver.compilation.unfinished import UnfinishedCompilation
from nnfmq.driver.execution.binding import find_constant_ranges
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.memory.private import copy_constant_pools
from nnfmq.driver.memory.quota import QuotaCharge, adopt_files
from nnfmq.driver.session.error_translation import errors_to_status
from nnfmq.driver.session.session import Session
from nnfmq.engines.execution import TieredProgram
from nnfmq.hal.deterministic import is_deterministic
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    InvalidArgument,
    MissedDeadline,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    status_for_error,
)
from nnfmq.hal.hosted import decode_call
from nnfmq.hal.preparation import ProgramKind
from nnfmq.hal.timing import NO_LIMIT, from_limit_field
from nnfmq.hal.types import ExecutionPreference, Model, Priority, Protection
from nnfmq.serialize import messages
from nnfmq.serialize.control_protocol import NO_RESULT
from nnfmq.serialize.models import decode_model, decoded_model_bytes

_log = rate_limited("nnfmq.models")


# ----------------------------------------------------------------------------------------------------------------------
# A check that long work for a client calls between its parts: it ends the work once nobody waits for the result.


_LOOK_INTERVAL_NS = 5_000_000  # a look at the client's process takes 0.1 ms
_EXIT_S = 0.05


class Checkpoint(Uncopyable):
    """Call it often: a call takes microseconds. Used by one thread.

    Args:
        session: The session of the client that waits for the result.
        deadline_ns: The deadline on the monotonic clock; NO_LIMIT if there is none.
    """

    def __init__(self, session: Session, deadline_ns: int = NO_LIMIT) -> None:
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
    session: Session, message: messages.PrepareModel | messages.GetSupportedOperations, fds: list[int]
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
    check = Checkpoint(session, getattr(message, "deadline_ns", NO_LIMIT))
    with ExitStack() as files, ExitStack() as undo:
        memories = adopt_files(fds, message.pools)
        for memory in memories:
            files.callback(memory.close)
        try:
            decoded_bytes = decoded_model_bytes(message.model)
            charge = session.quota.charge(decoded_bytes + sum(memory.size_bytes for memory in memories))
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


def get_supported_operations(
    session: Session, message: messages.GetSupportedOperations, fds: list[int], _received_ns: int
) -> None:
    """Send which operations of a model a device supports (`IDevice::getSupportedOperations`)."""
    model, charge = receive_model(session, message, fds)
    with closing(charge):
        supported = session.devices.find(message.device).supported_operations(model, session.interface.level)
        session.interface.check_consumers(model, message.consumers)
    session.send(messages.SupportedOperations(message.call, tuple(supported)))


def describe_file(session: Session, message: messages.DescribeFile, fds: list[int], _received_ns: int) -> None:
    """Send what a device that hosts another runtime finds in a model file, and memory that other clients have, too."""
    with ExitStack() as files:
        memories = adopt_files(fds, message.pools)
        for memory in memories:
            files.callback(memory.close)
        charge = session.quota.charge(sum(memory.size_bytes for memory in memories))
        with closing(charge):
            check = Checkpoint(session, message.deadline_ns)
            device = session.devices.find(message.device)
            device.require_available()
            shared = [shared_file(memory, check) for memory in memories]
            pools = copy_constant_pools([_shared(*pair) for pair in zip(memories, shared, strict=True)], check)
            context = PrepareContext(from_limit_field(message.deadline_ns))
            with errors_to_status("opening the file"), prepare_context(context):
                description = device.describe_file(decode_call(message.file), pools)
    replaced = {i: file.fd for i, file in enumerate(shared) if file is not None and file.is_replacement}
    data, indexes = msgspec.json.encode(description), tuple(replaced)
    session.send(messages.FileDescription(message.call, ErrorStatus.NONE, "", data, indexes), [*replaced.values()])


def _shared(memory: FileMemory, file: SharedFile | None) -> FileMemory:
    """Return the memory that is used: `memory`, or what replaces it."""
    if file is None or not file.is_replacement:
        return memory
    return FileMemory.from_fd(file.fd, memory.size_bytes, protection=Protection.READ)


def prepare_model(session: Session, message: messages.PrepareModel, fds: list[int], _received_ns: int) -> None:
    """Prepare a model, with messages in the HAL's order (`IDevice::prepareModel`).

    If the arguments are invalid, the callback comes first and then a reply with the same status; otherwise the reply
    NONE comes first and then the callback.
    """
    unfinished = UnfinishedCompilation.of(message, fds)
    with ExitStack() as files:
        if unfinished is not None:
            files.callback(_close_unless_begun, session, unfinished)
        caches = _receive_caches(message.caches, fds[len(message.pools) :], files)
        model, charge = receive_model(session, message, fds[: len(message.pools)])
        with ExitStack() as undo:
            undo.callback(charge.close)
            session.models.require_capacity()
            device = session.devices.find(message.device)
            hints, extensions = messages.hints_from_data(message.hints, message.extensions)
            deadline_ns = from_limit_field(message.deadline_ns)
            interface = session.interface
            model = device.check_prepare_arguments(
                model, message.preference, message.priority, deadline_ns, interface.level, hints, extensions
            )
            interface.check_consumers(model, message.consumers)
            undo.pop_all()
        if unfinished is not None and device.compiled_kind is ProgramKind.COMPILED:
            session.unfinished.append(unfinished)
        session.send_success(message.call)
        on_progress = partial(_send_progress, session, message, model) if message.tells_progress else no_progress
        context = PrepareContext(
            deadline_ns,
            on_progress,
            is_deterministic=is_deterministic(hints, extensions),
            charge=session.quota.charge,
            preference=ExecutionPreference(message.preference),
        )
        with prepare_context(context):
            _prepare_and_call_back(
                session, message, charge, lambda: device.prepare_model(model, caches, message.preference), unfinished
            )


def _close_unless_begun(session: Session, unfinished: UnfinishedCompilation) -> None:
    """Close what is not being compiled: a compilation that has begun is closed when it ends."""
    if unfinished not in session.unfinished:
        unfinished.close()


def _send_progress(session: Session, message: messages.PrepareModel, model: Model, done: int, total: int) -> None:
    is_kept = bool(message.caches.model_count) or programs.will_keep(model)
    session.send(messages.PreparationProgress(message.call, done, total, is_kept))


def prepare_from_cache(
    session: Session, message: messages.PrepareModelFromCache, fds: list[int], _received_ns: int
) -> None:
    """Prepare a model from cache files, as `prepare_model` (`IDevice::prepareModelFromCache`).

    Invalid caches are invalid arguments.
    """
    with ExitStack() as files:
        caches = _receive_caches(message.caches, fds, files)
        session.models.require_capacity()
        device = session.devices.find(message.device)
        deadline_ns = from_limit_field(message.deadline_ns)
        contents, size = device.load_caches(caches, deadline_ns, session.quota.free_bytes)
    charge = session.quota.charge(size)
    session.send_success(message.call)
    _prepare_and_call_back(session, message, charge, lambda: device.restore_model(contents))


def _receive_caches(data: messages.CachesData, fds: list[int], resources: ExitStack) -> CacheFiles:
    """Return the cache files of a message. `resources` takes ownership of `fds`."""
    resources.callback(close_all, fds)
    return CacheFiles(data.token, fds[: data.model_count], fds[data.model_count :])


def _prepare_and_call_back(
    session: Session,
    message: messages.PrepareModel | messages.PrepareModelFromCache,
    charge: QuotaCharge,
    prepare: Callable[[], DriverPreparedModel],
    unfinished: UnfinishedCompilation | None = None,
) -> None:
    """Call `prepare` and send its result in the callback. The model takes ownership of `charge`.

    If the deadline passes, a process of its own goes on with `unfinished`.
    """
    version = message.version if isinstance(message, messages.PrepareModel) else 0  # the repository uses no cache files
    begin_s = time.monotonic()
    try:
        prepared = prepare()
        model_id = session.models.next_id()
        recorder = session.statistics.model(model_id, message.name, message.device, version)
        calls_row = session.statistics.calls_row(recorder)
        prepared = replace(
            prepared,
            charge=charge,
            priority=preparation_priority(session, message),
            order=session.order if session.devices.find(message.device).uses_cores else None,
            device=message.device,
            name=message.name,
            buffers=session.buffers,
            recorder=recorder,
            takes_unspecified=session.interface.takes_unspecified,
            constants=find_constant_ranges(prepared.model),
        ).without_constants()
    except NnfmqError as error:
        charge.close()
        if unfinished in session.unfinished:
            session.end_compilation(unfinished, is_finished=not isinstance(error, MissedDeadline))
        vlog("compilation", "device %s does not prepare model %r: %s", message.device, message.name, error)
        _log.info("device %s does not prepare a model: %s", message.device, error, extra=about(model=message.name))
        session.send(
            messages.PreparedModelReady(message.call, status_for_error(error), str(error), NO_RESULT["model_id"])
        )
        return
    vlog("compilation", "device %s has prepared model %r with id %d", message.device, message.name, model_id)
    duration_s = time.monotonic() - begin_s
    _log.info("model prepared on device %s in %.3f s", message.device, duration_s, extra=about(model=message.name))
    session.trim_soon()  # the messages and the constants are dropped when this call has returned
    session.models.insert(prepared, model_id)
    kind, compiled = prepared.kind, prepared.compiled_operations
    session.send(messages.PreparedModelReady(message.call, ErrorStatus.NONE, "", model_id, kind, compiled, calls_row))
    begun = unfinished if unfinished in session.unfinished else None
    if isinstance(prepared.program, TieredProgram):
        session.tier_up(prepared.program, prepared.priority, begun)
    elif begun is not None:
        session.end_compilation(begun, is_finished=True)


def preparation_priority(_session: Session, message: messages.PrepareModel | messages.PrepareModelFromCache) -> int:
    """Return a preparation's priority, or MEDIUM if it is invalid, which the handler rejects; a cache has none."""
    priority = message.priority if isinstance(message, messages.PrepareModel) else Priority.MEDIUM
    return priority if priority in list(Priority) else Priority.MEDIUM


def release_model(session: Session, message: messages.ReleaseModel, *_: object) -> None:
    """Forget a prepared model, whose memory is freed after its last execution."""
    session.models.pop(message.model_id)
    session.send_success(message.call)
