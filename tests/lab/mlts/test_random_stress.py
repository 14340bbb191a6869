"""Random graphs of crash tests: each outcome of MLTS, and when the search ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nnfmq
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.mlts import crash_client
from nnfmq.lab.mlts.crash_client import GraphFailed, WorkloadContext, run_random_graphs
from nnfmq.lab.mlts.crash_tests import ClientTask, GraphSize, Workload


@pytest.fixture(scope="module")
def client() -> Iterator[nnfmq.Client]:
    with nnfmq.connect(embedded=True) as made:
        yield made


def context(client: nnfmq.Client, device: str = "reference", dump_to: str = "") -> WorkloadContext:
    graphs = GraphSize(4, 10, count=2)
    return WorkloadContext(
        ClientTask("", device, Workload.RANDOM_INFERENCE, 60.0, graphs=graphs, dump_to=dump_to), client
    )


def fail(*_: object, **__: object) -> Any:
    raise nnfmq.GeneralFailure("broken")


def test_graphs_are_prepared_and_executed(client: nnfmq.Client) -> None:
    run = context(client)
    run_random_graphs(run, 0)
    assert run.codes == {"success": 2}


def test_the_graphs_of_two_threads_differ(client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(crash_client, "generate", lambda _class, seed: seeds.append(seed) or fail())
    for worker in (0, 1):
        run_random_graphs(context(client), worker)
    assert len(set(seeds)) == 4


def test_graphs_that_a_device_does_not_support_count_as_such(client: nnfmq.Client) -> None:
    run = context(client, "sample-minimal")
    run_random_graphs(run, 0)
    assert run.codes == {"unsupported model": 2}


def test_graphs_that_cannot_be_generated_count_as_such(client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_client, "generate", fail)
    run = context(client)
    run_random_graphs(run, 0)
    assert run.codes == {"invalid model generated": 2}


@pytest.mark.parametrize(("kind", "method", "outcome"), [
    (nnfmq.Device, "prepare", "failed compilation"), (nnfmq.PreparedModel, "execute", "failed execution"),
    (nnfmq.Device, "supported_operations", "other API failure"),
])  # fmt: skip
def test_a_failure_names_its_outcome_and_dumps_the_graph(
    client: nnfmq.Client, kind: type, method: str, outcome: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kind, method, fail)
    with pytest.raises(GraphFailed, match=f"{outcome}: broken; the graph is in {tmp_path}"):
        run_random_graphs(context(client, dump_to=str(tmp_path)), 0)
    (path,) = tmp_path.iterdir()
    ((_, line),) = testmodels.lines(path)
    assert len(testmodels.read(line).model.main.operations) == 4


def test_without_a_folder_nothing_is_dumped(client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnfmq.Device, "prepare", fail)
    with pytest.raises(GraphFailed, match=r"^failed compilation: broken$"):
        run_random_graphs(context(client), 0)


def test_the_search_ends_if_no_graph_is_supported_for_long(
    client: nnfmq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 31.0)
    monkeypatch.setattr(crash_client.time, "monotonic", lambda: next(clock))
    run = context(client, "sample-minimal")
    run_random_graphs(run, 0)
    assert run.codes == {"unsupported model": 1}


def test_a_dead_driver_is_no_failure_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    with nnfmq.connect(embedded=True, recover=False) as client:
        run = context(client)
        monkeypatch.setattr(crash_client, "generate", lambda *_: client._process.kill() or testmodel())  # type: ignore[union-attr]
        with pytest.raises(nnfmq.DeadObject):
            run_random_graphs(run, 0)


def testmodel() -> testmodels.Line:
    from nnfmq.lab.conformance.random_graphs import generate

    return generate(crash_client.class_of(GraphSize(1, 10)), 0)


testmodel.__test__ = False  # type: ignore[attr-defined]
