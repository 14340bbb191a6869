"""Triton's clients, unchanged, at the HTTP and gRPC proxies of Ray Serve, and what overloaded proxies reply."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.ray_cluster import ray_report, require_ray


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Return what the clients saw."""
    require_ray()
    if find_spec("tritonclient") is None:
        pytest.skip("tritonclient[http,grpc] is not installed")
    return ray_report(Path(__file__).with_name("ray_proxies.py"), limit_s=240)


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_pass_through_the_proxies_unchanged(report: dict[str, Any], protocol: str) -> None:
    seen = report[protocol]
    assert (seen["live"], seen["ready"], seen["sum"]) == (True, [True, True, False], [[1, 2, 3], [4, 5, 6]])


@pytest.mark.full
@pytest.mark.parametrize(
    ("protocol", "statuses"),
    [("http", ["404", "503"]), ("grpc", ["StatusCode.NOT_FOUND", "StatusCode.UNAVAILABLE"])],
)
def test_errors_of_a_replica_keep_their_status(report: dict[str, Any], protocol: str, statuses: list[str]) -> None:
    assert report[protocol]["errors"] == statuses


@pytest.mark.full
@pytest.mark.parametrize(("protocol", "status"), [("http", "429"), ("grpc", "StatusCode.RESOURCE_EXHAUSTED")])
def test_requests_beyond_the_proxies_queue_are_refused(report: dict[str, Any], protocol: str, status: str) -> None:
    statuses = report[protocol]["overload"]
    assert set(statuses) == {"OK", status}
    assert 1 <= statuses.count("OK") <= 2
