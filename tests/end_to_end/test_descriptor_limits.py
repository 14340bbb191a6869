"""How many descriptors a supervisor takes for its clients, and a limit (ulimit -n) below that."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.drivers import running_daemon

from nnfmq.driver.process.limits import CLIENT_FDS

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
from nnfmq.cli import main
sys.exit(main(sys.argv[1:]))
"""
TEXT = "62 clients with what they share may take "


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_client_takes_so_many_descriptors_of_the_supervisor(folder: Path, start: str) -> None:
    with running_daemon(folder / "d.sock", options=["--worker-start", start]) as driver, ExitStack() as stack:
        found = Path(f"/proc/{driver.program.pid}/fd")
        before = len(os.listdir(found))
        for _ in range(4):
            stack.enter_context(driver.connect())
        assert len(os.listdir(found)) == before + 4 * CLIENT_FDS[start]
        assert TEXT not in driver.program.errors()


def test_a_driver_whose_limit_is_below_what_its_clients_may_take_says_so_once(folder: Path) -> None:
    arguments = ["-P", "-c", LIMITED, "serve", "--socket", folder / "d.sock"]
    with running_daemon(folder / "d.sock", arguments=arguments, environment={"NNFMQ_LOG_LEVEL": "info"}) as driver:
        driver.connect().close()
        driver.connect().close()
        log = driver.program.errors()
    assert log.count(TEXT) == 1
    assert "the limit is 300: some clients may be rejected; raise it (ulimit -Hn, or LimitNOFILE=" in log
