"""Durations and timing of executions: one unit, integer nanoseconds, and its conversions at the edges.

AIDL's convention is the canonical one: nanoseconds, and -1 (`NO_TIME`) for a duration that was not measured. Other
conventions exist at four edges, and only the functions here convert to and from them:

- HIDL's `Timing`, and therefore burst packets: whole microseconds, rounded down, and 2^64-1 for "not measured";
- the execution statistics: nanoseconds as u64, and 2^64-1 for "not measured";
- the limits in messages (deadlines and durations): nanoseconds, and -1 for "no limit", which is None elsewhere;
- the public interface: seconds as float, and None for "no limit".

Timeouts become deadlines of the monotonic clock in `nnfmq.base.deadlines`.

Source: HIDL 1.2 `Timing`, AIDL `Timing.aidl` and `IPreparedModel.aidl`.
"""

from __future__ import annotations

from msgspec import Struct

from nnfmq.hal.errors import InvalidArgument

__all__ = [
    "HIDL_NO_TIME",
    "NO_LIMIT",
    "NO_TIME",
    "NO_TIMING",
    "Timing",
    "from_limit_field",
    "from_microseconds",
    "from_packet_duration",
    "from_seconds",
    "from_unsigned",
    "to_limit_field",
    "to_microseconds",
    "to_packet_duration",
    "to_unsigned",
    "truncate_to_microseconds",
]

NO_TIME = -1  # AIDL: a duration that was not measured
HIDL_NO_TIME = 2**64 - 1  # the same as u64: in HIDL, burst packets and execution statistics
NO_LIMIT = -1  # a message's deadline or duration: none

_SECONDS_MAX = 9e9  # 285 years: in nanoseconds it still fits the i64 of a message


class Timing(Struct, frozen=True):
    """Two durations of an execution in ns, NO_TIME if not measured. The time in the driver includes the device's."""

    time_on_device_ns: int = NO_TIME
    time_in_driver_ns: int = NO_TIME


NO_TIMING = Timing()


def to_microseconds(duration_ns: int) -> int:
    """Return a duration as HIDL has it: whole microseconds, rounded down, or HIDL_NO_TIME for NO_TIME."""
    return HIDL_NO_TIME if duration_ns == NO_TIME else duration_ns // 1000


def from_microseconds(duration_us: int) -> int:
    """Return a duration of HIDL in ns, or NO_TIME for HIDL_NO_TIME."""
    return NO_TIME if duration_us == HIDL_NO_TIME else duration_us * 1000


# The durations of burst packets. Both codecs convert by these names only, so the unit of a packet is decided here.
to_packet_duration = to_microseconds
from_packet_duration = from_microseconds


def truncate_to_microseconds(timing: Timing) -> Timing:
    """Return `timing` as it arrives over HIDL."""
    return Timing(
        from_microseconds(to_microseconds(timing.time_on_device_ns)),
        from_microseconds(to_microseconds(timing.time_in_driver_ns)),
    )


def to_unsigned(duration_ns: int) -> int:
    """Return a duration as a u64 word of the execution statistics."""
    return HIDL_NO_TIME if duration_ns < 0 else duration_ns


def from_unsigned(word: int) -> int:
    """Return the duration in a u64 word of the execution statistics."""
    return NO_TIME if word == HIDL_NO_TIME else word


def to_limit_field(limit_ns: int | None) -> int:
    """Return a deadline or duration as a message has it, in ns; NO_LIMIT for None."""
    return NO_LIMIT if limit_ns is None else limit_ns


def from_limit_field(limit_ns: int) -> int | None:
    """Return a message's deadline or duration in ns, or None for NO_LIMIT.

    Raises:
        InvalidArgument: If the value is below NO_LIMIT (N-VAL-23, N-RQX-14).
    """
    if limit_ns < NO_LIMIT:
        raise InvalidArgument(f"a deadline is a time in ns, or {NO_LIMIT} for none; got {limit_ns}")
    return None if limit_ns == NO_LIMIT else limit_ns


def from_seconds(seconds: float | None, what: str = "a duration") -> int | None:
    """Return a span of the public interface in ns, or None for None; spans above 285 years are cut to that.

    Raises:
        InvalidArgument: If `seconds` is negative or NaN. The text begins with `what`.
    """
    if seconds is None:
        return None
    if not seconds >= 0:  # written so that NaN is rejected as well
        raise InvalidArgument(f"{what} is 0 or more seconds, or None; got {seconds}")
    return round(min(seconds, _SECONDS_MAX) * 1e9)
