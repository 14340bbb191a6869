"""Messages between `nnfmq stress` and its client processes, beside those of `measure.runner_protocol`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from nnfmq.measure.runner_protocol import RunnerFailed, RunnerReady

__all__ = ["StressBegin", "StressPrepared", "StressReply", "StressResult", "StressTrial"]


class StressTrial(msgspec.Struct, tag=True):
    """A request to prepare for `seconds` of load on the given CPUs (None: any); the reply is StressPrepared.

    `work` is what the application does within some of its requests: time after the begin in ns, and a name of
    `application_work.WORK`. Files for it are made in `folder`.
    """

    seconds: float
    client_cpu: int | None
    worker_cpu: int | None
    work: list[tuple[int, str]]
    folder: str


class StressPrepared(msgspec.Struct, tag=True):
    """The client waits for StressBegin."""


class StressBegin(msgspec.Struct, tag=True):
    """The begin of the load on the monotonic clock, in ns; the reply is StressResult."""

    begin_ns: int


class StressResult(msgspec.Struct, tag=True):
    """The requests, as int64 rows of RequestRecord."""

    rows: bytes


StressReply: TypeAlias = RunnerReady | StressPrepared | StressResult | RunnerFailed
