"""Models from nnfmq.ModelBuilder, prepared and executed by a driver process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.drivers import LIMIT_S, Daemon, Process, running_daemon, short_folder
from support.plugins import NAME, QUANTIZED, add_fibonacci, path_with
from support.rebuilt import rebuilt
from support.vts_models import one_of_each_type

import nnfmq
from nnfmq.hal.types import Model
from nnfmq.lab.conformance.cases import PASSED, run_test
from nnfmq.lab.conformance.driver_targets import Driver
from nnfmq.lab.conformance.targets import Prepared

F32, LARGE = "TENSOR_FLOAT32", 64  # more than 128 bytes
X = np.arange(LARGE, dtype=np.float32)


@contextmanager
def scaled_sum(weights: nnfmq.Memory | None = None) -> Iterator[nnfmq.ModelBuilder]:
    """Yield a finished model of x * 2 + weights, whose operations are added last first; the weights are 0 to 63."""
    with nnfmq.ModelBuilder() as builder:
        x, two, offset, product, result = (builder.add_operand(F32, (LARGE,)) for _ in range(5))
        none = builder.add_operand("INT32")
        builder.set_operand_value(two, np.full(LARGE, 2, np.float32))
        builder.set_operand_value(none, 0)
        if weights is None:
            builder.set_operand_value(offset, X)
        else:
            builder.set_operand_value_from_memory(offset, weights)
        builder.add_operation("ADD", [product, offset, none], [result])
        builder.add_operation("MUL", [x, two, none], [product])
        builder.identify_inputs_and_outputs({"x": x}, {"sum": result})
        builder.finish()
        yield builder


@pytest.mark.parametrize("name", ["reference", "compiled"])
def test_API_3_API_4_N_API_11_a_built_model_is_executed(client: nnfmq.Client, name: str) -> None:
    with scaled_sum() as builder, client.device(name).prepare(builder) as model:
        assert "'x' (float32 64) → 'sum' (float32 64)" in repr(model)
        assert model.execute(X)[0].tolist() == (3 * X).tolist()
        with model.burst() as burst:
            assert burst.execute(X)[0].tolist() == (3 * X).tolist()


def test_API_3_the_best_device_prepares_a_builder_as_it_prepares_a_file(client: nnfmq.Client) -> None:
    with scaled_sum() as builder, client.prepare(builder) as model:
        assert model.inputs == builder.inputs
        assert model.outputs == builder.outputs
        assert model.execute(X)[0].tolist() == (3 * X).tolist()


def test_API_3_a_device_is_asked_for_the_operations_in_run_order(client: nnfmq.Client) -> None:
    with scaled_sum() as builder:
        assert [operation.type.name for operation in builder.model.main.operations] == ["MUL", "ADD"]
        assert client.device("reference").supported_operations(builder) == [True, True]


def test_API_16_API_10_a_prepared_model_outlives_builder_and_memory(client: nnfmq.Client) -> None:
    with nnfmq.Memory.create(4 * LARGE) as weights:
        weights.view[:] = X.tobytes()
        with scaled_sum(weights) as builder:
            weights.close()
            model = client.device("reference").prepare(builder)
    with model:
        assert model.execute(X)[0].tolist() == (3 * X).tolist()


def test_API_16_a_model_can_be_prepared_after_its_builder_is_closed(client: nnfmq.Client) -> None:
    with scaled_sum() as builder:
        finished = builder.model
    for name in ("reference", "compiled"):
        with client.device(name).prepare(finished) as model:
            assert model.execute(X)[0].tolist() == (3 * X).tolist()


def test_API_10_constants_in_a_file_are_read(client: nnfmq.Client, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(X.tobytes())
    with path.open("rb") as file:
        memory = nnfmq.FileMemory.from_fd(file.fileno(), 4 * LARGE)
    with nnfmq.ModelBuilder() as builder:
        constant, result = builder.add_operand(F32, (LARGE,)), builder.add_operand(F32, (LARGE,))
        with memory:
            builder.set_operand_value_from_memory(constant, memory)
        builder.add_operation("RELU", [constant], [result])
        builder.identify_inputs_and_outputs([], [result])
        builder.finish()
        with client.device("reference").prepare(builder) as model:
            assert model.execute()[0].tolist() == X.tolist()


def test_N_API_4_a_drivers_own_buffer_cannot_contain_a_constant(client: nnfmq.Client) -> None:
    device = client.device("reference")
    with (
        scaled_sum() as builder,
        device.prepare(builder) as model,
        device.allocate(inputs=[(model, 0)]) as buffer,
        nnfmq.ModelBuilder() as other,
    ):
        other.add_operand(F32, (LARGE,))
        with pytest.raises(nnfmq.InvalidArgument, match=r"nnfmq\.FileMemory is required, not Buffer"):
            other.set_operand_value_from_memory(0, buffer)  # type: ignore[arg-type]  # that is what it rejects


def test_N_API_5_a_model_that_is_not_finished_cannot_be_prepared(client: nnfmq.Client) -> None:
    with nnfmq.ModelBuilder() as builder:
        for prepare in (client.prepare, client.device("reference").prepare):
            with pytest.raises(nnfmq.BadState, match=r"not finished: call finish\(\)"):
                prepare(builder)
        with pytest.raises(nnfmq.InvalidArgument):
            builder.finish()
        with pytest.raises(nnfmq.BadState, match="this model is invalid"):
            client.prepare(builder)


def test_API_3_a_model_with_an_IF_is_executed_in_every_branch(client: nnfmq.Client) -> None:
    with ExitStack() as stack:
        branches = [stack.enter_context(scaled_sum()), stack.enter_context(nnfmq.ModelBuilder())]
        x, y = (branches[1].add_operand(F32, (LARGE,)) for _ in range(2))
        branches[1].add_operation("RELU", [x], [y])
        branches[1].identify_inputs_and_outputs([x], [y])
        branches[1].finish()
        builder = stack.enter_context(nnfmq.ModelBuilder())
        condition, then, otherwise = (
            builder.add_operand(*o) for o in (("TENSOR_BOOL8", (1,)), ("SUBGRAPH",), ("SUBGRAPH",))
        )
        x, y = (builder.add_operand(F32, (LARGE,)) for _ in range(2))
        for operand, branch in zip((then, otherwise), branches, strict=True):
            builder.set_operand_value_from_model(operand, branch)
        builder.add_operation("IF", [condition, then, otherwise, x], [y])
        builder.identify_inputs_and_outputs([condition, x], [y])
        builder.finish()
        finished = builder.model
    for name in ("reference", "compiled"):
        with client.device(name).prepare(finished) as model:
            assert model.execute([True], X)[0].tolist() == (3 * X).tolist()
            assert model.execute([False], -X)[0].tolist() == [0.0] * LARGE


def kill_worker(client: nnfmq.Client) -> None:
    with Process(client.worker_pid) as worker:
        worker.kill()
        worker.wait_for_end()


def test_API_16_a_builder_prepares_its_model_again_after_the_drivers_death(daemon: Daemon) -> None:
    with scaled_sum() as builder:
        with daemon.connect() as client, client.device("reference").prepare(builder) as dead:
            kill_worker(client)
            with pytest.raises(nnfmq.DeadObject):
                dead.execute(X)
        with daemon.connect() as client, client.device("reference").prepare(builder) as model:
            assert model.execute(X)[0].tolist() == (3 * X).tolist()


@pytest.mark.parametrize("has_fallback", [True, False])
def test_API_16_API_10_models_are_prepared_again_when_builder_and_memory_are_closed(
    daemon: Daemon, has_fallback: bool
) -> None:
    """After the driver's death: in the next driver, or by the fallback to the CPU."""
    with ExitStack() as stack:
        client = stack.enter_context(nnfmq.connect(daemon.path, timeout=LIMIT_S))
        with nnfmq.Memory.create(4 * LARGE) as weights:
            weights.view[:] = X.tobytes()
            with scaled_sum(weights) as builder:
                prepare = client.prepare if has_fallback else client.device("reference").prepare
                model = stack.enter_context(prepare(builder))
        kill_worker(client)
        assert model.execute(X)[0].tolist() == (3 * X).tolist()


# -- extensions -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Return a driver with the extension of the documents."""
    site = tmp_path_factory.mktemp("site")
    add_fibonacci(site)
    with short_folder() as made, running_daemon(made / "d.sock", environment=path_with(site)) as daemon:
        yield daemon


@pytest.mark.parametrize("is_described", [True, False])
def test_API_3_a_vendors_operation_is_built_by_name(extended: Daemon, is_described: bool) -> None:
    """Its output has the vendor's type, with parameters: 0.5 * (code - 10)."""
    with extended.connect() as client:
        device = client.device("reference")
        with nnfmq.ModelBuilder(extensions=device.info.extensions if is_described else ()) as builder:
            builder.get_extension_operation_type("nnfmq.tflite", 0)
            n = builder.add_operand(builder.get_extension_operand_type(NAME, 0))
            codes = builder.add_operand(builder.get_extension_operand_type(NAME, 1), (4,))
            builder.set_extension_data(codes, QUANTIZED)
            builder.add_operation(builder.get_extension_operation_type(NAME, 0), [n], [codes])
            builder.identify_inputs_and_outputs([n], [codes])
            builder.finish()
            with device.prepare(builder if is_described else builder.model) as model:
                assert model.execute(np.int64(4))[0].tolist() == [12, 12, 14, 16]  # of 1, 1, 2, 3


def test_N_API_1_an_extension_that_the_device_lacks_is_named(client: nnfmq.Client) -> None:
    extensions = client.device("reference").info.extensions
    with (
        nnfmq.ModelBuilder(extensions=extensions) as builder,
        pytest.raises(nnfmq.InvalidArgument, match=r"the device has: nnfmq\.tflite"),
    ):
        builder.get_extension_operand_type(NAME, 0)


# -- against the HAL's test models ------------------------------------------------------------------------------------


class RebuildingDriver(Driver):
    """A device of a driver that prepares models which ModelBuilder has built once more."""

    @contextmanager
    def prepared(self, model: Model) -> Iterator[Prepared]:
        """Prepare the model on the device."""
        with rebuilt(model) as builder, self._connected().prepare(builder) as prepared:
            yield self.executor(prepared, self._path)


def test_API_3_API_4_the_hals_test_models_pass_if_they_are_rebuilt(data_dir: Path) -> None:
    target = RebuildingDriver("reference", "embedded", "sync")
    tests = one_of_each_type()
    try:
        results = [run_test(test, target, with_variants=False) for test in tests]
    finally:
        target.close()
    assert [result.name for result in results if result.has_failed] == []
    assert sum(outcome.status == PASSED for result in results for outcome in result.outcomes) > 200
