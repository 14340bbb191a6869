"""Managed buffers of a driver process: copies, chains of executions, limits, and release after either side dies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support import places
from support.drivers import Daemon, InThread, Process, app, one, running_daemon, until
from support.models import add_model, null_model, relu_model

import nnfmq
from nnfmq.hal.types import DataLocation, Request, RequestArgument
from nnfmq.serialize import messages

EXAMPLES = re.findall(r"```python\n(.*?)```", (places.ROOT / "docs" / "how-to" / "memory.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["shared memory", "buffers", "either"])
def test_the_document_s_examples_work(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(example, {})
    assert capsys.readouterr().out.count(".") == 10  # a score for each digit


@pytest.fixture
def adding(client: nnfmq.Client) -> Iterator[nnfmq.PreparedModel]:
    with client.device("reference").prepare(add_model()) as made:
        yield made


FOUR = np.array([1, 2, 3, 4], np.float32)


def test_DOM_6_API_10_a_chain_of_executions_stays_in_the_driver(
    client: nnfmq.Client, adding: nnfmq.PreparedModel
) -> None:
    """Two models take turns on two buffers; the application sees the last result alone."""
    device = client.device("reference")
    with device.prepare(relu_model()) as relu:
        roles = [(adding, 0), (relu, 0)]
        with (
            device.allocate(inputs=roles, outputs=roles) as first,
            device.allocate(inputs=roles, outputs=roles) as second,
        ):
            first.copy_from(-FOUR)
            for _ in range(3):
                adding.execute(first, FOUR, out=[second])
                relu.execute(second, out=[first])
            assert first.array().tolist() == [2, 4, 6, 8]
            with Process(client.worker_pid) as worker:
                request = Request((in_buffer(0),), (in_buffer(1),), (first.pool, second.pool))
                before = worker.shared_mappings(), worker.descriptors()
                relu.execute_request(request)
                assert (worker.shared_mappings(), worker.descriptors()) == before


def in_buffer(index: int) -> RequestArgument:
    return RequestArgument(location=DataLocation(index))


def test_arrays_and_buffers_can_be_mixed(client: nnfmq.Client, adding: nnfmq.PreparedModel) -> None:
    with client.device("reference").allocate(inputs=[(adding, 1)], outputs=[(adding, 0)]) as buffer:
        assert adding.execute(FOUR, FOUR, out=[buffer], timeout=10) == (buffer,)
        (result,) = adding.execute(FOUR, buffer)
        assert result.tolist() == [3, 6, 9, 12]
        out = np.zeros(4, np.float32)
        assert adding.execute(FOUR, buffer, out=[out])[0] is out
        with pytest.raises(nnfmq.InvalidArgument, match="1 output, `out` has 2"):
            adding.execute(FOUR, buffer, out=[buffer, out])
        with pytest.raises(nnfmq.InvalidArgument, match="DOM-9"):
            adding.execute(buffer, FOUR)


def test_LIFE_9_thousands_of_copies_and_executions_leak_nothing(
    client: nnfmq.Client, adding: nnfmq.PreparedModel, tmp_path: Path
) -> None:
    device = client.device("reference")
    (tmp_path / "four").write_bytes(FOUR.tobytes())
    fd = os.open(tmp_path / "four", os.O_RDWR)
    with Process(client.worker_pid) as worker, nnfmq.FileMemory.from_fd(fd, 16) as file:
        os.close(fd)

        def once() -> None:
            with device.allocate(inputs=[(adding, 0)], outputs=[(adding, 0)]) as buffer:
                buffer.copy_from(file)
                adding.execute(buffer, FOUR)
                buffer.copy_to(file)
                with pytest.raises(nnfmq.InvalidArgument):
                    buffer.copy_from(file, (5,))

        once()
        before = worker.descriptors(), worker.shared_mappings(), len(os.listdir("/proc/self/fd"))
        for _ in range(250):  # of each, with what an array takes: some two thousand descriptors
            once()
        now = lambda: (worker.descriptors(), worker.shared_mappings(), len(os.listdir("/proc/self/fd")))  # noqa: E731
        until(lambda: now() == before, "both processes hold what they held")


def test_DOM_4_buffers_are_limited_and_come_back_when_they_are_freed(folder: Path) -> None:
    shape = (4 << 20,)  # 16 MiB of the 40 that are allowed
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon(folder / "d.sock", environment={"NNFMQ_CLIENT_MEMORY_MIB": "40"}))
        device = stack.enter_context(daemon.connect()).device("reference")
        model = stack.enter_context(device.prepare(relu_model(shape)))
        for _ in range(5):
            held = [device.allocate(inputs=[(model, 0)]), device.allocate(outputs=[(model, 0)])]
            with pytest.raises(nnfmq.ResourceExhausted, match="the limit is"):
                device.allocate(outputs=[(model, 0)])
            for buffer in held:
                buffer.close()


@pytest.mark.parametrize("way", ["copy", "buffers"])
def test_LIFE_3_SIGKILL_of_a_client_in_the_middle_of_a_copy_or_execution_ends_its_worker(
    daemon: Daemon, way: str
) -> None:
    with app("waits", daemon.path, way) as client, Process(int(client.line())) as worker:
        with worker.stopped():
            client.tell()
            assert client.line() == "waiting"
            client.popen.kill()
            client.wait()
        worker.wait_for_end()


def test_SIGKILL_of_a_client_ends_its_worker_during_a_copy(daemon: Daemon) -> None:
    with app("waits", daemon.path, "copies") as client, Process(int(client.line())) as worker:
        client.tell()
        assert client.line() == "waiting"
        until(lambda: "R" in worker.states(), "the worker copies")
        client.popen.kill()
        worker.wait_for_end()


def test_LIFE_4_driver_death_ends_a_copy_immediately_and_a_buffer_can_still_be_closed(
    client: nnfmq.Client, model: nnfmq.PreparedModel
) -> None:
    with Process(client.worker_pid) as worker:
        buffer = client.device("reference").allocate(inputs=[(model, 0)])
        worker.stop()
        copying = InThread.start(lambda: buffer.copy_from(one(1)))
        until(lambda: bool(client._connection._pending_calls), "the copy is pending")
        worker.kill()
        assert isinstance(copying.wait().error, nnfmq.DeadObject)
        with pytest.raises(nnfmq.DeadObject):
            buffer.array()
        buffer.close()


def test_a_client_cannot_use_another_client_s_buffer(daemon: Daemon, model: nnfmq.PreparedModel) -> None:
    with ExitStack() as stack:
        device = stack.enter_context(daemon.connect()).device("reference")
        other_model = stack.enter_context(device.prepare(null_model()))
        buffer = stack.enter_context(device.allocate(inputs=[(other_model, 0)], outputs=[(other_model, 0)]))
        buffer.copy_from(one(5))
        request = Request((in_buffer(0),), (RequestArgument(has_no_value=True),), (buffer.pool,))
        other_model.execute_request(request)
        with pytest.raises(nnfmq.InvalidArgument, match="N-RQX-9"):
            model.execute_request(request)
        with pytest.raises(nnfmq.InvalidArgument, match="another client"):
            model.execute(buffer)


def test_DOM_2_a_buffer_s_models_must_be_prepared_on_its_device(
    client: nnfmq.Client, adding: nnfmq.PreparedModel
) -> None:
    device, connection = client.device("reference"), client.connection

    def allocate(name: str, *models: int) -> messages.Allocated:
        roles = tuple(messages.RoleData(index, 0, 1.0) for index in range(len(models)))
        message = messages.Allocate(connection.next_call_id(), name, (), models, roles, ())
        return connection.exchange(message, messages.Allocated, (), None)

    with ExitStack() as stack:
        fast = client.device("sample-float_fast")
        foreign = stack.enter_context(fast.prepare(add_model()))
        closed = device.prepare(add_model())
        number = closed.model_id
        closed.close()
        good, nobody = adding.model_id, max(adding.model_id, foreign.model_id, number) + 1000
        for models in (
            (0,),
            (good, 0),
            (foreign.model_id,),
            (good, foreign.model_id),
            (number,),
            (nobody,),
        ):
            reply = allocate("reference", *models)
            rejected = reply.status, reply.buffer_id, reply.token
            assert rejected == (nnfmq.ErrorStatus.INVALID_ARGUMENT, 0, 0), models
        assert allocate("sample-float_fast", good).status == nnfmq.ErrorStatus.INVALID_ARGUMENT
        for owner, model in ((device, adding), (fast, foreign)):
            with owner.allocate(inputs=[(model, 0)]) as buffer:
                buffer.copy_from(FOUR)
                assert model.execute(buffer, FOUR)[0].tolist() == [2, 4, 6, 8]
