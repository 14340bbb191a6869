"""The HAL's test models with the compiling engine: one of every eighth spec, with its variants.

`nnfmq conformance TESTS --path compiled` (or `--path burst --device compiled`) runs all of them, which takes long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from support import places

from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.cases import FAILED, run_test
from nnfmq.lab.conformance.runner import open_target
from nnfmq.lab.conformance.targets import ExecutionTarget

FOLDER = places.data_path() / "vts"
SPECS = sorted(FOLDER.glob("*/*.jsonl.gz"))


@pytest.fixture(
    params=[("compiled", ""), ("burst", "compiled")], ids=["in this process", "over a burst"], scope="module"
)
def target(request: pytest.FixtureRequest) -> Iterator[ExecutionTarget]:
    """Yield the execution target; one driver serves all tests."""
    path, device = request.param
    with closing(open_target(path, device, "embedded")) as opened:
        assert opened.feature_level  # connects now, so that the first test does not include the time it takes
        yield opened


@pytest.mark.skipif(not SPECS, reason=f"no test data in {FOLDER}; $NNFMQ_DATA can say where it is")
@pytest.mark.parametrize("first", range(0, 80, 8))
def test_test_models_pass_with_their_variants(first: int, target: ExecutionTarget) -> None:
    """Run every 80th spec from `first` on; the ten tests together run every eighth."""
    specs = SPECS[first::80]
    results = [run_test(testmodels.read(next(testmodels.lines(spec))[1]), target) for spec in specs]
    assert len(results) > 4
    bad = [(r.name, v.kind, v.reason) for r in results for v in r.outcomes if v.status == FAILED]
    assert bad == []
