"""The thread team's helpers would outlive the test that started them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nnfmq.engines.compiled.team import the_team


@pytest.fixture(autouse=True)
def _team_leaves() -> Iterator[None]:
    yield
    the_team().stop()
