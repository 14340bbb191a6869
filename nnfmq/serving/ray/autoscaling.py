"""Autoscaling by the load of replicas: a policy for Ray Serve, and the metrics that replicas report for it.

Ray's own policy counts requests that a replica has not completed. It cannot see whether the driver executes them or
they wait for a burst, and how long they take. Each replica reports, every few seconds:

    waiting           requests that wait for a burst
    lanes             bursts of its models that are in use, at least those of one model
    executing         executions of this replica that ran at a time in its driver, on average since the last report
    driver_executing  the same of all clients of that driver
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from nnfmq.observe.driver_statistics import DriverStatistics

__all__ = ["DriverLoad", "load_policy", "load_since"]


class DriverLoad(NamedTuple):
    """The executions of a driver's clients until `read_ns`: the time in the driver of one worker's, and of all."""

    read_ns: int
    own_ns: int
    all_ns: int

    @classmethod
    def of(cls, statistics: DriverStatistics, worker_pid: int) -> DriverLoad:
        """Return the sums of a driver's statistics. `worker_pid` is the worker of this client."""
        sums = {
            client.worker_pid: sum(model.counts.driver_ns for model in client.models) for client in statistics.clients
        }
        return cls(statistics.read_ns, sums.get(worker_pid, 0), sum(sums.values()))


def load_since(before: DriverLoad, now: DriverLoad) -> dict[str, float]:
    """Return how many executions ran at a time between two points, on average; 0 if a sum has restarted."""
    elapsed_ns = max(now.read_ns - before.read_ns, 1)
    return {
        "executing": max(0.0, (now.own_ns - before.own_ns) / elapsed_ns),
        "driver_executing": max(0.0, (now.all_ns - before.all_ns) / elapsed_ns),
    }


def load_policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas with which no request waits for a burst and each replica is used as configured.

    A policy of Ray Serve: `AutoscalingConfig(policy=AutoscalingPolicy(policy_function=load_policy))`. `context` is
    Ray's AutoscalingContext. Ray applies the limits, factors and delays of the configuration. The larger of two counts:
    Ray's, ongoing requests by `target_ongoing_requests`; and executions and waiting requests by bursts.
    """
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    executing, waiting = metrics.get("executing", {}), metrics.get("waiting", {})
    loads = [
        (executing.get(replica, 0.0) + waiting.get(replica, 0.0)) / lanes
        for replica, lanes in metrics.get("lanes", {}).items()
        if lanes > 0
    ]
    by_requests = context.total_num_requests / context.config.get_target_ongoing_requests()
    return float(math.ceil(max(by_requests, sum(loads)))), {}
