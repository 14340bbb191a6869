"""Every test of libfmq has a counterpart on each core, and the report lists missing ones."""

from __future__ import annotations

import json

import libfmq_test_coverage
import pytest
from support.under_test import core_name

ONE_ROW = ["tests/x.py::test_BadQueueConfig_QueueSizeTooLarge[compiled-aidl-one_fd]"]


def test_every_test_of_libfmq_has_a_counterpart_on_each_core(capsys: pytest.CaptureFixture[str]) -> None:
    libfmq_test_coverage.main(["--json"])
    scores = [score for score in json.loads(capsys.readouterr().out) if score["core"] in ("python", core_name())]
    assert [score["missing"] for score in scores] == [[]] * len(scores)
    assert {score["table"]: (score["names"], score["instances"]) for score in scores} == {
        "fmq_unit_tests": (45, 135), "msgq_test_client": (34, 143), "later versions": (19, 76),
    }  # fmt: skip


def test_a_row_with_missing_instances_is_listed() -> None:
    score = libfmq_test_coverage.score("fmq_unit_tests", "compiled", libfmq_test_coverage.instances(ONE_ROW))
    assert "BadQueueConfig_QueueSizeTooLarge (1 of 4)" in score.missing
    assert (score.names, score.instances) == (0, 1)


def test_a_test_counts_only_for_its_core() -> None:
    found = libfmq_test_coverage.instances(ONE_ROW)
    assert libfmq_test_coverage.score("fmq_unit_tests", "python", found).instances == 0


def test_the_core_is_not_part_of_an_instance() -> None:
    both = [*ONE_ROW, ONE_ROW[0].replace("compiled", "python")]
    assert libfmq_test_coverage.instances(both) == {
        (core, "BadQueueConfig_QueueSizeTooLarge"): {"aidl-one_fd"} for core in ("compiled", "python")
    }
