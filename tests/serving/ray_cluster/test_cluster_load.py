"""The evaluation of the requests to a cluster: what is lost, wrong or late, and how long it took."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.cluster_load import SIZE, Array, Attempt, ClusterEvent, ClusterLoad, summary, version_model

import nnfmq

S = 10**9


def attempts(*found: tuple[int, float, float, str, int]) -> list[Attempt]:
    return [Attempt(number, int(begin * S), int(end * S), *rest) for number, begin, end, *rest in found]


def test_a_request_that_was_answered_at_the_second_attempt_is_not_lost() -> None:
    events = [ClusterEvent("driver", 2 * S, 3 * S), ClusterEvent("node", 10 * S, 14 * S)]
    report = summary(
        attempts(
            (0, 0, 1, "", 1),
            (1, 1.5, 2.5, "DeadObject", 0),  # in flight when the driver was killed
            (2, 2.25, 2.75, "DeadObject", 0),  # sent after it
            (1, 3, 3.5, "", 1),
            (2, 3, 4, "", 1),
            (3, 9, 11, "ActorDiedError", 0),
            (3, 11, 13, "", 2),
        ),
        events,
    )
    driver, node = report.pop("events")
    assert report == {
        "requests": 4, "answers": 4, "lost": [], "wrong": [], "answered_twice": [], "failed_before_all_events": 0,
    }  # fmt: skip
    assert driver == {
        "event": "driver", "failures": {"DeadObject": 2}, "late": 1, "recovery_s": 0.75, "pause_s": 1.5,
        "longest_s": 1.0, "restored_s": 1.0, "answers_by_version": {"1": 2},
    }  # fmt: skip
    assert (node["failures"], node["late"], node["recovery_s"]) == ({"ActorDiedError": 1}, 0, 1.0)
    assert (node["pause_s"], node["restored_s"], node["answers_by_version"]) == (3.0, 4.0, {"2": 1})


def test_lost_wrong_and_repeated_answers_are_found() -> None:
    found = attempts((0, 0, 1, "TimeoutError", 0), (1, 0, 1, "", 1), (1, 1, 2, "", 1), (2, 0, 1, "DeadObject", 0))
    found.append(Attempt(3, 0, S, "", 1, is_wrong=True))
    report = summary(found, [ClusterEvent("node", 3 * S, 4 * S)])
    assert (report["requests"], report["answers"]) == (4, 2)
    assert (report["lost"], report["wrong"], report["answered_twice"]) == ([0, 2], [3], [1])
    assert report["failed_before_all_events"] == 2
    assert report["events"][0]["recovery_s"] == 0


def run(call: Any, retryable: tuple[type[Exception], ...] = ()) -> list[Attempt]:
    """Return the attempts of the first requests of one thread."""
    load = ClusterLoad(call, retryable, 1, 0.0)
    load.start()
    while len(load.attempts) < 4:
        pass
    assert load.finish(10.0)
    return load.attempts


def test_an_answer_of_another_version_than_its_reply_names_is_wrong() -> None:
    answers = iter([1, 2] * 100_000)

    def call(source: Array) -> tuple[int, Array]:
        return 1, source + next(answers)

    assert [attempt.is_wrong for attempt in run(call)[:4]] == [False, True, False, True]


def test_a_request_is_sent_again_only_after_an_error_that_allows_it() -> None:
    numbers = iter(range(10**6))

    def call(source: Array) -> tuple[int, Array]:
        number = next(numbers)
        if number == 0:
            raise ConnectionError
        if number == 2:
            raise ValueError
        return 1, source + 1

    found = [(each.request, each.error) for each in run(call, (ConnectionError,))[:4]]
    assert found == [
        (0, "ConnectionError"),
        (0, ""),
        (1, "ValueError"),
        (2, ""),
    ]


def test_the_model_adds_its_version() -> None:
    source = np.arange(SIZE, dtype=np.float32).reshape(1, SIZE)
    with nnfmq.connect() as client, client.prepare(nnfmq.load(version_model(3))) as model:
        (output,) = model.execute(source)
    assert (output == source + 3).all()
