"""Ctrl-C ends a wait immediately; the driver continues, and the next call gets its own result and not a late one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.drivers import LIMIT_S, Daemon, Process, app, one

import nnfmq

TRIES = 3
INTERRUPTED_WITHIN_NS = 50_000_000

WINDOWS = [
    pytest.param("0", id="asleep"),
    pytest.param("10000000", id="polling"),
    pytest.param("ordinary", id="on the synchronous path"),
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("where", ["daemon", "embedded"])
def test_Ctrl_C_ends_a_wait_within_50_ms_and_the_next_call_gets_its_own_result(
    daemon: Daemon, where: str, window: str
) -> None:
    target = daemon.path if where == "daemon" else "embedded"
    with app("interrupted", target, window) as program, Process(int(program.line())) as driver:
        times_ns = []
        with driver.stopped():
            for attempt in range(TRIES):
                program.tell(str(attempt + 1))
                assert program.line() == "waiting"
                begin_ns = program.interrupt()
                times_ns.append(int(program.line()) - begin_ns)
        program.tell()
        assert program.line() == "99.0"
        assert (program.wait(), program.errors()) == (0, "")
    print("from SIGINT to KeyboardInterrupt, ms:", [f"{ns / 1e6:.2f}" for ns in times_ns])
    assert min(times_ns) < INTERRUPTED_WITHIN_NS


@pytest.mark.parametrize("way", ["burst", "ordinary", "devices"])
def test_many_signals_neither_block_a_later_call_nor_mix_up_results(way: str) -> None:
    """Each of the windows that this found once was a few instructions wide: a lock taken just before its `try`."""
    with app("storm", "embedded", way, "3000") as program:
        assert program.line() == "7.0"
        assert (program.wait(), program.errors()) == (0, "")


# A handler's exception can come out of any step. These are the steps at which a flag beside the rings would be wrong.


class Interrupted(Exception):
    """What a signal handler raises."""


def after(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return `step` with a signal that arrives during it."""

    def interrupted(*arguments: Any) -> None:
        step(*arguments)
        raise Interrupted

    return interrupted


def before(_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that a signal keeps from happening."""

    def interrupted(*_arguments: Any) -> None:
        raise Interrupted

    return interrupted


@pytest.mark.parametrize("when", [before, after])
@pytest.mark.parametrize("step", ["send", "receive"])
def test_a_signal_at_any_step_does_not_mix_up_results(
    model: nnfmq.PreparedModel, step: str, when: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    with model.burst() as burst:
        burst.execute(one(1))
        queue = burst.channel.requests if step == "send" else burst.channel.results
        real = getattr(queue, step)
        for value in (2, 4):
            setattr(queue, step, when(real))
            with pytest.raises(Interrupted):
                burst.execute(one(value))
            setattr(queue, step, real)
            assert burst.execute(one(value + 1), timeout=LIMIT_S) == (one(value + 1),)
        assert burst.execute(one(6), timeout=LIMIT_S) == (one(6),)
