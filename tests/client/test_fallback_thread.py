"""The thread for work that the watcher must not do: order, end, errors, fork."""

from __future__ import annotations

import logging
import os
import signal
import threading
from queue import SimpleQueue

import pytest
from support.executors import LIMIT_S, until
from support.forking import fork

from nnfmq.client import fallback_thread


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == fallback_thread.THREAD_NAME]


def test_functions_run_in_the_order_of_submission_on_one_thread_that_then_ends() -> None:
    begin, ran = threading.Event(), SimpleQueue[tuple[int, str]]()
    fallback_thread.submit(lambda: begin.wait(LIMIT_S))
    for i in range(100):
        fallback_thread.submit(lambda i=i: ran.put((i, threading.current_thread().name)))  # type: ignore[misc]
    assert len(threads()) == 1
    assert threads()[0].daemon
    begin.set()
    assert [ran.get(timeout=LIMIT_S) for _ in range(100)] == [(i, fallback_thread.THREAD_NAME) for i in range(100)]
    until(lambda: not threads())


def test_a_function_may_submit_another() -> None:
    ran = SimpleQueue[str]()
    fallback_thread.submit(lambda: fallback_thread.submit(lambda: ran.put("inner")))
    assert ran.get(timeout=LIMIT_S) == "inner"


def test_a_function_that_raises_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    ran = SimpleQueue[str]()

    def fails() -> None:
        raise OSError("no such luck")

    with caplog.at_level(logging.ERROR, "nnfmq.client"):
        fallback_thread.submit(fails)
        fallback_thread.submit(lambda: ran.put("next"))
        assert ran.get(timeout=LIMIT_S) == "next"
    assert "no such luck" in caplog.text


def test_the_thread_blocks_all_signals_that_no_fault_of_its_own_raises() -> None:
    masks = SimpleQueue[set[int]]()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    fallback_thread.submit(lambda: masks.put(set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))))
    mask = masks.get(timeout=LIMIT_S)
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGALRM} <= mask
    assert not {signal.SIGSEGV, signal.SIGABRT} & mask
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_function_whose_thread_cannot_start_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = SimpleQueue[str]()

    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            fallback_thread.submit(lambda: ran.put("first"))
    fallback_thread.submit(lambda: ran.put("second"))
    assert ran.get(timeout=LIMIT_S) == "second"
    until(lambda: not threads())
    assert ran.empty()


def test_a_forked_child_runs_its_own_functions_and_none_of_the_parent() -> None:
    begin, ran = threading.Event(), SimpleQueue[str]()
    fallback_thread.submit(lambda: begin.wait(LIMIT_S))
    fallback_thread.submit(lambda: ran.put("parent's"))
    child = fork()
    if not child:
        fallback_thread.submit(lambda: ran.put("child's"))
        os._exit(0 if ran.get(timeout=LIMIT_S) == "child's" else 1)
    begin.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ran.get(timeout=LIMIT_S) == "parent's"
