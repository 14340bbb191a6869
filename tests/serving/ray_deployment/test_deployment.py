"""Deployments of Ray Serve over drivers: in local testing mode, and on a cluster of one node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.ray_cluster import ray_report, require_ray

PROGRAMS = Path(__file__).parent


@pytest.fixture(scope="module")
def local() -> dict[str, Any]:
    """Return the report of a deployment without a cluster."""
    require_ray()
    return ray_report(PROGRAMS / "local_mode.py", limit_s=120)


def test_models_of_a_directory_and_of_bytes_are_served_without_a_cluster(local: dict[str, Any]) -> None:
    assert local["mapping"] == local["array"] == ["3", [3.0]]
    assert local["objects"] == ["7", [7.0]]
    assert local["concurrent"] == ["3"] * 20


def test_a_model_of_a_hosted_runtime_is_served_with_elements_of_64_bits(local: dict[str, Any]) -> None:
    assert local["hosted"] == [7, 2**40, 2**40 + 1]


def test_each_application_without_a_cluster_has_one_driver(local: dict[str, Any]) -> None:
    assert local["drivers"] == 2


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("unknown", "ModelNotFound", "'other'"),
        ("count", "InvalidArgument", "1 input (x), not 2"),
        ("nameless", "InvalidArgument", "names no model"),
        ("shape", "InvalidArgument", "has the shape"),
    ],
)
def test_errors_keep_their_class_and_text(local: dict[str, Any], case: str, kind: str, message: str) -> None:
    assert local[case][0] == kind
    assert message in local[case][1]


@pytest.fixture(scope="module")
def node() -> dict[str, Any]:
    """Return the report of deployments on one node."""
    require_ray()
    return ray_report(PROGRAMS / "one_node.py", limit_s=240)


@pytest.mark.full
def test_arrays_object_refs_and_multiplexed_ids_reach_the_models_of_the_object_store(node: dict[str, Any]) -> None:
    handle = node["handle"]
    assert handle["mapping"] == handle["object"] == ["1", [1.0]]
    assert handle["multiplexed"] == [["1", [2.0]], ["1", [1.0]]]
    assert handle["index"] == ["adder", "other"]
    assert handle["load"] == ["driver_executing", "executing", "lanes", "waiting"]


@pytest.mark.full
def test_errors_are_both_those_of_ray_and_those_of_nnfmq(node: dict[str, Any]) -> None:
    assert node["handle"]["unknown"] == ["RayTaskError", "RayError", "ModelNotFound"]
    assert "InvalidArgument" in node["handle"]["config"]


@pytest.mark.full
def test_the_proxies_speak_the_open_inference_protocol(node: dict[str, Any]) -> None:
    assert node["http"] == {"version": "1", "data": [1.0], "missing": 404, "ready": 200}
    assert node["grpc"] == {"live": True, "versions": ["1"], "missing": "NOT_FOUND"}


@pytest.mark.full
@pytest.mark.parametrize("killed", ["worker", "actor"])
def test_requests_are_answered_again_after_a_part_of_the_driver_is_killed(node: dict[str, Any], killed: str) -> None:
    report = node[killed]
    assert report["answered"] == 10
    assert all({"DeadObject", "DeviceUnavailable"} & set(error) for error in report["errors"])  # in flight, or later


@pytest.mark.full
def test_overload_is_an_error_of_ray_over_handles_and_429_over_http_and_costs_no_other_request(
    node: dict[str, Any],
) -> None:
    report = node["overload"]
    assert (report["first"], report["rejected"], report["status"]) == (["1", [1.0]], ["BackPressureError"], 429)
    assert report["completed"] in (1, 2)  # that Ray had given to the replica, or that waited


@pytest.mark.full
def test_requests_that_wait_for_a_burst_start_another_replica(node: dict[str, Any]) -> None:
    assert node["replicas"] == [1, 2]


@pytest.mark.full
def test_an_actor_that_is_started_again_keeps_the_driver_for_the_clients_that_it_had(node: dict[str, Any]) -> None:
    assert node["unused"] == {"kept": True, "driver": True}
