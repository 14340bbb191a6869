"""Limits of compiling: clients that ask for as much as they can, and what their neighbours and they themselves get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.drivers import Daemon, InThread, Process, running_daemon, until
from support.models import logistics_model, weighty_model
from support.plugins import add_plugin, path_with

import nnfmq
from nnfmq.base import settings
from nnfmq.base.processes import allowed_cpus
from nnfmq.driver.compilation.server import CLIENT_PROCESSES_MAX
from nnfmq.hal.errors import ResourceExhausted
from nnfmq.hal.types import ExecutionPreference, Model

pytest.importorskip("llvmlite", exc_type=ImportError)

SUSTAINED = ExecutionPreference.SUSTAINED_SPEED
ENDLESS = logistics_model(1200)
LONG = logistics_model(300)
SHORT = logistics_model(24)
ATTACKERS, PREPARATIONS = 2, 3


@contextmanager
def uncached_daemon(folder: Path, more: Mapping[str, str] | None = None, **limits: object) -> Iterator[Daemon]:
    """Run a daemon without a driver cache; `limits` are values of settings by their keys in configuration files."""
    variables = {f"NNFMQ_{name.upper()}": str(value) for name, value in limits.items()}
    environment = {settings.CACHE_MIB.variable: "0", **variables, **(more or {})}
    with running_daemon(folder / "d.sock", environment=environment) as daemon:
        yield daemon


def prepare(client: nnfmq.Client, model: Model, **rest: Any) -> nnfmq.PreparedModel:
    """Prepare a model so that the reply is sent after its compilation."""
    return client.device("compiled").prepare(model, **{"preference": SUSTAINED, **rest})


def compile_processes(daemon: Daemon) -> list[int]:
    """Return the pids of the compile processes of all clients."""
    found: list[int] = []
    for pid in daemon.compile_servers():
        with Process(pid) as server:
            found += server.children()
    return found


def test_clients_that_prepare_many_models_delay_no_neighbour(folder: Path) -> None:
    """The neighbour's model is compiled while those of the others have not been: it does not wait for them."""
    with uncached_daemon(folder) as daemon, ExitStack() as stack, daemon.connect() as neighbour:
        prepare(neighbour, SHORT).close()  # the compile server runs
        attackers = [stack.enter_context(daemon.connect()) for _ in range(ATTACKERS)]
        calls = [InThread.start(lambda c=c: prepare(c, LONG)) for c in attackers for _ in range(PREPARATIONS)]
        until(lambda: len(compile_processes(daemon)) >= allowed_cpus(), "as many models are compiled as can be")
        call = InThread.start(lambda: prepare(neighbour, SHORT))
        counts: list[int] = []

        def is_prepared() -> bool:
            counts.append(len(compile_processes(daemon)))
            return not call.is_running

        until(is_prepared, "the neighbour's model is prepared", 120)  # on a busy machine
        call.wait().value.close()
        assert not any(not other.is_running for other in calls)
        assert max(counts) <= 2 * allowed_cpus()
        for client in attackers:
            client.close()
        for other in calls:
            other.wait()


@pytest.mark.parametrize("processes", [1, 3])
def test_the_setting_limits_the_processes(folder: Path, processes: int) -> None:
    with uncached_daemon(folder, compile_processes=processes) as daemon, daemon.connect() as client:
        calls = [InThread.start(lambda: prepare(client, ENDLESS)) for _ in range(PREPARATIONS)]
        until(lambda: len(compile_processes(daemon)) == processes, "all processes run")
        client.close()
        for call in calls:
            call.wait()
        until(lambda: not compile_processes(daemon), "they are gone, and so are those that waited")


_LARGE = """
from nnfmq.engines.compiled import code_generator

ir_of = code_generator.ir_of

def larger(kernels, target):
    text = ir_of(kernels, target)
    _, found, rest = text.partition("define void @GemmKernel_")
    return text + "".join(found + str(number) + rest for number in range(400 if found else 0))

code_generator.ir_of = larger
"""


def test_a_kernel_that_takes_too_much_memory_to_compile_fails_and_says_which_limit(folder: Path) -> None:
    """No kernel does: a product's is as long as 400 of them here."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_LARGE)
    limits = {"compile_memory_mib": 16, "compile_processes": 1}
    with uncached_daemon(folder, path_with(site), **limits) as daemon, daemon.connect() as client:
        with pytest.raises(ResourceExhausted, match=r"may take 16 MiB, the limit that \$NNFMQ_COMPILE_MEMORY_MIB"):
            prepare(client, weighty_model())
        prepare(client, SHORT).close()


def test_a_model_that_takes_too_long_to_compile_fails_and_says_which_limit(folder: Path) -> None:
    limits = {"compile_time_s": 1, "compile_processes": 1}
    with uncached_daemon(folder, **limits) as daemon, daemon.connect() as client:
        with pytest.raises(ResourceExhausted, match=r"more than 1 s of CPU time .* \$NNFMQ_COMPILE_TIME_S"):
            prepare(client, logistics_model(3200))
        prepare(client, SHORT).close()


def test_the_client_is_charged_with_the_memory_of_its_compile_processes(folder: Path) -> None:
    def charged_bytes() -> int:
        return client.statistics().clients[0].charged_bytes

    with uncached_daemon(folder) as daemon, daemon.connect() as client:
        with client.device("reference").prepare(LONG):
            of_model = charged_bytes()
        call = InThread.start(lambda: prepare(client, LONG))
        until(lambda: charged_bytes() > of_model, "its compile processes are charged, too")
        call.wait().value.close()
        until(lambda: charged_bytes() == 0, "all is returned")


_FLOODING = f"""
from nnfmq.base.channel import Channel
from nnfmq.driver.compilation import jobs
from nnfmq.driver.compilation.server import FORK
from nnfmq.driver.devices.device import DeviceBase
from nnfmq.engines.function import FunctionProgram
from nnfmq.hal.errors import DeadObject, GeneralFailure

kept = []


class Flooding(DeviceBase):
    name = "test-flooding"

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        accepted = 0
        try:
            while accepted < 10 * {CLIENT_PROCESSES_MAX}:
                ends = [*Channel.pair(), *Channel.pair()]
                kept.append((ends[0], ends[2]))
                jobs._server.send(FORK, (ends[1].fileno(), ends[3].fileno()))
                ends[1].close(), ends[3].close()
                accepted += 1
        except DeadObject:
            raise GeneralFailure("the link was closed") from None
        raise GeneralFailure(f"{{accepted}} requests were taken")


class Odd(Flooding):
    name = "test-odd"

    def compile(self, model):
        with open("/dev/null") as file, open("/proc/self/stat") as other:
            for _ in range(3):
                jobs._server.send(FORK, (file.fileno(), other.fileno()))
        return FunctionProgram(model, lambda inputs: list(inputs))
"""


@pytest.fixture
def hostile(folder: Path) -> Iterator[Daemon]:
    """Run a daemon with devices of a plug-in whose workers flood the compile server, or send it odd files."""
    site = folder / "site"
    site.mkdir()
    devices = {"flooding": "nnfmq_flooding:Flooding", "odd": "nnfmq_flooding:Odd"}
    add_plugin(site, "nnfmq_flooding", _FLOODING, devices, "nnfmq.devices")
    environment = {settings.CACHE_MIB.variable: "0", **path_with(site)}
    with running_daemon(folder / "d.sock", environment=environment) as daemon:
        yield daemon


def test_a_worker_that_asks_for_too_many_processes_loses_its_link(hostile: Daemon) -> None:
    with hostile.connect() as attacker, hostile.connect() as neighbour:
        with pytest.raises(nnfmq.GeneralFailure, match="the link was closed"):
            attacker.device("test-flooding").prepare(SHORT)
        assert f"more than {CLIENT_PROCESSES_MAX} processes at a time" in hostile.program.errors()
        prepare(neighbour, SHORT).close()
        attacker.close()
        until(lambda: not compile_processes(hostile), "what the attacker has asked for is gone")


def test_a_worker_that_sends_files_in_place_of_sockets_harms_no_neighbour(hostile: Daemon) -> None:
    with hostile.connect() as attacker, hostile.connect() as neighbour:
        prepare(neighbour, SHORT).close()
        (server,) = hostile.compile_servers()
        attacker.device("test-odd").prepare(SHORT).close()
        prepare(neighbour, SHORT).close()
        assert hostile.compile_servers() == [server]
        until(lambda: "no compile process: " in hostile.program.errors(), "the log says so")
    assert os.path.exists(hostile.path)
