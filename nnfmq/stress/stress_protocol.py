"""Messages between `nnfmq stress` and its client processes, beside those of `measure.runner_protocol`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from nnfmq.measure.runner_protocol import RunnerFailed, RunnerReady

__all__ = ["StressReply", "StressResult", "StressTrial"]


class StressTrial(msgspec.Struct, tag=True):
    """A request for `seconds` of load from `begin_ns` on, on the given CPUs (None: any).

    `work` is what the application does within some of its requests: time after the begin in ns, and a name of
    `application_work.WORK`. Files for it are made in `folder`.
    """

    begin_ns: int
    seconds: float
    client_cpu: int | None
    worker_cpu: int | None
    work: list[tuple[int, str]]
    folder: str


class StressResult(msgspec.Struct, tag=True):
    """The requests, as int64 rows of RequestRecord."""

    rows: bytes


StressReply: TypeAlias = RunnerReady | StressResult | RunnerFailed
