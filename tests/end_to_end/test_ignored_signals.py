"""Programs that a script starts with nohup or `&` work and end like others, although SIGINT and SIGHUP are ignored."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import commands, model_lines
from support.drivers import APPS, Daemon, Process, Program, opened, short_folder, until
from support.small_models import two_adds

from nnfmq.base import settings


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_driver_serves_and_a_signal_ends_it_with_its_workers_and_compile_processes(number: signal.Signals) -> None:
    ones = np.ones((2, 2), np.float32)
    with short_folder() as folder:
        path = folder / "d.sock"
        words = commands.ignoring_signals("-P", "-m", "nnfmq", "serve", "--socket", path)
        no_cache = {settings.CACHE_MIB.variable: "0"}  # so that the model is compiled
        with Daemon.start(path, arguments=words, environment=no_cache) as daemon, daemon.connect() as client:
            daemon.process.send(signal.SIGHUP)  # the terminal closes
            with client.device("compiled").prepare(
                two_adds(), preference="sustained_speed"
            ) as model:  # compiled by now
                model.execute(ones, ones)
            until(lambda: bool(daemon.compile_servers()), "the driver has a compile server")
            others = list(opened(daemon.process.descendants()))
            assert len(others) >= 2
            daemon.process.send(number)
            assert daemon.program.wait() == 0
            for process in others:
                with process:
                    process.wait_for_end()
        assert not path.exists()


def test_an_embedded_driver_ends_with_its_application() -> None:
    words = commands.ignoring_signals("-P", APPS / "plain.py")
    with Program.start(words) as program, Process(program.pid) as application:
        driver_pid = int(program.line())
        others = list(opened(application.descendants()))
        assert driver_pid in [process.pid for process in others]
        application.send(signal.SIGTERM)
        assert program.wait() == -signal.SIGTERM
        for process in others:
            with process:
                process.wait_for_end()


def test_the_jobs_of_a_command_end_with_it(tmp_path: Path) -> None:
    files = [model_lines.write(tmp_path / f"{n}.jsonl", *[model_lines.add()] * 3000) for n in range(2)]
    words = ["-m", "nnfmq", "conformance", *files, "--path", "burst", "--connect", "embedded", "--jobs", "2"]
    command = [sys.executable, *commands.ignoring_signals(*words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            until(lambda: bool(children.read_text()), "the jobs start")
            process.send_signal(signal.SIGTERM)
            # The pipe of stderr ends when the last of jobs and drivers has: they all have it.
            process.communicate(timeout=commands.LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGTERM
