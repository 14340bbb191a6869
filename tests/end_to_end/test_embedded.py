"""The embedded driver, started from scripts, the prompt and threads, exits with its application and not before."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.drivers import APPS, InThread, Process, Program, app, one, thread_state, until
from support.models import null_model
from support.plugins import add_plugin, path_with

import nnfmq

REPL_SESSION = """
import nnfmq
from support.drivers import one
from support.models import null_model
client = nnfmq.connect(embedded=True)
burst = client.device("reference").prepare(null_model()).burst()
print(client.worker_pid, flush=True)
print(burst.execute(one(4.5))[0][0], flush=True)
"""

TELLING_DEVICE = """
import gc
from nnfmq.hal.errors import GeneralFailure
from nnfmq.driver.devices.device import DeviceBase


class Telling(DeviceBase):
    name = "test-telling"

    def supports(self, model, subgraph, operation):
        raise GeneralFailure(f"collects: {gc.isenabled()}, imported objects too: {gc.get_freeze_count() < 10_000}")
"""


IMPORTED_AT_THE_FORK = """
import sys
from nnfmq.base.channel import Channel
from nnfmq.driver.compilation import jobs
from nnfmq.driver.process import embedded

def tell(_client):
    print(*["numpy" in sys.modules, "nnfmq.driver.session.session" in sys.modules])
    raise SystemExit

jobs.start_compile_server = tell
client_end, driver_end = Channel.pair()
embedded.main(driver_end.detach())
"""


def test_the_compile_server_is_forked_with_numpy_and_before_the_session_is_imported() -> None:
    with Program.start(["-c", IMPORTED_AT_THE_FORK]) as program:
        assert program.line() == "True False"
        assert (program.wait(), program.errors()) == (0, "")


def test_an_embedded_driver_serves_a_script_without_main_guard() -> None:
    with Program.start([APPS / "plain.py"]) as script, Process(int(script.line())) as driver:
        assert script.line() == "4.5"
        script.tell()
        assert (script.wait(), script.errors()) == (0, "")
        driver.wait_for_end()


def test_an_embedded_driver_serves_an_interactive_session() -> None:
    with Program.start(["-P", "-i", "-q"]) as prompt:
        prompt.tell(REPL_SESSION)
        with Process(int(prompt.line())) as driver:
            assert prompt.line() == "4.5"
            prompt.end_input()
            assert prompt.wait() == 0
            assert "Traceback" not in prompt.errors()
            driver.wait_for_end()


def test_an_embedded_driver_outlives_the_thread_that_started_it() -> None:
    starter = InThread.start(lambda: nnfmq.connect(embedded=True)).wait()
    until(lambda: thread_state(starter.thread_id) == "X", "the thread has left the kernel, too")
    with starter.value as client, Process(client.worker_pid) as driver:
        assert client.driver_pid == client.worker_pid
        assert client.device("reference").prepare(null_model()).execute(one(4.5)) == (one(4.5),)
        assert not driver.has_exited()


@pytest.mark.parametrize("end", ["return", "_exit"])
def test_an_embedded_driver_ends_silently_with_an_app_that_closes_nothing(end: str) -> None:
    with app("plain") as script, Process(int(script.line())) as driver:
        assert script.line() == "4.5"
        script.tell(end)
        assert (script.wait(), script.errors()) == (0, "")
        driver.wait_for_end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_an_embedded_driver_ends_with_an_app_that_a_signal_kills(number: signal.Signals) -> None:
    with app("plain") as script, Process(int(script.line())) as driver:
        script.line()
        script.popen.send_signal(number)
        assert script.wait() == -number
        driver.wait_for_end()


def test_a_stopped_embedded_driver_ends_when_it_continues_after_its_app_was_killed() -> None:
    with app("plain") as script, Process(int(script.line())) as driver:
        script.line()
        with driver.stopped():
            script.popen.kill()
            script.wait()
        driver.wait_for_end()


def test_LIFE_3_a_stopped_embedded_driver_with_a_compile_server_ends_with_a_killed_app() -> None:
    pytest.importorskip("llvmlite")
    with app("plain") as script, Process(int(script.line())) as driver:
        script.line()
        driver.stop()
        script.popen.kill()
        driver.wait_for_end()


def test_closing_the_client_reaps_the_embedded_driver() -> None:
    client = nnfmq.connect(embedded=True)
    with Process(client.worker_pid) as driver:
        client.close()
        client.close()
        assert driver.has_exited()


def test_two_clients_have_separate_embedded_drivers() -> None:
    with nnfmq.connect(embedded=True) as first, nnfmq.connect(embedded=True) as second:
        assert first.worker_pid != second.worker_pid
        assert first.is_embedded and second.is_embedded
        first.close()
        assert second.devices()


def test_an_embedded_driver_collects_garbage_but_does_not_look_for_it_among_imported_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plugin(tmp_path, "telling", TELLING_DEVICE, {"telling": "telling:Telling"}, "nnfmq.devices")
    monkeypatch.setenv("PYTHONPATH", path_with(tmp_path)["PYTHONPATH"])
    message = "collects: True, imported objects too: False"
    with nnfmq.connect(embedded=True) as client, pytest.raises(nnfmq.GeneralFailure, match=message):
        client.device("test-telling").supported_operations(null_model())
