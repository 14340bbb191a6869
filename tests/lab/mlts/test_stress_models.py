"""The models of the crash tests: which of them a device supports, and which ones many threads can afford."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nnfmq
from nnfmq.hal.types import LifeTime
from nnfmq.lab.mlts.crash_tests import CrashTest, Workload
from nnfmq.lab.mlts.stress_models import (
    SMALL_MODELS,
    ModelCost,
    affordable,
    candidates,
    hal_model,
    open_model,
    survey,
    with_constants_in_file,
)

INFERENCE = CrashTest("test", Workload.INFERENCE, 60.0)
COMPILATION = CrashTest("test", Workload.COMPILATION, 60.0)
SLOW = ModelCost("slow", prepare_s=0.5, compile_s=4.0, execute_s=2.0)
QUICK = ModelCost("quick", prepare_s=0.1, compile_s=1.0, execute_s=0.1)


@pytest.fixture(scope="module")
def client() -> Iterator[nnfmq.Client]:
    with nnfmq.connect(embedded=True) as made:
        yield made


@pytest.mark.parametrize(("test", "expected"), [
    (replace(INFERENCE, threads=4), [SLOW, QUICK]),  # 8 s of executions
    (replace(INFERENCE, threads=5), [QUICK]),
    (replace(INFERENCE, threads=10, processes=10), [QUICK]),  # none fits: the fastest
    (replace(COMPILATION, threads=2), [SLOW, QUICK]),
    (replace(COMPILATION, threads=3), [QUICK]),
    (replace(COMPILATION, threads=16), [SLOW, QUICK]),  # the compiler is not waited for
])  # fmt: skip
def test_many_threads_use_models_that_they_finish_in_time(test: CrashTest, expected: list[ModelCost]) -> None:
    assert affordable([SLOW, QUICK], test) == expected


def test_files_of_a_folder_are_tried_and_else_the_examples(tmp_path: Path) -> None:
    names = [Path(name).name for name in candidates(tmp_path)]
    assert names == ["digits.tflite", "digits_quant.tflite"] and candidates(None) == candidates(tmp_path / "none")
    (tmp_path / "b.tflite").touch()
    (tmp_path / "a.tflite").touch()
    assert candidates(tmp_path) == [str(tmp_path / "a.tflite"), str(tmp_path / "b.tflite")]


@pytest.mark.parametrize(("device", "names"), [
    ("reference", ["digits.tflite", "digits_quant.tflite"]), ("sample-quant", ["digits_quant.tflite"]),
    ("sample-minimal", ["small:ADD float32"]),
])  # fmt: skip
def test_a_survey_finds_what_a_device_supports(client: nnfmq.Client, device: str, names: list[str]) -> None:
    found = survey(lambda: client.device(device), candidates(None))
    assert [Path(cost.name).name for cost in found] == names
    assert all(min(cost.prepare_s, cost.compile_s, cost.execute_s) > 0 for cost in found)


def test_a_model_that_fails_is_included_without_costs(client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise nnfmq.GeneralFailure("broken")

    monkeypatch.setattr(nnfmq.PreparedModel, "execute", fail)
    assert survey(lambda: client.device("reference"), SMALL_MODELS[:1]) == [ModelCost(SMALL_MODELS[0])]


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_small_models_add_or_rectify(client: nnfmq.Client, name: str) -> None:
    with client.device("reference").prepare(open_model(name)) as model:
        info = model.inputs[0]
        one, two = (np.full(4, info.zero_point + number, info.dtype) for number in (2, 4))
        expected = info.zero_point + (6 if "ADD" in name else 2)
        inputs = [one, two] if "ADD" in name else [one]
        assert model.execute(*inputs)[0].tolist() == [expected] * 4


def test_a_model_with_its_constants_in_a_file_computes_the_same(client: nnfmq.Client) -> None:
    loaded = hal_model(open_model(candidates(None)[0]))
    small = hal_model(open_model(SMALL_MODELS[0]))
    for model in (loaded, small):
        with tempfile.TemporaryFile() as file, with_constants_in_file(model, file) as mapped:
            operands = [operand for operand in mapped.main.operands if operand.lifetime is LifeTime.CONSTANT_COPY]
            assert operands == [] and len(mapped.pools) == len(model.pools) + 1 and not mapped.operand_values
            with (
                client.device("reference").prepare(mapped) as prepared,
                client.device("reference").prepare(model) as same,
            ):
                arrays = [np.ones(info.shape, info.dtype) for info in same.inputs]
                for one, other in zip(prepared.execute(*arrays), same.execute(*arrays), strict=True):
                    np.testing.assert_array_equal(one, other)


def test_a_model_without_small_constants_is_unchanged() -> None:
    model = hal_model(open_model("small:RELU float32"))
    with tempfile.TemporaryFile() as file, with_constants_in_file(model, file) as mapped:
        assert mapped is model
