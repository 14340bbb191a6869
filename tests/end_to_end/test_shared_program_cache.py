"""One copy of a program's constants for all workers of a daemon, also if workers or the daemon are killed.

A worker stops itself where a test orders it to, at a function of `nnfmq.driver.cache.shared`, or publishes altered
memory instead of the program. The inodes in /proc/PID/maps show which process maps which memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.descriptors import no_more_descriptors_than
from support.drivers import LIMIT_S, Daemon, InThread, Process, Program, one, running_daemon, short_folder, until
from support.models import null_model, weighty_model
from support.plugins import path_with

import nnfmq
from nnfmq.hal.types import ExecutionPreference, Model

pytest.importorskip("llvmlite", exc_type=ImportError)

FAST, SUSTAINED = ExecutionPreference.FAST_SINGLE_ANSWER, ExecutionPreference.SUSTAINED_SPEED
SIDE = 256
INPUT = np.arange(SIDE, dtype=np.float32).reshape(1, SIDE)
SUM = SIDE * (SIDE - 1) / 2
MODEL = weighty_model(1.0, SIDE)
CLASSIFIER = "mobilenet_v1_0.25_128_quant.tflite"
PROGRAM = "/memfd:nnfmq-program"

HELD = """
import fcntl, os, signal, subprocess, threading
from nnfmq.base.memory import CONSTANT_SEALS, Memory
from nnfmq.driver.compilation import server
from nnfmq.driver.cache import programs, shared
from nnfmq.driver.cache.shared import SharedCacheClient

server.IDLE_TIMEOUT_S = 0.2  # each test waits for the end of the compile server

def at(point):
    try:
        with open(os.environ["TEST_ORDER"]) as file:
            return file.read() == point
    except FileNotFoundError:
        return False

def before(owner, name, point):
    function = getattr(owner, name)
    def stopping(*arguments):
        if at(point):
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return function(*arguments)
    setattr(owner, name, stopping)

before(SharedCacheClient, "_request", "before it asks")
before(SharedCacheClient, "_receive_reply", "held")
before(programs, "read_memory", "mapped")
before(SharedCacheClient, "publish", "sealed")

publish = SharedCacheClient.publish

def altered(memory, seals):
    data = bytearray(memory.view)
    data[5000] ^= 1
    fd = os.memfd_create("nnfmq-program", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd

def publishing(self, name, memory):
    if at("publish corrupt memory"):
        with Memory.adopt_constant(altered(memory, CONSTANT_SEALS)) as corrupt:
            publish(self, name, corrupt)
            self.kept = corrupt.view
    elif at("publish unsealed memory"):
        with Memory.adopt(altered(memory, CONSTANT_SEALS & ~fcntl.F_SEAL_WRITE)) as unsealed:
            publish(self, name, unsealed)
    else:
        publish(self, name, memory)
    if at("leave a copy"):
        copy = os.dup(self._channel.fileno())
        subprocess.Popen(["sleep", "1000"], pass_fds=[copy])
    if at("offered"):
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

SharedCacheClient.publish = publishing
"""

CLIENT = """
import sys
import numpy as np
import nnfmq
from nnfmq.hal.types import ExecutionPreference
from support.models import weighty_model

client = nnfmq.connect(sys.argv[1])
model = client.device("compiled").prepare(weighty_model(), preference=ExecutionPreference.SUSTAINED_SPEED)
print(client.worker_pid, flush=True)
sys.stdin.readline()
"""


@dataclass
class Held:
    """A daemon whose workers follow an order in a file, and its cache directory."""

    daemon: Daemon
    order_file: Path
    cache: Path

    def order(self, what: str) -> None:
        """Set where workers stop from now on, or what they publish."""
        self.order_file.write_text(what)

    def forget_files(self) -> None:
        """Remove all files of the cache."""
        for path in (*self.cache.glob("kernels/*"), *self.cache.glob("*")):
            if path.is_file():
                path.unlink()


@contextmanager
def holding(folder: Path, place: Path) -> Iterator[Held]:
    """Run such a daemon."""
    site = place / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(HELD)
    order = place / "order"
    # Workers read the order, and start a program: not in a sandbox.
    orders = {"TEST_ORDER": str(order), "NNFMQ_SANDBOX": "off"}
    environment = {**path_with(site), **orders, "XDG_CACHE_HOME": str(place)}
    with running_daemon(folder / "d.sock", environment=environment) as daemon:
        yield Held(daemon, order, place / "nnfmq")


@pytest.fixture(scope="module")
def _held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    with short_folder() as folder, holding(folder, tmp_path_factory.mktemp("held")) as held:
        yield held


@pytest.fixture
def held(_held: Held) -> Iterator[Held]:
    """Return the daemon without files, orders and programs; it must have no programs afterwards."""
    _held.forget_files()
    _held.order("")
    before = _held.daemon.process.descriptors()
    yield _held
    _held.order("")
    until(lambda: _held.daemon.process.descriptors() == before, "the daemon has the descriptors that it had")
    assert programs_of(_held.daemon.process) == set()


def programs_of(process: Process) -> set[int]:
    """Return the inodes of the programs that a process has mapped."""
    return {int(line.split()[4]) for line in process.shared_mappings() if PROGRAM in line}


def kept_by(daemon: Daemon) -> int:
    """Return how many programs the supervisor has, none of which is mapped."""
    assert programs_of(daemon.process) == set()
    return sum(PROGRAM in place for place in daemon.process.descriptors())


def assert_kept(daemon: Daemon, count: int) -> None:
    """Fail unless the supervisor has so many programs once it has received the messages."""
    until(lambda: kept_by(daemon) == count, f"the supervisor has {count} programs")


class User:
    """A client of a daemon with a model, and the worker behind it."""

    def __init__(self, daemon: Daemon, stack: ExitStack) -> None:
        self.client = stack.enter_context(daemon.connect())
        self.worker = stack.enter_context(Process(self.client.worker_pid))
        self._models = stack

    def prepare(self, model: Any = MODEL, preference: ExecutionPreference = SUSTAINED) -> nnfmq.PreparedModel:
        """Prepare a model, until the test ends."""
        return self._models.enter_context(self.client.device("compiled").prepare(model, preference=preference))

    def programs(self) -> set[int]:
        """Return what its worker has mapped."""
        return programs_of(self.worker)


@pytest.fixture
def user(held: Held) -> Iterator[Callable[[], User]]:
    with ExitStack() as stack:
        yield lambda: User(held.daemon, stack)


def assert_computes(model: nnfmq.PreparedModel, value: float = 1.0) -> None:
    (result,) = model.execute(INPUT)
    assert result.shape == (1, SIDE) and (result == SUM * value).all()


# ---------------------------------------------------------------------------------------------------------- sharing


def test_workers_map_one_copy_of_a_classifier_and_compute_the_reference_s_results(
    held: Held, user: Callable[[], User], data_dir: Path
) -> None:
    classifier = nnfmq.load(data_dir / "models" / CLASSIFIER)
    image = np.random.default_rng(5).integers(0, 256, (1, 128, 128, 3)).astype(np.uint8)
    first, second = user(), user()
    with first.client.device("reference").prepare(classifier) as reference:
        (expected,) = reference.execute(image)
    compiled, shared = first.prepare(classifier), second.prepare(classifier)
    assert expected.any()
    for model in (compiled, shared):
        assert np.array_equal(model.execute(image)[0], expected)
    assert first.programs() == second.programs() and len(first.programs()) == 1
    assert_kept(held.daemon, 1)


def test_the_memory_of_a_shared_program_is_counted_once(held: Held, user: Callable[[], User]) -> None:
    """PSS divides what several map: two workers that have used all of it have half of it each."""
    users = [user(), user()]
    for one_user in users:
        assert_computes(one_user.prepare(weighty_model(1.0, SIDE)))
    sizes = [mapping_of(one_user.worker) for one_user in users]
    assert sizes[0]["Rss"] == sizes[1]["Rss"] > SIDE * SIDE * 4 // 1024
    assert all(size["Pss"] <= size["Rss"] // 2 + 4 and size["Private_Dirty"] == 0 for size in sizes)


def mapping_of(process: Process) -> dict[str, int]:
    """Return what the kernel says of a process's mapping of a program, in KiB."""
    _, _, after = Path(f"/proc/{process.pid}/smaps").read_text().partition(PROGRAM)
    lines = [line.split() for line in after.splitlines()[1:24]]
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}


def test_LIFE_2_a_program_outlives_the_client_that_published_it(held: Held, user: Callable[[], User]) -> None:
    second = user()
    with ExitStack() as stack:
        first = User(held.daemon, stack)
        assert_computes(first.prepare())
        model = second.prepare()
        inodes = first.programs()
    held.forget_files()
    third = user()
    assert_computes(third.prepare())
    assert_computes(model)
    assert second.programs() == third.programs() == inodes


def test_LIFE_3_the_program_of_a_killed_client_stays_available_to_others(held: Held, user: Callable[[], User]) -> None:
    with Program.start(["-P", "-c", CLIENT, held.daemon.path]) as program, Process(int(program.line())) as worker:
        inodes = programs_of(worker)
        second = user()
        model = second.prepare()
        program.popen.kill()
        worker.wait_for_end()
    assert second.programs() == inodes
    assert_kept(held.daemon, 1)
    assert_computes(model)


def test_LIFE_1_a_program_is_freed_with_its_last_model(held: Held, user: Callable[[], User]) -> None:
    first, second = user(), user()
    models = [first.prepare(), first.prepare(), second.prepare()]
    assert_kept(held.daemon, 1)
    models[0].close()
    models[2].close()
    until(lambda: second.programs() == set(), "the second worker has let go")
    assert_kept(held.daemon, 1)
    assert_computes(models[1])
    models[1].close()
    until(lambda: kept_by(held.daemon) == 0, "nobody has it any more")
    assert_computes(first.prepare())


def test_different_models_are_different_programs(held: Held, user: Callable[[], User]) -> None:
    first, second = user(), user()
    doubled = weighty_model(2.0, SIDE)
    assert_computes(first.prepare())
    assert_computes(second.prepare(doubled), 2.0)
    assert len(first.programs() | second.programs()) == 2
    assert_kept(held.daemon, 2)
    assert_computes(first.prepare(doubled), 2.0)
    assert len(first.programs() | second.programs()) == 2
    assert_kept(held.daemon, 2)


def test_a_program_read_from_its_file_is_shared(held: Held, user: Callable[[], User]) -> None:
    with ExitStack() as stack:
        User(held.daemon, stack).prepare()
    until(lambda: kept_by(held.daemon) == 0, "nobody has it")
    first, second = user(), user()
    models = first.prepare(), second.prepare()
    assert first.programs() == second.programs() and len(first.programs()) == 1
    for model in models:
        assert_computes(model)


def test_PREP_4_a_program_compiled_in_the_background_is_shared(held: Held, user: Callable[[], User]) -> None:
    first, second = user(), user()
    model = first.prepare(preference=FAST)
    assert_kept(held.daemon, 1)  # before that the second one would compile it, too
    assert_computes(model)
    assert_computes(second.prepare(preference=FAST))
    assert second.programs() == first.programs()


def test_small_programs_are_copied(held: Held, user: Callable[[], User]) -> None:
    first, second = user(), user()
    for one_user in (first, second):
        assert one_user.prepare(null_model()).execute(one(3))[0][0] == 3
        assert one_user.programs() == set()
    until(lambda: kept_by(held.daemon) == 0, "nobody has any")


def test_workers_that_compile_the_same_model_concurrently_share_one_program(
    held: Held, user: Callable[[], User]
) -> None:
    users = [user() for _ in range(3)]
    calls = [InThread.start(one_user.prepare) for one_user in users]
    for call in calls:
        assert_computes(call.wait().value)
    assert_kept(held.daemon, 1)
    assert all(len(one_user.programs()) == 1 for one_user in users)


# ---------------------------------------------------------------------------------------------------------- killed

ASKING = ["before it asks", "held", "mapped"]
OFFERING = ["sealed", "offered"]


def stopped_at(point: str, held: Held, victim: User, model: Model = MODEL) -> InThread:
    """Let a worker prepare a model until it has stopped at `point`; others do not stop."""
    held.order(point)
    call = InThread.start(lambda: victim.prepare(model))
    until(lambda: set(victim.worker.states()) == {"T"}, f"the worker has stopped where it is {point}")
    held.order("")
    return call


@pytest.mark.parametrize("point", ASKING)
def test_LIFE_4_a_worker_killed_during_a_lookup_affects_no_other(
    point: str, held: Held, user: Callable[[], User]
) -> None:
    first, third = user(), user()
    model = first.prepare()
    with ExitStack() as stack:
        victim = User(held.daemon, stack)
        call = stopped_at(point, held, victim)
        victim.worker.kill()
        assert isinstance(call.wait().error, nnfmq.DeadObject)
        victim.worker.wait_for_end()
    held.forget_files()
    assert_computes(third.prepare())
    assert_computes(model)
    assert first.programs() == third.programs()
    assert_kept(held.daemon, 1)


@pytest.mark.parametrize("point", OFFERING)
def test_LIFE_4_a_worker_killed_while_it_publishes_leaves_no_program(
    point: str, held: Held, user: Callable[[], User]
) -> None:
    second = user()
    with ExitStack() as stack:
        victim = User(held.daemon, stack)
        call = stopped_at(point, held, victim)
        until(lambda: kept_by(held.daemon) == (point == "offered"), "the supervisor has received it")
        victim.worker.kill()
        assert isinstance(call.wait().error, nnfmq.DeadObject)
    until(lambda: kept_by(held.daemon) == 0, "nobody has it")
    assert_computes(second.prepare())
    assert_kept(held.daemon, 1)


def test_LIFE_4_a_copy_of_the_link_keeps_no_reference_of_a_worker_that_exited(
    held: Held, user: Callable[[], User]
) -> None:
    """As a worker that is controlled by its client, which has a copy of the link."""
    victim, second = user(), user()
    before = set(victim.worker.children())
    held.order("leave a copy")
    victim.prepare()
    held.order("")
    (pid,) = set(victim.worker.children()) - before
    with Process(pid) as copy:
        assert_kept(held.daemon, 1)
        victim.worker.kill()
        assert_kept(held.daemon, 0)
        assert not copy.has_exited()
        copy.kill()
        copy.wait_for_end()
    assert_computes(second.prepare())


@pytest.mark.parametrize("point", ["before it asks", "held", "sealed"])
def test_DEAD_workers_continue_when_their_supervisor_is_killed(point: str, folder: Path, tmp_path: Path) -> None:
    with holding(folder, tmp_path) as held, ExitStack() as stack:
        first, second = (User(held.daemon, stack) for _ in range(2))
        model = first.prepare()
        held.forget_files()
        other = weighty_model(2.0, SIDE) if point == "sealed" else MODEL
        call = stopped_at(point, held, second, other)
        held.daemon.kill()
        second.worker.resume()
        assert_computes(call.wait().value, 2.0 if point == "sealed" else 1.0)
        for number, one_user in enumerate((first, second), 3):
            for value in (number, number + 0.5):
                assert_computes(one_user.prepare(weighty_model(value, SIDE)), value)
        assert_computes(model)
        assert held.daemon.program.errors().count("programs are no longer shared") <= 2


def test_a_stopped_supervisor_delays_a_preparation_by_one_timeout(held: Held, user: Callable[[], User]) -> None:
    first = user()
    with held.daemon.process.stopped():
        assert_computes(first.prepare())
    assert_kept(held.daemon, 1)  # what was published meanwhile is received later
    second = user()
    assert_computes(second.prepare())
    assert first.programs() == second.programs()


# -------------------------------------------------------------------------------------------------- compromised workers


def test_CACHE_12_a_worker_that_publishes_corrupt_memory_affects_no_other(held: Held, user: Callable[[], User]) -> None:
    bad, good, third = user(), user(), user()
    held.order("publish corrupt memory")
    assert_computes(bad.prepare())
    held.order("")
    corrupt = bad.programs()
    assert_kept(held.daemon, 1)
    model = good.prepare()
    assert_computes(model)
    assert_computes(third.prepare())
    assert third.programs() == good.programs() and not good.programs() & corrupt
    errors = held.daemon.program.errors()
    assert "a program that another worker shares is not used" in errors
    assert f"worker {good.worker.pid} found a shared program corrupt" in errors


def test_a_worker_that_publishes_unsealed_memory_is_disconnected(held: Held, user: Callable[[], User]) -> None:
    bad, good, third = user(), user(), user()
    held.order("publish unsealed memory")
    assert_computes(bad.prepare())
    held.order("")
    until(
        lambda: f"worker {bad.worker.pid} no longer shares programs" in held.daemon.program.errors(),
        "the supervisor says so",
    )
    assert kept_by(held.daemon) == 0
    assert_computes(good.prepare())
    assert_computes(third.prepare())
    assert third.programs() == good.programs()
    assert_kept(held.daemon, 1)
    assert_computes(bad.prepare(weighty_model(2.0, SIDE)), 2.0)


def test_a_supervisor_without_free_fds_shares_nothing_and_continues(held: Held, user: Callable[[], User]) -> None:
    first, second = user(), user()
    pid = held.daemon.process.pid
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    with no_more_descriptors_than(pid, min(set(range(len(used) + 1)) - used)):
        assert_computes(first.prepare())
        assert_computes(second.prepare())
    assert kept_by(held.daemon) == 0
    assert_computes(user().prepare(weighty_model(2.0, SIDE)), 2.0)
    assert_kept(held.daemon, 1)


def test_EXT_with_the_cache_disabled_nothing_is_shared(folder: Path) -> None:
    with running_daemon(folder / "d.sock", environment={"NNFMQ_CACHE_MIB": "0"}) as daemon, ExitStack() as stack:
        users = [User(daemon, stack) for _ in range(2)]
        for one_user in users:
            assert_computes(one_user.prepare())
            assert one_user.programs() == set()
        assert kept_by(daemon) == 0


def test_an_embedded_driver_shares_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with nnfmq.connect(embedded=True, timeout=LIMIT_S) as client, Process(client.worker_pid) as driver:
        for _ in range(2):  # compiled, then read from the file
            with client.device("compiled").prepare(MODEL, preference=SUSTAINED) as model:
                assert_computes(model)
                assert programs_of(driver) == set()
    assert sum(path.is_file() for path in (tmp_path / "nnfmq").iterdir()) == 1
