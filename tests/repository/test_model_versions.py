"""Which version is served and which is loaded next, for every order of events. No files, no processes."""

from __future__ import annotations

import pytest

from nnfmq.repository.models import FileState, VersionState
from nnfmq.repository.repository import CRASHES_MAX, PAUSE_MAX_S, LoadFailure, ModelVersions
from nnfmq.serialize.repository_protocol import ModelState

NOW = 1_000_000.0  # seconds since the epoch
WRONG, CRASH, SHORTAGE = LoadFailure.WRONG, LoadFailure.CRASH, LoadFailure.SHORTAGE


def files(content: int = 0, age_s: float = 3600.0) -> VersionState:
    """Return the state of a version with one file, last changed `age_s` before NOW."""
    return VersionState((FileState("model.tflite", 7, 100, content),), NOW - age_s)


def model(*versions: int) -> ModelVersions:
    """Return a model whose versions have been there for long."""
    made = ModelVersions("m")
    made.look({version: files() for version in versions}, NOW)
    return made


def serve(versions: ModelVersions, number: int) -> None:
    state = versions.state_of(number)
    assert state is not None
    versions.on_loaded(number, state, "compiled", NOW)


def fail(versions: ModelVersions, number: int, failure: LoadFailure = WRONG, now_s: float = 0.0) -> bool:
    state = versions.state_of(number)
    assert state is not None
    return versions.on_failure(number, state, failure, f"reason {number}", now_s)


def test_the_newest_version_is_loaded_first_and_only_it() -> None:
    versions = model(1, 3, 2)
    assert versions.next_load(0) == 3
    serve(versions, 3)
    assert (versions.next_load(0), versions.served_version) == (0, 3)


def test_a_version_is_loaded_once_its_files_did_not_change_between_two_looks() -> None:
    versions = ModelVersions("m")
    versions.look({1: files(1, age_s=0.5)}, NOW)
    assert versions.next_load(0) == 0
    versions.look({1: files(2, age_s=0.1)}, NOW)
    assert versions.next_load(0) == 0
    versions.look({1: files(2, age_s=0.1)}, NOW)
    assert versions.next_load(0) == 1


def test_files_of_the_future_need_two_looks() -> None:
    versions = ModelVersions("m")
    versions.look({1: files(1, age_s=-100)}, NOW)
    assert versions.next_load(0) == 0


def test_a_broken_version_leaves_the_old_one_and_is_loaded_again_when_its_files_have_changed() -> None:
    versions = model(1)
    serve(versions, 1)
    versions.look({1: files(), 2: files()}, NOW)
    assert versions.next_load(0) == 2
    assert fail(versions, 2)
    assert versions.next_load(10_000) == 0
    entry = versions.entry()
    assert (entry.state, entry.version, entry.failed_version, entry.reason) == (ModelState.READY, 1, 2, "reason 2")
    versions.look({1: files(), 2: files(5)}, NOW)
    assert versions.next_load(0) == 2
    assert (versions.entry().failed_version, versions.entry().reason) == (0, "")


def test_an_older_version_is_served_if_the_newer_ones_fail() -> None:
    versions = model(1, 2, 3)
    fail(versions, 3)
    assert versions.next_load(0) == 2
    fail(versions, 2)
    assert versions.next_load(0) == 1
    serve(versions, 1)
    assert versions.entry().failed_version == 3


def test_a_failed_version_that_is_older_than_the_served_one_is_not_mentioned() -> None:
    versions = model(1)
    fail(versions, 1)
    versions.look({1: files(), 2: files()}, NOW)
    serve(versions, 2)
    assert (versions.entry().failed_version, versions.entry().reason) == (0, "")


def test_a_version_that_kills_its_process_is_tried_three_times_with_growing_pauses() -> None:
    versions = model(1)
    assert CRASHES_MAX == 3
    assert not fail(versions, 1, CRASH, now_s=100)
    assert (versions.next_load(100.9), versions.next_load(101)) == (0, 1)
    assert not fail(versions, 1, CRASH, now_s=101)
    assert (versions.next_load(102.9), versions.next_load(103)) == (0, 1)
    assert fail(versions, 1, CRASH, now_s=103)
    assert versions.next_load(1e9) == 0
    assert versions.entry().state is ModelState.UNAVAILABLE


def test_a_shortage_is_tried_again_for_ever() -> None:
    versions = model(1)
    for _ in range(20):
        assert not fail(versions, 1, SHORTAGE, now_s=100)
    assert (versions.next_load(100 + PAUSE_MAX_S - 1), versions.next_load(100 + PAUSE_MAX_S)) == (0, 1)
    assert (versions.entry().state, versions.entry().failed_version) == (ModelState.LOADING, 1)


def test_while_a_newer_version_waits_for_its_next_attempt_an_older_one_is_loaded() -> None:
    versions = model(1, 2)
    fail(versions, 2, SHORTAGE, now_s=100)
    assert versions.next_load(100) == 1
    serve(versions, 1)
    assert (versions.next_load(100), versions.next_load(101)) == (0, 2)


def test_versions_that_are_being_loaded_are_not_loaded_again() -> None:
    assert model(1, 2).next_load(0, [2]) == 1


def test_the_end_of_a_load_is_ignored_if_the_files_have_changed_since() -> None:
    versions = model(1)
    assert not versions.on_failure(1, files(9), WRONG, "reason", 0)
    assert not versions.on_failure(5, files(), WRONG, "reason", 0)
    assert versions.entry().reason == ""
    assert versions.next_load(0) == 1


def test_a_removed_version_is_served_until_an_older_one_takes_its_place() -> None:
    versions = model(1, 2)
    serve(versions, 2)
    versions.look({1: files()}, NOW)
    assert not versions.withdraw()
    assert (versions.served_version, versions.next_load(0)) == (2, 1)
    assert versions.is_wanted(1)
    serve(versions, 1)
    assert (versions.served_version, versions.next_load(0)) == (1, 0)


@pytest.mark.parametrize("found", [{}, {1: files()}])
def test_a_removed_version_that_nothing_can_replace_is_withdrawn(found: dict[int, VersionState]) -> None:
    versions = model(1, 2)
    fail(versions, 1)
    serve(versions, 2)
    versions.look(found, NOW)
    assert versions.withdraw()
    assert not versions.withdraw()
    assert (versions.served_version, versions.entry().state) == (0, ModelState.UNAVAILABLE)
    assert not versions.is_gone


def test_a_model_is_gone_with_its_directory_once_it_is_withdrawn() -> None:
    versions = model(1)
    serve(versions, 1)
    versions.look(None, NOW)
    assert not versions.is_gone
    assert versions.withdraw()
    assert versions.is_gone


def test_a_changed_version_is_loaded_again_and_serves_its_old_content_until_then() -> None:
    versions = model(1, 2)
    serve(versions, 2)
    versions.look({1: files(), 2: files(4)}, NOW)
    assert versions.next_load(0) == 2
    fail(versions, 2)
    entry = versions.entry()
    assert (versions.next_load(0), entry.version, entry.failed_version) == (0, 2, 2)


def test_an_older_version_that_is_ready_late_does_not_replace_a_newer_one() -> None:
    versions = model(1, 2)
    serve(versions, 2)
    assert not versions.is_wanted(1)
    assert not versions.is_wanted(2)


def test_a_model_without_versions_says_so() -> None:
    entry = model().entry()
    assert (entry.state, entry.version, entry.failed_version) == (ModelState.UNAVAILABLE, 0, 0)
    assert entry.reason == "there is no version of it"


def test_a_long_reason_is_cut() -> None:
    versions = model(1)
    versions.on_failure(1, files(), WRONG, "r" * 5000, 0)
    assert versions.entry().reason == "r" * 1000
