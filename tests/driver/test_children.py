"""Child processes: what becomes of one that has no pidfd. Only a process with one thread forks, so it is a program."""

from __future__ import annotations

import subprocess
import sys

from support.drivers import LIMIT_S

WITHOUT_PIDFD = """
import errno, os, signal
from nnfmq.driver.process import children

real, pids = os.pidfd_open, []

def pidfd_open(pid):
    pids.append(pid)
    raise OSError(errno.EMFILE, "Too many open files")

os.pidfd_open = pidfd_open
try:
    children.fork_child(signal.pause, (), "first")
except OSError as error:
    print(error.strerror)
os.pidfd_open = real
os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
children.fork_child(lambda: None, (), "second").reap()
print(os.path.exists(f"/proc/{pids[0]}"))
"""


def test_a_child_without_a_pidfd_is_killed_and_reaped_with_the_next_one() -> None:
    words = [sys.executable, "-P", "-c", WITHOUT_PIDFD]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.splitlines() == ["Too many open files", "False"]
