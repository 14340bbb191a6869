"""Arguments in the forms that applications have: paths of model files, names, arrays without a batch dimension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnfmq
from nnfmq import ExecutionPreference
from nnfmq.cli.inputs import read_input
from nnfmq.client.connection.prepare_arguments import to_preference
from nnfmq.hal.types import Priority

DIGITS = nnfmq.example_path("digits.tflite")
DIGIT = np.load(nnfmq.example_path("digits.npz"))["images"][0].astype(np.float32).reshape(1, 8, 8, 1) / 16


@pytest.mark.parametrize("form", [Path, str])
def test_a_device_prepares_the_model_of_a_file(device: nnfmq.Device, form: type) -> None:
    with device.prepare(nnfmq.load(DIGITS)) as loaded, device.prepare(form(DIGITS)) as model:
        assert (model.inputs, model.outputs) == (loaded.inputs, loaded.outputs)
        np.testing.assert_array_equal(model.execute(DIGIT)[0], loaded.execute(DIGIT)[0])
    assert all(device.supported_operations(form(DIGITS)))


def test_a_client_prepares_the_model_of_a_file(client: nnfmq.Client) -> None:
    with client.prepare(DIGITS) as model:
        assert model.execute(DIGIT)[0].shape == (1, 10)


def test_a_model_file_that_cannot_be_read_is_an_os_error(device: nnfmq.Device, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        device.prepare(tmp_path / "absent.tflite")


def test_a_file_that_is_no_model_is_rejected_by_its_name(device: nnfmq.Device, tmp_path: Path) -> None:
    (tmp_path / "empty.tflite").touch()
    with pytest.raises(nnfmq.InvalidArgument, match=r"empty\.tflite: this is an empty file"):
        device.prepare(tmp_path / "empty.tflite")


def test_a_preference_has_a_name(device: nnfmq.Device) -> None:
    assert to_preference("low_power") is ExecutionPreference.LOW_POWER
    assert to_preference("fast_single_answer") is ExecutionPreference.FAST_SINGLE_ANSWER
    assert to_preference("SUSTAINED_SPEED") is ExecutionPreference.SUSTAINED_SPEED
    with device.prepare(DIGITS, preference="sustained_speed") as model:
        assert model.execute(DIGIT)[0].shape == (1, 10)


@pytest.mark.parametrize("preference", ["fastest", "sustained speed", "", 3, None, []])
def test_an_unknown_preference_is_rejected_with_the_allowed_names(device: nnfmq.Device, preference: Any) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="allowed are 'low_power', 'fast_single_answer', 'sustained_speed'"):
        device.prepare(DIGITS, preference=preference)


@pytest.mark.parametrize("word", ["low", "medium", "HIGH", Priority.HIGH])
def test_a_priority_has_a_name(device: nnfmq.Device, word: Any) -> None:
    with device.prepare(DIGITS, priority=word) as model:
        assert model.execute(DIGIT)[0].shape == (1, 10)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"priority": "hihg"}, "priority 'hihg': allowed are 'low', 'medium', 'high'; did you mean 'high'?"),
        ({"priority": 7}, "priority 7: allowed are 'low', 'medium', 'high'"),
        ({"preference": "lowpower"}, "preference 'lowpower': allowed are .*; did you mean 'low_power'?"),
    ],
)
def test_a_wrong_word_is_rejected_with_the_nearest(client: nnfmq.Client, wrong: Any, said: str) -> None:
    for prepare in (client.prepare, client.device("reference").prepare):
        with pytest.raises(nnfmq.InvalidArgument, match=said.replace("?", r"\?") + "$"):
            prepare(DIGITS, **wrong)


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_the_content_of_a_file_is_prepared(client: nnfmq.Client, form: type) -> None:
    with client.prepare(form(DIGITS.read_bytes())) as model, client.prepare(DIGITS) as same:
        np.testing.assert_array_equal(model(DIGIT)[0], same(DIGIT)[0])


def test_a_file_gets_its_shapes_and_a_signature_when_it_is_prepared(client: nnfmq.Client) -> None:
    with client.prepare(DIGITS, shapes={"image": (3, 8, 8, 1)}) as model:
        (scores,) = model(np.repeat(DIGIT, 3, axis=0))
        assert scores.shape == (3, 10)
    with pytest.raises(nnfmq.InvalidArgument, match="signature"):
        client.prepare(DIGITS, signature="none such")
    with pytest.raises(nnfmq.InvalidArgument, match=r"LoadedModel, which is loaded already: give them to nnfmq\.load"):
        client.prepare(nnfmq.load(DIGITS), shapes={"image": (3, 8, 8, 1)})


def test_every_execution_mode_and_the_command_add_a_missing_batch_dimension(
    device: nnfmq.Device, tmp_path: Path
) -> None:
    image = DIGIT[0]
    np.save(tmp_path / "image.npy", image)
    from_file = read_input(tmp_path / "image.npy", DIGIT.shape, DIGIT.dtype)
    np.testing.assert_array_equal(from_file, DIGIT)
    with device.prepare(DIGITS) as model:
        (expected,) = model.execute(DIGIT)
        with model.burst() as burst, model.create_reusable_execution() as execution:
            with model.execute_fenced(image) as fenced:
                (after_fences,) = fenced.result(timeout=30)
            results = [
                model.execute(image),
                model.execute_async(image).result(timeout=30),
                burst.execute(image),
                execution.compute(image),
                (after_fences,),
            ]
    for (scores,) in results:
        np.testing.assert_array_equal(scores, expected)


@pytest.mark.parametrize("shape", [(8, 8), (8, 1), (2, 8, 8, 1), (7, 8, 1), (1, 1, 8, 8, 1)])
def test_no_other_dimension_is_added_or_removed(device: nnfmq.Device, tmp_path: Path, shape: tuple[int, ...]) -> None:
    image = np.zeros(shape, np.float32)
    np.save(tmp_path / "image.npy", image)
    with pytest.raises(nnfmq.InvalidArgument, match="the input needs 1x8x8x1"):
        read_input(tmp_path / "image.npy", DIGIT.shape, DIGIT.dtype)
    with device.prepare(DIGITS) as model, model.burst() as burst:
        for execute in (model.execute, burst.execute):
            with pytest.raises(nnfmq.InvalidArgument, match="has shape 1x8x8x1"):
                execute(image)
