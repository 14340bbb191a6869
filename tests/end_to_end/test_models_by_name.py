"""Models that a client opens by name, over a driver's workers and a model repository that the test controls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.drivers import Daemon, one, until
from support.fake_repository import FakeRepository, serving
from support.models import plus_model

import nnfmq
from nnfmq.serialize.repository_protocol import ModelState


@pytest.fixture
def repository(daemon: Daemon) -> Iterator[FakeRepository]:
    with serving(daemon) as repository:
        repository.publish("plus", 1, plus_model(1))
        yield repository


def test_a_model_is_opened_by_name_and_executes(repository: FakeRepository, client: nnfmq.Client) -> None:
    with client.model("plus") as model, model.burst() as burst:
        assert (model.name, model.version, model.batch, model.device) == ("plus", 1, 1, "reference")
        assert model.execute(one(5)) == burst.execute(one(6)) - one(1) == one(6)
        assert burst.version == 1


def test_the_models_are_listed_by_name(repository: FakeRepository, client: nnfmq.Client) -> None:
    repository.publish("add", 7, plus_model(7))
    entries = client.models()
    assert [(entry.name, entry.version, entry.state) for entry in entries] == [
        ("add", 7, ModelState.READY), ("plus", 1, ModelState.READY),
    ]  # fmt: skip


def test_an_unknown_model_is_an_error_that_lists_the_models(repository: FakeRepository, client: nnfmq.Client) -> None:
    with pytest.raises(nnfmq.ModelNotFound, match="no model 'minus' in the model repository; it has: plus"):
        client.model("minus")
    with pytest.raises(nnfmq.ModelNotFound, match=r"model 'plus' has no version 3 .* it has \[1\]"):
        client.model("plus", 3)


def test_a_model_moves_to_a_new_version(repository: FakeRepository, client: nnfmq.Client) -> None:
    with client.model("plus") as model, model.burst() as burst:
        assert burst.execute(one(5)) == (one(6),)
        repository.publish("plus", 2, plus_model(2))
        until(lambda: model.version == 2, "the model moves")
        assert burst.version == 1
        assert burst.execute(one(5)) == (one(7),)
        assert burst.version == 2
        assert model.execute(one(5)) == (one(7),)
