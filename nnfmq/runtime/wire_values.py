"""Conversion of execution options, queues and memories to the values that messages carry, for all execution modes."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, cast

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.timing import from_seconds, to_limit_field
from nnfmq.hal.types import (
    BufferToken,
    ExecutionConfig,
    ExtensionNameAndPrefix,
    LoopTimeoutDurationNs,
    MeasureTiming,
    Pool,
    SharedPool,
    TokenValuePair,
)
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.model_handle import ModelHandle
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.queue import MessageQueue  # a client without bursts has no queues

_log = logging.getLogger("nnfmq.client")


def to_wire_deadline(connection: Connection, deadline_ns: int | None) -> int:
    """Return a deadline as messages carry it: no limit also if the interface version has no deadlines.

    With such a version the deadline only ends the client's wait.
    """
    return to_limit_field(deadline_ns if connection.has_deadlines else None)


def make_execution_config(measure: bool, loop_timeout: float | None) -> ExecutionConfig:
    """Return the configuration of an execution.

    `loop_timeout` is in seconds; None = the HAL's default. One above the HAL's maximum is reduced to it, with a warning
    (CF-5).

    Raises:
        InvalidArgument: If `loop_timeout` is negative or NaN.
    """
    measure_timing = MeasureTiming.YES if measure else MeasureTiming.NO
    loop_timeout_ns = from_seconds(loop_timeout, "a loop timeout")
    if loop_timeout_ns is None:
        return ExecutionConfig(measure_timing)
    maximum_ns = int(LoopTimeoutDurationNs.MAXIMUM)
    if loop_timeout_ns > maximum_ns:
        _log.warning("a loop timeout of %g s is reduced to the maximum of %g s", loop_timeout, maximum_ns / 1e9)
        loop_timeout_ns = maximum_ns
    return ExecutionConfig(measure_timing, loop_timeout_ns)


def to_wire_config(model: ModelHandle, config: ExecutionConfig) -> messages.ConfigData:
    """Return the configuration of an execution of `model` as messages carry it.

    Raises:
        InvalidArgument: If a hint is one of an extension that the model's device does not support.
    """
    require_supported_hints(model.device, model.extensions, config.hints, config.extensions)
    return messages.config_to_data(config)


def require_supported_hints(
    device: str, supported: Container[str], hints: Sequence[TokenValuePair], named: Sequence[ExtensionNameAndPrefix]
) -> None:
    """Require that `device` supports the extensions of `hints` (EXT-6). The driver validates everything else.

    The driver cannot check this, because the HAL makes it ignore hints that it does not know (PREP-10).

    Raises:
        InvalidArgument: If it does not support one.
    """
    if not hints:
        return
    from nnfmq.hal.extension_codes import extension_prefix  # few applications have hints

    prefixes = {extension_prefix(hint.token) for hint in hints}
    for extension in named:
        if extension.prefix in prefixes and extension.name not in supported:
            raise InvalidArgument(f"a hint of extension {extension.name!r}, which device {device} lacks (EXT-6)")


def to_wire_descriptor(queue: MessageQueue) -> messages.MQDescriptorData:
    """Return a queue's descriptor as messages carry it. The fd of its memory is sent beside the message."""
    descriptor = queue.descriptor
    grantors = tuple(messages.GrantorData(g.fd_index, g.offset, g.extent) for g in descriptor.grantors)
    return messages.MQDescriptorData(grantors, descriptor.quantum, descriptor.flags)


def memory_fds(pools: Sequence[Pool | BufferToken]) -> list[int]:
    """Return the fds of the memories among `pools`, in order. Borrows them from the memories.

    `messages.memory_to_data` has checked that each pool has one.
    """
    return [cast(SharedPool, pool).fileno() for pool in pools if not isinstance(pool, BufferToken)]
