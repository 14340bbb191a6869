"""An application forks: the child's copy of its socket must not keep the driver alive, nor its client be usable."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from support.drivers import Daemon, Process, app

CALLS = 6  # of apps/calls_after_fork.py


@pytest.mark.parametrize("form", ["daemon", "embedded"])
def test_a_forked_child_does_not_keep_the_driver_s_process_when_the_app_is_killed(form: str, daemon: Daemon) -> None:
    with ExitStack() as stack:
        parent = stack.enter_context(app("forks", daemon.path if form == "daemon" else form))
        driver, child = (stack.enter_context(Process(int(parent.line()))) for _ in range(2))
        parent.popen.kill()
        driver.wait_for_end()
        assert not child.has_exited()
        child.kill()
        child.wait_for_end()


def test_the_exit_of_a_forked_child_does_not_end_the_app_s_connection(daemon: Daemon) -> None:
    with ExitStack() as stack:
        parent = stack.enter_context(app("forks", daemon.path))
        worker, child = (stack.enter_context(Process(int(parent.line()))) for _ in range(2))
        child.kill()
        child.wait_for_end()
        assert not worker.has_exited()


@pytest.mark.parametrize("where", ["daemon", "embedded"])
def test_in_a_forked_child_every_call_raises_and_the_parent_gets_its_own_results(daemon: Daemon, where: str) -> None:
    with app("calls_after_fork", daemon.path if where == "daemon" else "embedded") as parent:
        raised = [parent.line() for _ in range(CALLS)]
        expected = f"DeadObject: this client belongs to process {parent.pid}, which forked; connect again in the child"
        assert raised == [expected] * CALLS
        assert parent.line() == "child ended with 0"
        assert parent.line() == "[5.0, 6.0, 7.0]"
        assert (parent.wait(), parent.errors()) == (0, "")


def test_a_fork_while_another_thread_waits_affects_neither_side(daemon: Daemon) -> None:
    with app("forks_while_waiting", daemon.path) as parent, Process(int(parent.line())) as worker:
        with worker.stopped():
            parent.tell()
            assert parent.line() == "0"
        assert parent.line() == "2.0"
        assert (parent.wait(), parent.errors()) == (0, "")
