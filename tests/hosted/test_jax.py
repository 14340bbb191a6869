"""The device `jax`, against what JAX computes in a process of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.hosted_files import assert_equal, examples, made

import nnfmq

if find_spec("jax") is None:
    pytest.skip("jax is not installed", allow_module_level=True)

ONE_THREAD = {"threads": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("jax_models", tmp_path_factory.mktemp("jax"))


@pytest.fixture(scope="module")
def device(shared_client: nnfmq.Client) -> nnfmq.Device:
    return shared_client.device("jax")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("vision", "vision"), ("transformer", "transformer"), ("transformer", "transformer1"), ("wide", "wide"),
        ("wide", "wide1"), ("types", "types"), ("words", "words"), ("words", "words1"),
    ],
)  # fmt: skip
def test_a_file_computes_what_jax_does_bit_for_bit(device: nnfmq.Device, files: Path, name: str, case: str) -> None:
    inputs, outputs = examples(files, case)
    with device.prepare(files / f"{name}.jax", runtime_options=ONE_THREAD) as model:
        assert_equal(model.execute(*inputs), outputs)
        assert_equal(model.execute(*inputs), outputs)


@pytest.mark.parametrize("name", ["vision", "types", "wide"])
def test_a_burst_computes_the_same(device: nnfmq.Device, files: Path, name: str) -> None:
    inputs, outputs = examples(files, name)
    shapes = {index: array.shape for index, array in enumerate(inputs)}
    with (
        device.prepare(files / f"{name}.jax", shapes=shapes, runtime_options=ONE_THREAD) as model,
        model.burst() as burst,
    ):
        assert [output.shape for output in model.outputs] == [array.shape for array in outputs]
        burst.execute(*(np.zeros_like(array) for array in inputs))
        for _ in range(3):
            assert_equal(burst.execute(*inputs), outputs)


def test_inputs_are_the_leaves_of_trees_with_jax_s_own_names(device: nnfmq.Device, files: Path) -> None:
    with device.prepare(files / "trees.jax") as model:
        assert [info.name for info in model.inputs] == ["args[0]['b']", "args[0]['w']", "kwargs['x']"]
        found = model.execute(np.float32([1, 2]), np.ones((3, 2), np.float32), np.ones((4, 3), np.float32))
        assert found[0].tolist() == [[4, 5]] * 4


def test_a_call_of_a_function_of_the_process_is_refused(device: nnfmq.Device, files: Path) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="the function calls 'xla_ffi_python_cpu_callback'"):
        device.prepare(files / "hostile.jax")


def test_a_platform_that_the_machine_or_the_file_lacks_is_refused(device: nnfmq.Device, files: Path) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=r"jax: .*cuda"):
        device.prepare(files / "cuda.jax")
    with pytest.raises(nnfmq.InvalidArgument, match="platform 'tpu': allowed are cpu"):
        device.prepare(files / "vision.jax", runtime_options={"platform": "tpu"})
    with pytest.raises(nnfmq.InvalidArgument, match="allowed are threads, platform"):
        device.prepare(files / "vision.jax", runtime_options={"device": "cpu"})


def test_a_truncated_file_gets_the_runtime_s_own_text(device: nnfmq.Device, files: Path) -> None:
    data = (files / "vision.jax").read_bytes()
    with pytest.raises(nnfmq.InvalidArgument, match="jax: "):
        device.prepare(data[: len(data) - 100])


def test_a_burst_of_open_sizes_takes_those_of_each_request(device: nnfmq.Device, files: Path) -> None:
    cases = [examples(files, case) for case in ("transformer", "transformer1", "transformer")]
    path = files / "transformer.jax"
    with device.prepare(path, runtime_options=ONE_THREAD) as model, model.burst() as burst:
        for inputs, outputs in cases:
            assert_equal(burst.execute(*inputs), outputs)
