"""Photos through the quantized MobileNet, preprocessed as MLTS does: classes and scores match LiteRT's.

MLTS evaluates classification by the share of photos whose label is the best class (top 1), or one of the best five. A
usual run takes every fifth photo; `pytest --all-photos` takes all 300.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.both_runners import Theirs, ours

from nnfmq.media.images import read_image

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
pytest.importorskip("PIL", reason="Pillow is not installed")

Array = npt.NDArray[Any]

COUNT, STEP = 300, 5
SHAPE = (1, 128, 128, 3)


@pytest.fixture(scope="module")
def folder(data_dir: Path) -> Path:
    return data_dir / "models" / "image_classification"


@pytest.fixture(scope="module")
def numbers(request: pytest.FixtureRequest) -> range:
    return range(0, COUNT, 1 if request.config.getoption("--all-photos") else STEP)


@pytest.fixture(scope="module")
def scores(folder: Path, numbers: range) -> tuple[Array, Array]:
    """The interpreter's scores and LiteRT's, each (photos, classes)."""
    content = (folder.parent / "mobilenet_v1_0.25_128_quant.tflite").read_bytes()
    interpreted, litert = ours(content), Theirs(content)
    photos = [read_image(folder / f"image-{number}.jpeg", SHAPE, np.dtype(np.uint8)) for number in numbers]
    return np.concatenate([interpreted([photo])[0] for photo in photos]), np.concatenate(
        [litert([photo])[0] for photo in photos]
    )


@pytest.fixture(scope="module")
def truth(folder: Path, numbers: range) -> Array:
    """The class of each photo."""
    names = (folder / "labels.txt").read_text().splitlines()
    labels = (folder / "ground_truth_labels.txt").read_text().splitlines()
    return np.array([names.index(labels[number]) for number in numbers])


def best(scores: Array, count: int) -> Array:
    """Return the `count` best classes of each photo, best first, equal ones by number."""
    return (-scores.astype(int)).argsort(axis=1, kind="stable")[:, :count]


@pytest.mark.parametrize("count", [1, 5])
def test_the_best_classes_of_photos_match_litert(scores: tuple[Array, Array], count: int) -> None:
    interpreted, litert = scores
    np.testing.assert_array_equal(best(interpreted, count), best(litert, count))


def test_every_score_matches_litert(scores: tuple[Array, Array]) -> None:
    np.testing.assert_array_equal(*scores)


@pytest.mark.parametrize("count", [1, 5])
def test_as_many_photos_are_recognized_as_by_litert(scores: tuple[Array, Array], truth: Array, count: int) -> None:
    interpreted, litert = (np.count_nonzero((best(s, count) == truth[:, np.newaxis]).any(axis=1)) for s in scores)
    assert interpreted == litert
    assert interpreted > len(truth) / 4  # of 1,001 classes: the photos are preprocessed correctly
