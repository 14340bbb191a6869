"""FAST_SINGLE_ANSWER and the driver's own cache, on the device `compiled`, through drivers that tests stop and kill.

A driver under test reads a pipe where it would begin to compile, so a test decides when that is over. If a test must
distinguish the results of machine code from the reference's, the compiled program adds 100.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, InThread, Process, one, running_daemon, short_folder, thread_state, until
from support.models import logistics_model, null_model
from support.plugins import path_with, stopping_writer

import nnfmq
from nnfmq.hal.preparation import ProgramKind, require_machine_code
from nnfmq.hal.types import ExecutionPreference

FAST, SUSTAINED = ExecutionPreference.FAST_SINGLE_ANSWER, ExecutionPreference.SUSTAINED_SPEED
MODEL = "mobilenet_v1_0.25_128_quant.tflite"
NULL = null_model()

HELD = """
import os
from nnfmq.engines.function import FunctionProgram
from nnfmq.hal.errors import GeneralFailure
from nnfmq.driver.devices.builtin import CompiledDevice

compile = CompiledDevice.compile

def held(self, model):
    with open(os.environ["TEST_HOLD"]) as pipe:
        order = pipe.read()
    if order == "fail":
        raise GeneralFailure("as the test wants it")
    if order.startswith("hundred"):
        return FunctionProgram(model, lambda inputs: [inputs[0] + 100])
    return compile(self, model)

CompiledDevice.compile = held
"""


@dataclass
class Held:
    """A daemon that compiles when a test writes to a named pipe."""

    daemon: Daemon
    pipe: Path
    cache: Path

    def order(self, what: str, flags: int = 0) -> None:
        """Let the compilation that waits, or the next one, go on."""
        descriptor = os.open(self.pipe, os.O_WRONLY | flags)  # when somebody reads it
        os.write(descriptor, what.encode())
        os.close(descriptor)

    def order_what_waits(self, what: str) -> None:
        """Let the compilation that waits go on, if one does."""
        with suppress(OSError):
            self.order(what, os.O_NONBLOCK)


@contextmanager
def patched(folder: Path, site: Path, patch: str, environment: Mapping[str, str]) -> Iterator[Daemon]:
    """Run a daemon whose processes execute `patch` first."""
    site.mkdir()
    (site / "sitecustomize.py").write_text(patch)
    with running_daemon(folder / "d.sock", environment={**path_with(site), **environment}) as daemon:
        yield daemon


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return the directory of the driver cache, which does not exist yet."""
    return tmp_path / "cache" / "nnfmq"


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    place = tmp_path_factory.mktemp("held")
    os.mkfifo(place / "pipe")
    hold = {"TEST_HOLD": str(place / "pipe"), "NNFMQ_SANDBOX": "off"}  # its workers open the pipe
    environment = {**hold, "XDG_CACHE_HOME": str(place)}
    with short_folder() as folder, patched(folder, place / "site", HELD, environment) as daemon:
        yield Held(daemon, place / "pipe", place / "nnfmq")


@pytest.fixture
def plain(folder: Path, cache: Path) -> Iterator[Daemon]:
    """Return a daemon with an empty driver cache."""
    with running_daemon(folder / "d.sock", environment={"XDG_CACHE_HOME": str(cache.parent)}) as daemon:
        yield daemon


@pytest.fixture
def model(data_dir: Path) -> Any:
    return nnfmq.load(data_dir / "models" / MODEL)


@pytest.fixture
def image() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(5).integers(0, 256, (1, 128, 128, 3)).astype(np.uint8)


def reusably(model: nnfmq.PreparedModel, resources: ExitStack) -> Callable[[], Any]:
    execution = resources.enter_context(model.create_reusable_execution())
    return lambda: execution.compute(one(1), timeout=LIMIT_S)


def in_a_burst(model: nnfmq.PreparedModel, resources: ExitStack) -> Callable[[], Any]:
    burst = resources.enter_context(model.burst())
    return lambda: burst.execute(one(1), timeout=LIMIT_S)


def fenced(model: nnfmq.PreparedModel, _resources: ExitStack) -> Callable[[], Any]:
    def execute() -> Any:
        with model.execute_fenced(one(1)) as launched:
            return launched.result(LIMIT_S)

    return execute


MODES: dict[str, Callable[[nnfmq.PreparedModel, ExitStack], Callable[[], Any]]] = {
    "EXE-3 synchronous": lambda model, _: lambda: model.execute(one(1), timeout=LIMIT_S),
    "EXE-5 asynchronous": lambda model, _: lambda: model.execute_async(one(1)).result(LIMIT_S),
    "FEN-1 fenced": fenced,
    "RUX-1 reusable": reusably,
    "BUR-1 burst": in_a_burst,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_PREP_4_a_model_executes_immediately_and_tiers_up_in_every_execution_mode(
    mode: Callable[[nnfmq.PreparedModel, ExitStack], Callable[[], Any]], held: Held
) -> None:
    with held.daemon.connect() as client, ExitStack() as resources:
        model = resources.enter_context(client.device("compiled").prepare(NULL, preference=FAST, timeout=LIMIT_S))
        execute = mode(model, resources)
        assert execute()[0][0] == execute()[0][0] == 1
        held.order("hundred")
        until(lambda: execute()[0][0] == 101, "executions go over")
        assert execute()[0][0] == 101


@pytest.mark.parametrize("options", [{}, {"preference": "low_power"}], ids=["by default", "LOW_POWER"])
@pytest.mark.parametrize("by", ["client", "device", "interface without preferences"])
def test_PREP_4_without_that_preference_a_model_is_ready_when_it_is_compiled(by: str, options: Any, held: Held) -> None:
    interface = "HIDL 1.0" if by == "interface without preferences" and not options else "AIDL v4"
    with nnfmq.connect(held.daemon.path, interface=interface, timeout=LIMIT_S) as client:
        prepare = client.prepare if by == "client" else client.device("compiled").prepare
        call = InThread.start(lambda: prepare(NULL, **options))
        held.order("hundred")
        with call.wait().value as model:
            assert [model.execute(one(1))[0][0] for _ in range(3)] == [101, 101, 101]


def test_a_timeout_that_ends_before_the_compilation_does_says_so_and_nothing_else_executes_the_model(
    held: Held,
) -> None:
    with held.daemon.connect() as client:
        with pytest.raises(nnfmq.MissedDeadline, match=r"before device 'compiled' had|the model was compiled"):
            client.prepare(NULL, timeout=0.2)
        held.order("hundred")


def test_a_model_says_what_executes_it_and_a_measurement_of_machine_code_rejects_the_interpreter(
    held: Held, plain: Daemon
) -> None:
    with held.daemon.connect() as client, client.device("compiled").prepare(NULL, preference=FAST) as model:
        assert (model.program, model.compiled_operations) == (ProgramKind.BASELINE, 0)
        with pytest.raises(nnfmq.GeneralFailure, match="a program of the kind BASELINE, not machine code"):
            require_machine_code(model.device, model.program, 1)
    with plain.connect() as client:
        kinds = []
        for device in ("reference", "compiled", "compiled"):
            with client.device(device).prepare(logistics_model(2)) as model:
                require_machine_code(device, model.program, model.compiled_operations)
                kinds.append((model.program, model.compiled_operations))
    with pytest.raises(nnfmq.GeneralFailure, match="the interpreter executes everything"):
        require_machine_code("compiled", ProgramKind.COMPILED, 0)
    count = len(logistics_model(2).main.operations)
    assert kinds == [(ProgramKind.INTERPRETER, 0), (ProgramKind.COMPILED, count), (ProgramKind.CACHED, count)]


def test_a_model_that_cannot_be_compiled_stays_on_the_reference_kernels_and_is_logged(held: Held) -> None:
    with held.daemon.connect() as client, client.device("compiled").prepare(NULL, preference=FAST) as model:
        held.order("fail")
        until(
            lambda: "stays on its baseline program: as the test wants it" in held.daemon.program.errors(),
            "a log line",
        )
        assert model.execute(one(1))[0][0] == 1


def test_a_model_released_during_compilation_does_not_delay_the_next_tier_up(held: Held) -> None:
    with held.daemon.connect() as client:
        device = client.device("compiled")
        device.prepare(NULL, preference=FAST).close()
        with device.prepare(NULL, preference=FAST) as model:
            assert model.execute(one(1))[0][0] == 1
            until(
                lambda: held.order_what_waits("hundred") or model.execute(one(1))[0][0] == 101,
                "the second one goes over",
            )


def test_LIFE_2_a_client_that_dies_while_its_model_is_compiled_ends_its_worker(held: Held) -> None:
    with held.daemon.connect() as client:
        worker = Process(client.worker_pid)
        client.device("compiled").prepare(NULL, preference=FAST)
    with worker:
        worker.wait_for_end()


def test_LIFE_4_a_worker_killed_while_it_compiles_leaves_no_files(held: Held) -> None:
    before = entries(held.cache)
    with held.daemon.connect() as client, Process(client.worker_pid) as worker:
        model = client.device("compiled").prepare(NULL, preference=FAST)
        worker.kill()
        with pytest.raises(nnfmq.DeadObject):
            model.execute(one(1), timeout=LIMIT_S)
    assert entries(held.cache) == before


def test_a_quantized_classifier_returns_the_same_values_before_and_after_tier_up(
    held: Held, model: Any, image: np.ndarray
) -> None:
    with held.daemon.connect() as client, ExitStack() as resources:
        expected = resources.enter_context(client.device("reference").prepare(model)).execute(image)[0]
        prepared = resources.enter_context(client.device("compiled").prepare(model, preference=FAST))
        burst = resources.enter_context(prepared.burst())
        results = [burst.execute(image)[0]]
        held.order("compile")
        until(lambda: results.append(burst.execute(image)[0]) or bool(entries(held.cache)), "it is compiled and kept")
        results += [burst.execute(image)[0] for _ in range(20)]
        assert expected.any()
        assert all(np.array_equal(expected, result) for result in results)


def entries(cache: Path) -> list[Path]:
    """Return the files of a cache that are complete, without those of kernels."""
    return [path for path in files(cache) if not path.name.startswith(".")]


def files(cache: Path) -> list[Path]:
    """Return the files of a cache, without those of kernels."""
    return [path for path in cache.glob("*") if path.is_file()]


def only_entry(cache: Path) -> tuple[int, int]:
    """Return what tells the one entry from another in its place, and when it was used last."""
    (path,) = entries(cache)
    info = path.stat()
    return info.st_ino, info.st_mtime_ns


@pytest.mark.parametrize("preference", [FAST, SUSTAINED])
def test_a_program_that_one_worker_compiled_is_not_compiled_by_another(
    preference: ExecutionPreference, plain: Daemon, model: Any, image: np.ndarray, cache: Path
) -> None:
    with plain.connect() as client, client.device("compiled").prepare(model, preference=SUSTAINED) as prepared:
        expected = prepared.execute(image)[0]
    inode, used_ns = only_entry(cache)
    with plain.connect() as client, client.device("compiled").prepare(model, preference=preference) as prepared:
        again, used_again_ns = only_entry(cache)
        assert (again, used_again_ns > used_ns) == (inode, True)
        assert np.array_equal(prepared.execute(image)[0], expected) and expected.any()


def test_CACHE_12_a_corrupt_entry_is_compiled_again_and_replaced(
    plain: Daemon, model: Any, image: np.ndarray, cache: Path
) -> None:
    with plain.connect() as client:
        device = client.device("compiled")
        with device.prepare(model, preference=SUSTAINED) as prepared:
            expected = prepared.execute(image)[0]
        (path,) = entries(cache)
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
        with device.prepare(model, preference=SUSTAINED) as prepared:
            assert np.array_equal(prepared.execute(image)[0], expected)
        until(lambda: "an entry of the cache is removed" in plain.program.errors(), "the log says so")
        assert path.read_bytes() != bytes(content) and len(path.read_bytes()) == len(content)


def test_each_instruction_set_has_its_own_entries(
    plain: Daemon, tmp_path: Path, model: Any, image: np.ndarray, cache: Path
) -> None:
    forced = {"XDG_CACHE_HOME": str(cache.parent), "NNFMQ_TARGET": "sse4.1"}
    other, found = plain.path.with_name("other.sock"), []
    with running_daemon(other, environment=forced) as slower:
        for number, daemon in enumerate((plain, slower)):
            with daemon.connect() as client, client.device("compiled").prepare(model, preference=SUSTAINED) as prepared:
                found.append(prepared.execute(image)[0])
            assert len(entries(cache)) == number + 1
    assert np.array_equal(*found)


def stopped_writers(daemon: Daemon) -> list[int]:
    """Return the child processes of a driver that are stopped, as by SIGSTOP."""
    return [pid for pid in daemon.process.children() if thread_state(pid, pid) == "T"]


def test_LIFE_4_a_process_killed_while_it_writes_an_entry_leaves_none_and_the_next_removes_its_file(
    folder: Path, tmp_path: Path, cache: Path
) -> None:
    environment = {"XDG_CACHE_HOME": str(cache.parent)}
    with (
        patched(folder, tmp_path / "site", stopping_writer('not path.startswith("/memfd:")'), environment) as daemon,
        daemon.connect() as client,
    ):
        call = InThread.start(lambda: client.device("compiled").prepare(NULL, preference=SUSTAINED))
        until(lambda: len(stopped_writers(daemon)) == 1, "a process has stopped in the middle of an entry")
        (writer,) = stopped_writers(daemon)
        os.kill(writer, signal.SIGKILL)
        model = call.wait().value
        assert model is not None
        model.close()
    assert entries(cache) == [] and len(files(cache)) == 1
    with (
        running_daemon(folder / "next.sock", environment=environment) as daemon,
        daemon.connect() as client,
        client.device("compiled").prepare(NULL, preference=SUSTAINED) as model,
    ):
        assert model.execute(one(1))[0][0] == 1
    assert len(files(cache)) == len(entries(cache)) == 1


def test_a_disabled_cache_is_not_created(folder: Path, cache: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(cache.parent), "NNFMQ_CACHE_MIB": "0"}
    with (
        running_daemon(folder / "d.sock", environment=environment) as daemon,
        daemon.connect() as client,
        client.device("compiled").prepare(NULL, preference=SUSTAINED) as model,
    ):
        assert model.execute(one(1))[0][0] == 1
    assert not cache.exists()
