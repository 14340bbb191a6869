"""The connection that the sessions of `nnfmq.compat` share: when it is made, shared, renewed and closed."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.drivers import Daemon, Process, Program, closer_threads, one, until
from support.forking import fork
from support.models import null_model

import nnfmq
from nnfmq.base import watcher
from nnfmq.compat.litert import Interpreter
from nnfmq.compat.onnxruntime import InferenceSession
from nnfmq.compat.shared_client import DriverShare

OWNS_NOTHING_AT_EXIT = """
import nnfmq
from nnfmq.compat.shared_client import DriverShare
class Owner: pass
owner = Owner()
client = DriverShare(owner).client()
print(client.worker_pid, flush=True)
input()
"""


class Owner:
    """As a session: it has a share."""

    itself: Owner | None = None

    def __init__(self) -> None:
        self.share = DriverShare(self)

    def prepare(self) -> nnfmq.PreparedModel:
        """Prepare a model that is closed with this owner."""
        return self.share.adopt(self.share.client().device("reference").prepare(null_model()))


@pytest.fixture(autouse=True)
def _use_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))


def is_closed(client: nnfmq.Client) -> bool:
    return not client.connection.is_open


def test_owners_share_the_connection_to_the_driver_that_listens(daemon: Daemon) -> None:
    first, second = Owner(), Owner()
    assert first.share.client() is second.share.client()
    assert first.share.client().driver_pid == daemon.process.pid
    client = first.share.client()
    del first, second
    until(lambda: is_closed(client), "the connection is closed")


def test_the_connection_is_closed_after_its_last_owner_and_made_again_for_the_next() -> None:
    first, second = Owner(), Owner()
    client, model = first.share.client(), first.prepare()
    second.share.client()
    del first
    until(lambda: not model.handle.is_open, "the model of the first owner is released")
    assert client.connection.is_open
    del second
    until(lambda: is_closed(client) and not closer_threads(), "the connection is closed")
    third = Owner()
    assert third.prepare().execute(one(2)) == (one(2),)
    del third
    until(lambda: not closer_threads(), "the connection is closed")


def test_a_share_connects_early_only_for_a_model_that_exists_and_leaves_the_error_to_the_first_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    owner = Owner()
    owner.share.connect_early(tmp_path / "none.tflite")
    for nothing in (None, bytearray(b"a model"), 3):
        owner.share.connect_early(nothing)
    assert closer_threads() == []
    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("NNFMQ_DEVICES", str(tmp_path / "none.toml"))
    owner.share.connect_early(b"a model")
    assert closer_threads() != []
    with pytest.raises(nnfmq.GeneralFailure, match=r"none\.toml"):
        owner.share.client().devices()
    del owner
    until(lambda: not closer_threads(), "the connection is closed", 10)


def test_an_owner_that_the_watcher_s_thread_collects_does_not_block_it() -> None:
    other, owner = Owner(), Owner()
    client, burst = other.share.client(), owner.share.adopt(owner.prepare().burst())
    owner.itself = owner  # only the garbage collector frees it
    del owner
    read, write = os.pipe()

    def collect() -> None:
        os.read(read, 1)
        gc.collect()

    reader = watcher.add_reader(read, collect)
    os.write(write, b"x")
    until(lambda: "closed" in repr(burst), "the burst is closed")
    assert client.devices()
    watcher.remove_reader(reader)
    os.close(read)
    os.close(write)
    del other
    until(lambda: is_closed(client), "the connection is closed")


def test_after_the_driver_s_death_the_next_use_connects_again() -> None:
    owner = Owner()
    client = owner.share.client()
    with Process(client.worker_pid) as worker:
        worker.kill()
        worker.wait_for_end()
    until(lambda: is_closed(client), "the client knows")
    assert owner.prepare().execute(one(2)) == (one(2),)
    del owner
    until(lambda: is_closed(client), "the connection is closed")


def test_a_forked_child_gets_a_connection_of_its_own() -> None:
    owner = Owner()
    parents = owner.share.client().worker_pid
    child = fork()
    if child == 0:
        same = owner.share.client().worker_pid == parents
        works = owner.prepare().execute(one(2)) == (one(2),)
        os._exit(0 if works and not same else 1)
    assert os.waitpid(child, 0)[1] == 0
    client = owner.share.client()
    assert client.worker_pid == parents and client.devices()
    del owner
    until(lambda: is_closed(client), "the connection is closed")


def results(session: InferenceSession, interpreter: Interpreter, feed: Mapping[str, Any]) -> list[bytes]:
    interpreter.invoke()
    scores = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    return [array.tobytes() for array in (*session.run(["z"], feed), scores)]


def test_a_session_and_an_interpreter_of_the_parent_execute_in_a_forked_child() -> None:
    """As in a server that loads its models before it forks."""
    pytest.importorskip("onnx", exc_type=ImportError)
    from support.ort_scripts import FED, symbolic_model

    session = InferenceSession(symbolic_model((2, 3, 4)))
    interpreter = Interpreter(model_path=str(nnfmq.example_path("digits.tflite")))
    interpreter.allocate_tensors()

    expected = results(session, interpreter, FED)
    child = fork()
    if child == 0:
        os._exit(0 if results(session, interpreter, FED) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert results(session, interpreter, FED) == expected
    client = session._share.client()
    del session, interpreter
    until(lambda: is_closed(client), "the connection is closed")


def test_an_embedded_driver_exits_with_a_script_that_closes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "nobody.sock"))
    script = tmp_path / "script.py"
    script.write_text(OWNS_NOTHING_AT_EXIT)
    with Program.start(["-W", "error", script]) as program, Process(int(program.line())) as driver:
        program.tell()  # from now on the pid may become another process's
        assert (program.wait(), program.errors()) == (0, "")
        driver.wait_for_end()
