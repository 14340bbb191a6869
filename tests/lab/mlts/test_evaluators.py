"""MLTS's metrics against numbers computed by hand, and the defects of MLTS's own program, which must not occur here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nnfmq.lab.mlts import scoring
from nnfmq.lab.mlts.models import Array, DataSet, InputSequence, ScoringModel

VALUES = 49  # of a frame
NO_NORMALIZATION = np.tile(np.float32([0, 1]), (4 * VALUES, 1))


def model(evaluator: str, expected_top1: float = 0.0) -> ScoringModel:
    return ScoringModel("test", "test", "group", evaluator=evaluator, expected_top1=expected_top1)


def frames(**values: float) -> Array:
    """Return two frames: `first` amplitude, `amplitudes` 2 to 40, `others`, `log_f0`, `voicing`."""
    frame = np.zeros((2, VALUES), np.float32)
    places = {"first": slice(0, 1), "amplitudes": slice(1, 40), "others": slice(40, 47), "log_f0": 47, "voicing": 48}
    for name, value in values.items():
        frame[:, places[name]] = value
    return frame


def test_the_rank_is_the_number_of_better_classes_and_of_equal_scores_the_first_is_better() -> None:
    scores = np.uint8([5, 9, 9, 1])
    assert [scoring.ranks([scores], [expected]) for expected in range(4)] == [[2], [0], [1], [3]]


def test_top_k_rates_are_shares_of_all_photos() -> None:
    found = scoring.top_k([0, 0, 1, 4, 5, 1000, 2, 0])
    assert found == {"top_1": 3 / 8, "top_2": 4 / 8, "top_3": 5 / 8, "top_4": 5 / 8, "top_5": 6 / 8}


@pytest.mark.parametrize(("losses", "gains", "is_worse"), [
    (0, 0, False), (4, 0, False),  # 1/16
    (5, 0, True),  # 1/32
    (6, 1, False),  # (7 + 1) / 128
    (8, 1, True),  # (9 + 1) / 512
    (3, 3, False), (0, 9, False),
])  # fmt: skip
def test_a_rate_is_worse_if_the_losses_exceed_the_gains_beyond_chance(losses: int, gains: int, is_worse: bool) -> None:
    found = [*[7] * losses, *[0] * gains, 0, 7]
    baseline = [*[0] * losses, *[7] * gains, 0, 7]
    assert scoring.worse_than(found, baseline, 1) is is_worse
    assert scoring.worse_than(found, baseline, 5) is is_worse
    assert not scoring.worse_than(found, baseline, 8)


@pytest.mark.parametrize(("expected", "errors"), [(0.55, 0), (0.56, 1)])
def test_top_1_may_be_five_points_below_the_expected_rate(expected: float, errors: int) -> None:
    photos = tuple(InputSequence((np.zeros(1),), expected_class=number % 2) for number in range(4))
    scores = [[np.float32([1, 0])]] * 4
    found = scoring.evaluate(model("top-k", expected), DataSet(photos), scores)
    assert found.metrics["top_1"] == 0.5 and len(found.errors) == errors
    assert found.ranks == (0, 1, 0, 1)


def test_the_largest_error_is_absolute() -> None:
    data = DataSet((InputSequence((np.zeros(1),), (np.uint8([10, 10, 10]),)),))
    found = scoring.evaluate(model(""), data, [[np.uint8([[7, 11, 10]])]])
    assert (found.max_error, found.mse, found.metrics) == (3.0, pytest.approx(10 / 3), {})


def test_the_distortion_is_a_root_mean_square_without_the_first_amplitude() -> None:
    golden = frames()
    assert scoring.mel_cep_distortion(frames(amplitudes=2), golden) == 2.0
    assert scoring.mel_cep_distortion(frames(first=9, others=9, log_f0=9, voicing=9), golden) == 0.0
    one = golden.copy()
    one[0, 1] = 3
    assert scoring.mel_cep_distortion(one, golden) == pytest.approx(3 / math.sqrt(2 * 39))


def test_log_f0_counts_frames_that_are_voiced_in_both() -> None:
    found, golden = frames(log_f0=1, voicing=1), frames(voicing=1)
    assert scoring.log_f0_error(found, golden) == 1.0
    found[0, 48], found[0, 47] = -1, 100
    assert scoring.log_f0_error(found, golden) == 1.0
    golden[1, 48] = 0
    assert scoring.log_f0_error(found, golden) == 0.0


@pytest.mark.parametrize(("values", "metric", "value"), [
    ({"amplitudes": 5.0}, "max_mel_cep_distortion", 5.0), ({"log_f0": 0.5}, "max_log_f0_error", 0.5),
])  # fmt: skip
def test_each_error_of_speech_has_its_own_name_and_limit(values: dict[str, float], metric: str, value: float) -> None:
    found, golden = (np.tile(frames(voicing=1, **more), (2, 1)).reshape(1, -1) for more in (values, {}))
    data = DataSet((InputSequence((np.zeros(1),), (golden[0],)),), NO_NORMALIZATION)
    accuracy = scoring.evaluate(model("mel-cep-log-f0"), data, [[found]])
    assert accuracy.metrics == {"max_mel_cep_distortion": 0.0, "max_log_f0_error": 0.0, metric: value}
    (error,) = accuracy.errors
    assert f"is {value:g}" in error


def test_outputs_are_compared_after_their_normalization_is_undone() -> None:
    found, golden = (np.tile(frames(amplitudes=value, voicing=1), (2, 1)).ravel() for value in (1.0, 0.0))
    deviations = NO_NORMALIZATION * np.float32([1, 3]) + np.float32([7, 0])
    data = DataSet((InputSequence((np.zeros(1),), (golden,)),), deviations)
    accuracy = scoring.evaluate(model("mel-cep-log-f0"), data, [[found]])
    assert accuracy.metrics["max_mel_cep_distortion"] == pytest.approx(3.0)
    assert accuracy.errors == () and accuracy.max_error == 1.0


def test_nan_exceeds_every_limit() -> None:
    found, golden = (np.tile(frames(amplitudes=value), (2, 1)).ravel() for value in (math.nan, 0.0))
    data = DataSet((InputSequence((np.zeros(1),), (golden,)),), NO_NORMALIZATION)
    assert len(scoring.evaluate(model("mel-cep-log-f0"), data, [[found]]).errors) == 1


def phones(*numbers: int) -> Array:
    return np.eye(8, dtype=np.float32)[list(numbers)]


@pytest.mark.parametrize(("found", "golden", "percent"), [
    ((1, 2, 3, 4), (1, 2, 3, 4), 0), ((1, 2, 3, 4), (1, 2, 7, 4), 25),
    ((1, 2, 3, 4), (2, 3, 4, 5), 50),  # an insertion and a deletion; four positions differ
])  # fmt: skip
def test_the_phone_error_rate_is_an_edit_distance(
    found: tuple[int, ...], golden: tuple[int, ...], percent: float
) -> None:
    assert scoring.phone_error_rate(phones(*found), phones(*golden)) == percent


def test_a_phone_error_rate_above_five_percent_is_an_error() -> None:
    golden = phones(*[1] * 20)
    data = DataSet((InputSequence(tuple(np.zeros((20, 1))), tuple(golden)),))
    for wrong, errors in ((1, 0), (2, 1)):
        outputs = [[row[np.newaxis] for row in phones(*[2] * wrong, *[1] * (20 - wrong))]]
        accuracy = scoring.evaluate(model("phone-error-rate"), data, outputs)
        assert accuracy.metrics == {"max_phone_error_rate": 5.0 * wrong} and len(accuracy.errors) == errors
