"""PREP-9 in a driver process: preparing a model does all heavy work, and reserves no memory for executions.

The driver writes a line for each step of a preparation into a file, so a test sees in which call it was done.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, Process, running_daemon, short_folder
from support.models import slow_model
from support.partitioned import MODES
from support.plugins import path_with

import nnfmq
from nnfmq.hal.types import ExecutionPreference

NOTING = """
from nnfmq.driver.compilation import jobs
from nnfmq.engines import interpreter


def note(owner, name):
    real = getattr(owner, name)

    def noting(*arguments, **named):
        with open({path!r}, "a") as file:  # each time, because a worker closes the descriptors of its parent
            file.write(name + "\\n")
        return real(*arguments, **named)

    setattr(owner, name, noting)


note(interpreter.SubgraphPreparation, "__init__")  # of an engine's program, or of a part of it
note(interpreter, "match")  # chooses a kernel
note(interpreter, "load_constant")
note(jobs, "compile_in_processes")
"""
SIDE, CHANNELS = 256, 16
TENSOR_KB = SIDE * SIDE * CHANNELS * 4 // 1024


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file into which the driver writes."""
    path = tmp_path_factory.mktemp("steps") / "steps"
    path.touch()
    return path


@pytest.fixture(scope="module")
def driver(steps: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(NOTING.format(path=str(steps)))
    environment = {**path_with(site), "NNFMQ_SANDBOX": "off"}  # its workers write a file
    with short_folder() as folder, running_daemon(folder / "d.sock", environment=environment) as daemon:
        yield daemon


@pytest.fixture
def connected(driver: Daemon) -> Iterator[nnfmq.Client]:
    with driver.connect() as made:
        yield made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_PREP_9_the_first_execution_does_nothing_of_the_preparation(
    device: str, mode: str, connected: nnfmq.Client, steps: Path
) -> None:
    steps.write_text("")
    channels = 2 + list(MODES).index(mode)  # another model each time: a driver compiles each once
    preference = ExecutionPreference.SUSTAINED_SPEED  # compiled at once, not in the background
    with connected.device(device).prepare(slow_model(2, 4, channels), preference=preference) as prepared:
        done = {"__init__", "match", "load_constant"} | ({"compile_in_processes"} if device == "compiled" else set())
        assert set(steps.read_text().split()) == done
        steps.write_text("")
        MODES[mode](prepared, np.ones((1, 4, 4, channels), np.float32))
        assert steps.read_text() == ""


def test_PREP_9_no_memory_of_an_execution_is_used_before_the_first_one(connected: nnfmq.Client) -> None:
    compiled, preference = connected.device("compiled"), ExecutionPreference.SUSTAINED_SPEED

    def private_kb() -> int:
        lines = Path(f"/proc/{driver.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

    with (
        Process(connected.worker_pid) as driver,
        compiled.prepare(slow_model(2, 4, 2), preference=preference) as small,
    ):
        small.execute(np.ones((1, 4, 4, 2), np.float32))  # the driver has imported all modules now
        before = private_kb()
        with compiled.prepare(slow_model(4, SIDE, CHANNELS), preference=preference) as prepared:
            idle = private_kb()
            prepared.execute(np.ones((1, SIDE, SIDE, CHANNELS), np.float32))
            used = private_kb()
    assert idle - before < TENSOR_KB < used - idle
