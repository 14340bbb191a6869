"""Files with open sizes on ONNX Runtime, out of process, and the death of either side while a burst lays out memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, kill_worker, running_daemon, short_folder, until

import nnfmq
from nnfmq.client.burst.channel import BurstChannel

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def driver() -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file: the sum of two inputs of any number of rows, and the places of the numbers in it that are not 0."""
    helper, number = onnx.helper, onnx.TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info(name, number, ["rows", 4]) for name in "xy"]
    outputs = [
        helper.make_tensor_value_info("sum", number, ["rows", 4]),
        helper.make_tensor_value_info("places", onnx.TensorProto.INT64, [2, "count"]),
    ]
    nodes = [helper.make_node("Add", ["x", "y"], ["sum"]), helper.make_node("NonZero", ["sum"], ["places"])]
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs), opset_imports=opset, ir_version=8)
    path = tmp_path_factory.mktemp("files") / "open.onnx"
    onnx.save(model, path)
    return path


def prepared(client: nnfmq.Client, file: Path) -> nnfmq.PreparedModel:
    return client.device("onnxruntime").prepare(file, runtime_options={"threads": 1})


def given(rows: int, zeros: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    x[:zeros] = 0
    return x, np.zeros_like(x)


def check(found: Any, inputs: Any) -> None:
    np.testing.assert_array_equal(found["sum"], inputs[0] + inputs[1])
    np.testing.assert_array_equal(found["places"], np.nonzero(inputs[0] + inputs[1]))


CASES = [given(2), given(2, 1), given(2, 2), given(700), given(1), given(2000, 1900), given(3)]


def test_each_form_of_execution_takes_the_sizes_of_its_arrays(driver: Daemon, file: Path) -> None:
    async def in_a_task(burst: nnfmq.Burst) -> None:
        for inputs in CASES:
            check(await burst.execute_async(*inputs, timeout=LIMIT_S), inputs)

    with driver.connect() as client, prepared(client, file) as model, ExitStack() as stack:
        burst, other = stack.enter_context(model.burst()), stack.enter_context(model.burst())
        pool, execution = stack.enter_context(model.burst_pool(2)), model.create_reusable_execution()
        stack.enter_context(execution)
        for inputs in CASES:
            for execute in (burst.execute, pool.execute, execution.compute, model.execute):
                check(execute(*inputs), inputs)  # type: ignore[operator]
            check(model.execute_async(*inputs).result(LIMIT_S), inputs)
            check(burst.execute(out=burst.outputs), inputs)
        asyncio.run(in_a_task(other))
        with pytest.raises(nnfmq.InvalidArgument, match="'x' has shape any x 4; the given array has 0x4"):
            burst.execute(*given(0))


def test_a_burst_repeats_an_execution_once_when_its_output_memory_is_too_small(driver: Daemon, file: Path) -> None:
    with driver.connect() as client, prepared(client, file) as model, model.burst() as burst:

        def counts() -> tuple[int, int]:
            (own,) = (each for each in client.statistics().clients if each.worker_pid == client.worker_pid)
            return own.models[0].executions, own.models[0].failures

        x, zero = given(30_000)
        x[:] = 0
        check(burst.execute(x, zero), (x, zero))
        executions, failures = counts()
        for number in (1, 2):
            check(burst.execute(zero + 1, zero), (zero + 1, zero))
            assert counts() == (executions + number, failures + 1)


# ------------------------------------------------------------------------------------------------ death


@pytest.mark.parametrize("recover", [True, False])
def test_SIGKILL_of_the_worker_while_memory_is_replaced(
    recover: bool, driver: Daemon, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        nnfmq.connect(driver.path, timeout=LIMIT_S, recover=recover) as client,
        prepared(client, file) as model,
        model.burst() as burst,
        model.create_reusable_execution() as execution,
    ):
        check(burst.execute(*CASES[0]), CASES[0])
        check(execution.compute(*CASES[0]), CASES[0])
        forget, killed, large = BurstChannel.forget_memories, list[int](), given(700)

        def kill_first(self: BurstChannel, memories: Any) -> None:
            if memories and not killed:
                killed.append(client.worker_pid)
                kill_worker(client)
            forget(self, memories)

        monkeypatch.setattr(BurstChannel, "forget_memories", kill_first)
        if recover:
            check(burst.execute(*large), large)
            check(execution.compute(*large), large)
            check(burst.execute(*CASES[1]), CASES[1])
        else:
            for execute in (burst.execute, execution.compute):
                with pytest.raises(nnfmq.DeadObject):
                    execute(*large)  # type: ignore[operator]
        assert killed


DYING = """
import os, signal, sys
import numpy as np, nnfmq
from nnfmq.client.burst.channel import BurstChannel

def die(self, memories):
    if memories:
        os.kill(os.getpid(), signal.SIGKILL)

with nnfmq.connect(sys.argv[1]) as client, client.device("onnxruntime").prepare(sys.argv[2]) as model:
    with model.burst() as burst:
        burst.execute(np.ones((2, 4), np.float32), np.ones((2, 4), np.float32))
        BurstChannel.forget_memories = die
        print(client.worker_pid, flush=True)
        burst.execute(np.ones((700, 4), np.float32), np.ones((700, 4), np.float32))
"""


def test_SIGKILL_of_the_client_while_memory_is_replaced_ends_its_worker(driver: Daemon, file: Path) -> None:
    with driver.connect() as client, prepared(client, file) as model, model.burst() as burst:
        check(burst.execute(*CASES[0]), CASES[0])
        command = [sys.executable, "-c", DYING, str(driver.path), str(file)]
        done = subprocess.run(command, check=False, capture_output=True, timeout=LIMIT_S)
        assert done.returncode == -9, done.stderr
        worker = int(done.stdout)
        until(lambda: not os.path.exists(f"/proc/{worker}"), "the worker has ended")
        check(burst.execute(*CASES[3]), CASES[3])
