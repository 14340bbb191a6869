"""Models that a client opens by name, over a driver's workers and a model repository that the test controls."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, app, kill_worker, one, until
from support.fake_repository import FakeRepository, serving
from support.forking import fork
from support.models import add_model, invalid_model, plus_model
from support.small_models import with_constants

import nnfmq
from nnfmq.base.channel import Channel
from nnfmq.client.model.handle import ModelHandle
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import Model
from nnfmq.observe.driver_statistics import ClientStatistics
from nnfmq.serialize.repository_protocol import (
    ModelState,
    RepositoryMessage,
)

FLOAT = TensorInfo("input 0", (1,), "float32")


def own_statistics(client: nnfmq.Client) -> ClientStatistics:
    """Return what the driver counts for a client."""
    (found,) = [row for row in client.statistics().clients if row.worker_pid == client.worker_pid]
    return found


# ------------------------------------------------------------------------------------------------ opening


def test_a_model_is_opened_by_name_and_executes(repository: FakeRepository, client: nnfmq.Client) -> None:
    with client.model("plus") as model, model.burst() as burst:
        assert (model.name, model.version, model.batch, model.device) == ("plus", 1, 1, "reference")
        assert model.execute(one(5)) == burst.execute(one(5)) == (one(6),)
        assert burst.version == 1
        assert repr(model).startswith("<ServedModel 'plus' version 1 on 'reference': 'input 0' (float32 1)")
        assert [(row.name, row.version) for row in own_statistics(client).models] == [("plus", 1)]


def test_the_constants_come_in_memories(repository: FakeRepository, client: nnfmq.Client) -> None:
    with nnfmq.Memory.create(4) as pool:
        pool.view[:] = np.float32(7).tobytes()
        repository.publish("seven", 1, with_constants(pool))
        with client.model("seven") as model:
            assert model.execute(one(5)) == (one(12),)


def test_the_names_are_those_of_the_repository(repository: FakeRepository, client: nnfmq.Client) -> None:
    image, scores = TensorInfo("image", (1,), "float32"), TensorInfo("scores", (1,), "float32")
    repository.publish("named", 1, plus_model(1), inputs=(image,), outputs=(scores,))
    with client.model("named") as model:
        assert (model.inputs, model.outputs) == ((image,), (scores,))


@pytest.mark.parametrize("interface", ["HIDL 1.2", "HIDL 1.3", "AIDL v1"])
def test_a_model_is_prepared_over_other_interface_versions(
    interface: str, daemon: Daemon, repository: FakeRepository
) -> None:
    with nnfmq.connect(daemon.path, interface=interface) as client, client.model("plus") as model:
        assert model.execute(one(5)) == (one(6),)


def test_the_models_are_listed_by_name(repository: FakeRepository, client: nnfmq.Client) -> None:
    repository.publish("add", 7, plus_model(7))
    entries = client.models()
    assert [(entry.name, entry.version, entry.state) for entry in entries] == [
        ("add", 7, ModelState.READY), ("plus", 1, ModelState.READY),
    ]  # fmt: skip


def test_an_unknown_model_is_an_error_that_lists_the_models(repository: FakeRepository, client: nnfmq.Client) -> None:
    with pytest.raises(nnfmq.ModelNotFound, match="no model 'minus' in the model repository; it has: plus"):
        client.model("minus")
    with pytest.raises(nnfmq.ModelNotFound, match=r"model 'plus' has no version 3 .* it has \[1\]"):
        client.model("plus", 3)
    for index in range(30):
        repository.publish(f"m{index:02}", 1, plus_model(1))
    with pytest.raises(nnfmq.ModelNotFound, match=r"it has: m00, m01, .*, m19, \.\.\.$"):
        client.model("minus")


@pytest.mark.parametrize(("name", "version"), [("a/b", 0), ("", 0), ("x" * 65, 0), ("plus", -1), ("plus", 2**31)])
def test_a_name_or_version_that_cannot_be_one_is_not_requested(
    name: str, version: int, repository: FakeRepository, client: nnfmq.Client
) -> None:
    with pytest.raises(
        nnfmq.InvalidArgument, match=r"^('.* cannot be the name|-?\d+ cannot be a version) of a model: "
    ):
        client.model(name, version)
    assert repository.connections == 0


def test_a_driver_without_models_says_how_to_start_one(daemon: Daemon, client: nnfmq.Client) -> None:
    for call in (client.models, lambda: client.model("plus")):
        with pytest.raises(nnfmq.DeviceUnavailable, match=f"{daemon.path} has no model repository: .*--models DIR"):
            call()


def test_an_embedded_driver_has_no_models() -> None:
    with nnfmq.connect(embedded=True) as client, pytest.raises(nnfmq.DeviceUnavailable, match="--models DIR"):
        client.models()


def test_a_model_that_is_being_loaded_is_waited_for(repository: FakeRepository, client: nnfmq.Client) -> None:
    repository.set_state("late", ModelState.LOADING)
    with pytest.raises(nnfmq.MissedDeadlineTransient, match="late is LOADING, and the timeout has passed: give"):
        client.model("late", timeout=0.1)
    opening = InThread.start(lambda: client.model("late"))
    opening.wait_until_asleep()
    repository.publish("late", 1, plus_model(3))
    with opening.wait().value as model:
        assert model.execute(one(5)) == (one(8),)


def test_a_model_that_could_not_be_prepared_is_not_waited_for(repository: FakeRepository, client: nnfmq.Client) -> None:
    repository.set_state("broken", ModelState.UNAVAILABLE)
    with pytest.raises(nnfmq.DeviceUnavailable, match="broken is UNAVAILABLE"):
        client.model("broken", timeout=None)


def test_a_model_on_a_device_that_the_driver_lacks(repository: FakeRepository, client: nnfmq.Client) -> None:
    repository.publish("npu", 1, plus_model(1), device="npu")
    with pytest.raises(nnfmq.InvalidArgument, match="there is no device 'npu'"):
        client.model("npu")


def test_a_stopped_repository_makes_a_call_miss_its_deadline(repository: FakeRepository, client: nnfmq.Client) -> None:
    repository.answer = lambda *_: True
    with pytest.raises(nnfmq.MissedDeadlineTransient):
        client.model("plus", timeout=0.1)
    repository.answer = None
    with client.model("plus") as model:
        assert model.execute(one(5)) == (one(6),)


def test_closing_the_client_ends_a_call_to_the_repository(repository: FakeRepository, daemon: Daemon) -> None:
    repository.answer = lambda *_: True
    client = daemon.connect()
    opening = InThread.start(lambda: client.model("plus", timeout=None))
    until(lambda: repository.connections == 1, "the client calls")
    opening.wait_until_asleep()
    client.close()
    assert isinstance(opening.wait().error, nnfmq.BadState)
    with pytest.raises(nnfmq.BadState, match="closed"):
        client.models()


# ------------------------------------------------------------------------------------------------ versions


def test_a_model_that_was_opened_with_a_version_keeps_it(repository: FakeRepository, client: nnfmq.Client) -> None:
    with client.model("plus", 1) as pinned, client.model("plus") as model, pinned.burst() as burst:
        repository.publish("plus", 2, plus_model(2))
        until(lambda: model.version == 2, "the other model moves")
        assert (pinned.version, burst.version) == (1, 1)
        assert pinned.execute(one(5)) == burst.execute(one(5)) == (one(6),)


def test_a_version_that_is_announced_while_the_model_is_prepared_is_not_missed(
    repository: FakeRepository, client: nnfmq.Client
) -> None:
    def announce_first(repository: FakeRepository, channel: Channel, message: RepositoryMessage) -> bool:
        repository.answer = None
        repository.reply(channel, message)
        repository.publish("plus", 2, plus_model(2))
        return True

    repository.answer = announce_first
    with client.model("plus") as model:
        until(lambda: model.version == 2, "the model moves")


def test_a_removed_version_goes_on_and_a_model_opened_later_gets_the_older_one(
    repository: FakeRepository, client: nnfmq.Client
) -> None:
    repository.publish("plus", 2, plus_model(2))
    with client.model("plus") as model:
        repository.withdraw("plus", 2)
        repository.announce("plus", 1)
        with client.model("plus") as older:
            assert (model.version, older.version) == (2, 1)
            repository.publish("plus", 3, plus_model(3))
            until(lambda: model.version == older.version == 3, "both move")


DIFFERENT: dict[str, tuple[Model, dict[str, object], str]] = {
    "shape": (plus_model(2, (2,)), {}, "its inputs are"),
    "inputs": (add_model((1,)), {}, "its inputs are"),
    "name": (plus_model(2), {"outputs": (TensorInfo("other", (1,), "float32"),)}, "its outputs are 'other'"),
    "batch": (plus_model(2), {"batch": 2}, "its batch is 2, not 1"),
    "states": (plus_model(2), {"states": (StateInfo(FLOAT),)}, "its states are"),
}


@pytest.mark.parametrize(("model", "changes", "reason"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_version_with_another_interface_is_not_used_which_is_logged_once(
    model: Model, changes: dict[str, object], reason: str,
    repository: FakeRepository, client: nnfmq.Client, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with client.model("plus") as served:
        for version in (2, 3):
            sent = repository.opened
            repository.publish("plus", version, model, **changes)
            until(lambda sent=sent: repository.opened > sent, "the client looks at it")
        until(lambda: "nnfmq-versions" not in {thread.name for thread in threading.enumerate()}, "it has looked")
        assert served.execute(one(5)) == (one(6),)
        repository.publish("plus", 4, plus_model(4))
        until(lambda: served.version == 4, "the model moves")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(
        f"model 'plus' keeps its version (open it again to use the new one): version 2 is not used, because {reason}"
    )


def test_a_version_that_cannot_be_prepared_leaves_the_old_one(
    repository: FakeRepository, client: nnfmq.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with client.model("plus") as model, model.burst() as burst:
        repository.publish("plus", 2, invalid_model(), inputs=model.inputs, outputs=model.outputs)
        until(lambda: any("model 'plus' keeps its version" in text for text in caplog.messages), "it is logged")
        assert burst.execute(one(5)) == model.execute(one(5)) == (one(6),)
        assert len(own_statistics(client).models) == 1
        repository.publish("plus", 3, plus_model(3))
        until(lambda: model.version == 3, "the model moves")
        assert burst.execute(one(5)) == (one(8),)


def test_several_models_of_a_client_move(repository: FakeRepository, client: nnfmq.Client) -> None:
    repository.publish("other", 1, plus_model(10))
    with client.model("plus") as first, client.model("plus") as second, client.model("other") as other:
        repository.publish("plus", 2, plus_model(2))
        until(lambda: first.version == second.version == 2, "both move")
        assert first.execute(one(5)) == second.execute(one(5)) == (one(7),)
        assert (other.version, other.execute(one(5))) == (1, (one(15),))
        assert len(own_statistics(client).models) == 3


def test_nothing_is_done_for_a_closed_model(repository: FakeRepository, client: nnfmq.Client) -> None:
    with client.model("plus"):
        pass
    sent = repository.opened
    repository.publish("plus", 2, plus_model(2))
    client.models()  # the announcement came before
    until(lambda: "nnfmq-versions" not in {thread.name for thread in threading.enumerate()}, "the thread has ended")
    assert repository.opened == sent


# ------------------------------------------------------------------------------------------------ deaths


def test_models_go_on_without_the_repository_and_see_later_what_has_changed(
    repository: FakeRepository, client: nnfmq.Client
) -> None:
    with client.model("plus") as model, model.burst() as burst:
        repository.publish("plus", 2, plus_model(2), device="npu")  # the client cannot prepare it
        repository.hang_up()
        assert burst.execute(one(5)) == model.execute(one(5)) == (one(6),)
        repository.publish("plus", 3, plus_model(3))
        until(lambda: model.version == 3, "the client has connected again")
        assert burst.execute(one(5)) == (one(8),)


def test_a_call_is_repeated_when_the_repository_has_died(repository: FakeRepository, client: nnfmq.Client) -> None:
    def die_once(repository: FakeRepository, channel: Channel, _message: RepositoryMessage) -> bool:
        repository.answer = None
        channel.hang_up()
        return True

    repository.answer = die_once
    with client.model("plus") as model:
        assert model.execute(one(5)) == (one(6),)
    assert repository.connections == 2


def test_a_repository_that_dies_each_time_is_an_error(repository: FakeRepository, client: nnfmq.Client) -> None:
    def die(_repository: FakeRepository, channel: Channel, _message: RepositoryMessage) -> bool:
        channel.hang_up()
        return True

    repository.answer = die
    with pytest.raises(nnfmq.DeviceUnavailable, match="ended 3 connections"):
        client.model("plus", timeout=None)


def test_a_repository_that_is_started_again_is_waited_for(daemon: Daemon, client: nnfmq.Client) -> None:
    with serving(daemon) as repository:
        repository.publish("plus", 1, plus_model(1))
        model = client.model("plus")
    assert model.execute(one(5)) == (one(6),)
    with pytest.raises(nnfmq.DeviceUnavailable):
        client.models(timeout=0.05)
    listing = InThread.start(client.models)
    listing.wait_until_asleep()
    with serving(daemon) as repository:
        repository.publish("plus", 2, plus_model(2))
        assert [entry.version for entry in listing.wait().value] == [2]
        until(lambda: model.version == 2, "the model moves")
        model.close()


def test_without_recovery_a_model_dies_with_its_driver(repository: FakeRepository, daemon: Daemon) -> None:
    with daemon.connect() as client:
        model = client.model("plus")
        burst = model.burst()
        kill_worker(client)
        repository.publish("plus", 2, plus_model(2))
        for call in (lambda: model.execute(one(1)), lambda: burst.execute(one(1)), client.models, model.burst):
            with pytest.raises(nnfmq.DeadObject):
                call()
        until(lambda: "nnfmq-versions" not in {thread.name for thread in threading.enumerate()}, "it is not tried")
        burst.close()


def test_with_recovery_the_model_is_requested_again(repository: FakeRepository, recovering: nnfmq.Client) -> None:
    with recovering.model("plus") as model, recovering.model("plus", 1) as pinned, model.burst() as burst:
        assert burst.execute(one(5)) == (one(6),)
        for _ in range(2):
            kill_worker(recovering)
            assert burst.execute(one(5)) == model.execute(one(5)) == pinned.execute(one(5)) == (one(6),)
        kill_worker(recovering)
        repository.publish("plus", 2, plus_model(2))
        until(lambda: model.version == 2, "the model moves, in a new worker")
        assert burst.execute(one(5)) == model.execute(one(5)) == (one(7),)
        assert (burst.version, pinned.version) == (2, 1)
        assert pinned.execute(one(5)) == (one(6),)


def test_with_recovery_a_model_gets_the_version_that_is_served_then(
    repository: FakeRepository, recovering: nnfmq.Client
) -> None:
    with recovering.model("plus") as model, model.burst() as burst:
        repository.answer = lambda *_: True  # it is told of the version, but does not get it
        repository.publish("plus", 2, plus_model(2))
        until(lambda: "nnfmq-versions" in {thread.name for thread in threading.enumerate()}, "it requests it")
        kill_worker(recovering)
        repository.answer = None
        assert burst.execute(one(5)) == (one(7),)
        assert (burst.version, model.version) == (2, 2)
        repository.hang_up()  # ends the request without a reply


def test_a_move_while_the_model_is_prepared_again_is_kept(repository: FakeRepository, recovering: nnfmq.Client) -> None:
    """The repository replies to the recovery with version 1, and then serves version 2, which is prepared first."""
    with recovering.model("plus") as model:
        prepare_again = model.handle.prepare_again
        assert prepare_again is not None

        def prepare_slowly(deadline_ns: int | None, wait: bool) -> ModelHandle:
            older = prepare_again(deadline_ns, wait)
            repository.publish("plus", 2, plus_model(2))
            until(lambda: model.version == 2, "the model moves")
            return older

        model.handle.prepare_again = prepare_slowly
        kill_worker(recovering)
        assert model.execute(one(5)) == (one(7),)
        assert model.version == 2
        until(lambda: len(own_statistics(recovering).models) == 1, "version 1 is released")


@pytest.mark.parametrize("mode", ["burst", "synchronous", "pool"])
def test_workers_die_and_versions_change_under_load(
    mode: str, repository: FakeRepository, recovering: nnfmq.Client
) -> None:
    """Each result is right. A call whose packet was lost raises, and nothing else does."""
    ended, seen, wrong = threading.Event(), [0], []

    def run(execute: Callable[[float], float]) -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            value, before = float(number % 1000), model.version
            try:
                version = execute(value) - value
            except nnfmq.DeadObject:
                continue
            seen.append(int(version))
            if not before <= version <= model.version:
                wrong.append((before, version))

    with recovering.model("plus") as model, model.burst() as burst, model.burst_pool(2) as pool:
        calls: dict[str, Callable[..., Any]] = {
            "burst": burst.execute, "synchronous": model.execute, "pool": pool.execute,
        }  # fmt: skip
        running = InThread.start(lambda: run(lambda value: float(calls[mode](one(value))[0][0])))
        for version in range(2, 8):
            repository.publish("plus", version, plus_model(version))
            if version % 2:
                kill_worker(recovering)
            until(lambda version=version: seen[-1] == version, f"version {version} executes")
        ended.set()
        assert running.wait().error is None
    assert not wrong
    assert seen == sorted(seen)


def test_with_recovery_a_version_with_another_interface_is_not_used(
    repository: FakeRepository, recovering: nnfmq.Client
) -> None:
    with recovering.model("plus") as model:
        repository.publish("plus", 2, plus_model(2, (2,)))
        kill_worker(recovering)
        assert model.execute(one(5)) == (one(6),)
        repository.withdraw("plus", 1)
        kill_worker(recovering)
        with pytest.raises(nnfmq.ModelNotFound):
            model.execute(one(5))


def test_with_recovery_a_version_that_has_become_another_model_is_an_error(
    repository: FakeRepository, recovering: nnfmq.Client
) -> None:
    with recovering.model("plus", 1) as pinned:
        repository.publish("plus", 1, plus_model(1, (2,)))
        kill_worker(recovering)
        with pytest.raises(nnfmq.DeviceUnavailable, match="version 1 of model 'plus' has changed: its inputs are"):
            pinned.execute(one(5))


@pytest.mark.parametrize("recover", [False, True])
def test_the_worker_dies_while_a_version_is_prepared(
    recover: bool, repository: FakeRepository, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, recover=recover) as client, client.model("plus") as model:
        burst = model.burst()
        burst.execute(one(0))
        with Process(client.worker_pid) as worker, worker.stopped():
            repository.publish("plus", 2, plus_model(2))
            until(lambda: any(key for key in client.connection._pending_calls), "the version is being prepared")
            worker.kill()
            worker.wait_for_end()
        if recover:
            until(lambda: model.version == 2, "the model moves, in a new worker")
            assert burst.execute(one(5)) == model.execute(one(5)) == (one(7),)
        else:
            until(lambda: any("keeps its version" in text for text in caplog.messages), "the end is logged")
            with pytest.raises(nnfmq.DeadObject):
                burst.execute(one(5))
        burst.close()


@pytest.mark.parametrize("recover", [False, True])
def test_the_worker_dies_while_a_burst_moves(recover: bool, repository: FakeRepository, daemon: Daemon) -> None:
    with nnfmq.connect(daemon.path, timeout=LIMIT_S, recover=recover) as client, client.model("plus") as model:
        burst = model.burst()
        burst.execute(one(0))
        repository.publish("plus", 2, plus_model(2))
        until(lambda: model.version == 2, "the model moves")
        with Process(client.worker_pid) as worker, worker.stopped():
            moving = InThread.start(lambda: burst.execute(one(5)))
            moving.wait_until_asleep()
            until(lambda: any(key for key in client.connection._pending_calls), "the burst closes its queues")
            worker.kill()
            worker.wait_for_end()
        if recover:
            assert moving.wait().value == (one(7),)
        else:
            assert isinstance(moving.wait().error, nnfmq.DeadObject)
        burst.close()


@pytest.mark.parametrize("requests", [1, 2])
def test_a_client_that_is_killed_while_it_moves_leaves_nothing(
    requests: int, repository: FakeRepository, daemon: Daemon
) -> None:
    """It is killed when it has opened the model, or while its stopped worker should prepare the new version."""
    with app("executes_by_name", daemon.path, "plus") as client, Process(int(client.line())) as worker:
        assert client.line() == "1"
        with worker.stopped():
            repository.publish("plus", 2, plus_model(2))
            until(lambda: repository.opened >= requests, "the client has requested it")
            client.popen.kill()
            client.wait()
        worker.wait_for_end()


def test_in_a_forked_child_the_models_are_the_parent_s(repository: FakeRepository, daemon: Daemon) -> None:
    with daemon.connect() as client, client.model("plus") as model, model.burst() as burst:
        burst.execute(one(1))
        calls: list[Callable[[], object]] = [
            client.models, lambda: client.model("plus"), lambda: burst.execute(one(1)), lambda: model.execute(one(1)),
        ]  # fmt: skip
        child = fork()
        if child == 0:
            os._exit(0 if all(map(raises_dead_object, calls)) and client.close() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        repository.publish("plus", 2, plus_model(2))
        until(lambda: model.version == 2, "the parent's model moves")
        child = fork()
        if child == 0:  # before the parent's burst has moved
            os._exit(0 if raises_dead_object(calls[2]) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert burst.execute(one(5)) == (one(7),)


def raises_dead_object(call: Callable[[], object]) -> bool:
    try:
        call()
    except nnfmq.DeadObject as error:
        return "forked" in str(error)
    return False
