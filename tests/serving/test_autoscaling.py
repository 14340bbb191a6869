"""The policy for Ray's autoscaling, and the load that replicas report for it. Nothing here needs Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import nnfmq
from nnfmq.serving.ray.autoscaling import DriverLoad, load_policy, load_since


def wanted(requests: float, metrics: dict[str, dict[str, float]] | None, target: float = 4.0) -> float:
    """Return what the policy wants for ongoing requests and the metrics of replicas."""
    config = SimpleNamespace(get_target_ongoing_requests=lambda: target)
    context: Any = SimpleNamespace(total_num_requests=requests, aggregated_metrics=metrics, config=config)
    replicas, state = load_policy(context)
    assert state == {}
    return replicas


def metrics(*replicas: tuple[float, float, float]) -> dict[str, dict[str, float]]:
    """Return the metrics of replicas: waiting, executing and lanes of each."""
    names = ("waiting", "executing", "lanes")
    return {name: {str(i): replica[j] for i, replica in enumerate(replicas)} for j, name in enumerate(names)}


def test_without_metrics_ongoing_requests_decide() -> None:
    assert [wanted(requests, None) for requests in (0, 1, 4, 5, 17)] == [0, 1, 1, 2, 5]


def test_requests_that_wait_for_bursts_ask_for_more_replicas() -> None:
    assert wanted(1, metrics((6, 2, 2), (2, 2, 2))) == 6
    assert wanted(1, metrics((0, 0.5, 2), (0, 0.5, 2))) == 1


def test_the_larger_number_counts() -> None:
    assert wanted(40, metrics((0, 1, 2))) == 10
    assert wanted(4, metrics((10, 2, 2))) == 6


def test_replicas_without_bursts_and_with_missing_metrics_count_as_unused() -> None:
    assert wanted(0, {"lanes": {"a": 0.0, "b": 2.0}, "waiting": {"a": 9.0}}) == 0


def test_the_load_is_the_time_of_executions_by_the_time_between_two_reports() -> None:
    before, now = DriverLoad(1_000, 500, 700), DriverLoad(3_000, 1_500, 3_700)
    assert load_since(before, now) == {"executing": 0.5, "driver_executing": 1.5}


def test_a_driver_that_was_started_again_has_no_load_yet() -> None:
    assert load_since(DriverLoad(1_000, 500, 700), DriverLoad(1_000, 0, 0)) == {"executing": 0, "driver_executing": 0}


def test_the_sums_of_a_driver_are_those_of_its_statistics(client: nnfmq.Client) -> None:
    import numpy as np

    with client.device("reference").prepare(nnfmq.load(nnfmq.example_path("digits.tflite"))) as model:
        model.execute(np.zeros((1, 8, 8, 1), np.float32))
        statistics = client.statistics()
    (own,) = (each for each in statistics.clients if each.worker_pid == client.worker_pid)
    load = DriverLoad.of(statistics, client.worker_pid)
    assert load.own_ns == sum(each.counts.driver_ns for each in own.models) > 0
    assert load.all_ns >= load.own_ns
    assert DriverLoad.of(statistics, 1).own_ns == 0
