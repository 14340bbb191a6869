"""A burst's requests as packets, each encoded once: the one over its own memory, and the application's last ones.

With each form of a request goes the last reply that was valid: an equal reply needs no decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from nnfmq.client.burst.channel import SlotAllocator
from nnfmq.hal.types import BufferToken, MeasureTiming, OutputShape, Request, RequestArgument
from nnfmq.serialize.codec import encode_request
from nnfmq.serialize.packets import marked

__all__ = ["IS_MEASURED", "CachedRequest", "LastRequests", "cached_requests"]

IS_MEASURED = 1  # as HAS_DEADLINE, a summand of an index of a request's forms
_Arguments: TypeAlias = tuple[RequestArgument, ...]
_KEPT_MAX = 8  # as many as the driver keeps bound


class CachedRequest(Struct):
    """A request that is encoded, in one of its forms: with or without `measure`, with or without a deadline."""

    packet: bytes
    output_args: _Arguments
    is_measured: bool
    valid_reply: bytes = b""
    """The last reply that was decoded, validated, successful and without times. No reply is empty."""
    shapes: tuple[OutputShape, ...] = ()
    """The shapes that it reports."""


def cached_requests(slots: SlotAllocator, request: Request) -> tuple[CachedRequest, ...]:
    """Return a request in all its forms, by `HAS_DEADLINE` and `IS_MEASURED`; gives its memories slots."""
    numbers = [slots.find_or_add(pool) for pool in request.pools if not isinstance(pool, BufferToken)]
    return _forms(numbers, request.inputs, request.outputs)


def _forms(slots: Sequence[int], inputs: _Arguments, outputs: _Arguments) -> tuple[CachedRequest, ...]:
    packets = [encode_request(inputs, outputs, slots, measure) for measure in (MeasureTiming.NO, MeasureTiming.YES)]
    packets += [marked(packet) for packet in packets]
    return tuple(
        CachedRequest(packet, outputs, is_measured)
        for packet, is_measured in zip(packets, (False, True, False, True), strict=True)
    )


class LastRequests:
    """The last requests of an application that uses a few memories in turn. One thread at a time."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[list[int], _Arguments, _Arguments], tuple[CachedRequest, ...]]] = []

    def forms(self, request: Request, slots: list[int]) -> tuple[CachedRequest, ...]:
        """Return a request over the memories of these slots in all its forms, by `HAS_DEADLINE` and `IS_MEASURED`."""
        key = slots, request.inputs, request.outputs  # not the request, which would keep its memories
        for kept, forms in self._kept:
            if kept == key:
                return forms
        forms = _forms(*key)
        self._kept = [*self._kept[1 - _KEPT_MAX :], (key, forms)]
        return forms
