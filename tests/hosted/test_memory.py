"""The memory of hosted runtimes: a client's limit holds for what a runtime takes, not for what it only reserves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon
from support.faulty_runtime import DEVICE, FAULT, faulty_driver, faulty_file, four

import nnfmq
from nnfmq.base import settings

LIMIT_MIB = 48


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    limit = {settings.CLIENT_MEMORY_MIB.variable: str(LIMIT_MIB)}
    with faulty_driver(tmp_path_factory.mktemp("site"), limit) as daemon:
        yield daemon


@pytest.fixture
def client(driver: Daemon) -> Iterator[nnfmq.Client]:
    with driver.connect() as made:
        yield made


def test_a_file_that_takes_more_than_the_limit_is_refused_and_the_next_one_opened(
    client: nnfmq.Client, tmp_path: Path
) -> None:
    device = client.device(DEVICE)
    for fault in ("64 MiB", "10 GiB"):
        with pytest.raises(nnfmq.ResourceExhausted):
            device.prepare(faulty_file(tmp_path, open=fault))
    with device.prepare(faulty_file(tmp_path)) as model:
        assert (model.execute(four(1))[0] == 2).all()


def test_an_execution_that_takes_more_than_the_limit_fails(client: nnfmq.Client, tmp_path: Path) -> None:
    with client.device(DEVICE).prepare(faulty_file(tmp_path, run="64 MiB")) as model, model.burst() as burst:
        with pytest.raises(nnfmq.ResourceExhausted):
            burst.execute(four(FAULT))
        with pytest.raises(nnfmq.ResourceExhausted):
            burst.execute(four(1))  # what it took is still taken
    with client.device(DEVICE).prepare(faulty_file(tmp_path, run="10 GiB")) as model, model.burst() as burst:
        with pytest.raises(nnfmq.ResourceExhausted, match="llocate"):
            burst.execute(four(FAULT))
        assert (burst.execute(four(1))[0] == 2).all()


def test_a_runtime_reserves_what_its_device_states_without_using_it(client: nnfmq.Client, tmp_path: Path) -> None:
    with client.device("reserving").prepare(faulty_file(tmp_path, open="reserve 64 GiB", run="64 MiB")) as model:
        assert (model.execute(four(1))[0] == 2).all()
    with (
        client.device("reserving").prepare(faulty_file(tmp_path, run="64 MiB")) as model,
        pytest.raises(nnfmq.ResourceExhausted),  # it is charged for what it uses
    ):
        model.execute(four(FAULT))


def test_a_reservation_that_the_device_does_not_state_is_RESOURCE_EXHAUSTED(
    client: nnfmq.Client, tmp_path: Path
) -> None:
    with pytest.raises(nnfmq.ResourceExhausted, match="Cannot allocate memory"):
        client.device(DEVICE).prepare(faulty_file(tmp_path, open="reserve 64 GiB"))


def sum_of_ones() -> bytes:
    """Return an ONNX file that makes as many ones as its input says, and adds them up."""
    onnx: Any = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kinds = onnx.helper, onnx.TensorProto
    value = helper.make_tensor("value", kinds.FLOAT, [1], [1.0])
    graph = helper.make_graph(
        [
            helper.make_node("ConstantOfShape", ["n"], ["ones"], value=value),
            helper.make_node("ReduceSum", ["ones"], ["y"], keepdims=1),
        ],
        "ones",
        [helper.make_tensor_value_info("n", kinds.INT64, [1])],
        [helper.make_tensor_value_info("y", kinds.FLOAT, [1])],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    content: bytes = model.SerializeToString()
    return content


def test_onnxruntime_works_with_little_memory_and_is_refused_more(client: nnfmq.Client) -> None:
    content, threads = sum_of_ones(), {"threads": 1}
    with client.device("onnxruntime").prepare(content, runtime_options=threads) as model, model.burst() as burst:
        for size in (4, 1 << 20):
            assert float(burst.execute(np.array([size]))[0][0]) == size
        with pytest.raises(nnfmq.ResourceExhausted, match="llocate"):
            burst.execute(np.array([10 << 28]))
        assert float(burst.execute(np.array([4]))[0][0]) == 4
    with (
        client.device("onnxruntime").prepare(content, runtime_options=threads) as model,
        pytest.raises(nnfmq.ResourceExhausted, match="the limit is"),
    ):
        model.execute(np.array([64 << 18]))
