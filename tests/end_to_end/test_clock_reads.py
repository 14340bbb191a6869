"""TIM-8 in a driver process: an execution that is not measured reads the clock no more often than one that is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, Daemon, one, running_daemon, short_folder
from support.models import null_model
from support.plugins import path_with

COUNTING = """
from nnfmq.driver.execution import burst, prepared_model

for module in (burst, prepared_model):
    def counting(real=module.monotonic_ns):
        with open({path!r}, "a") as file:
            file.write("x")
        return real()

    module.monotonic_ns = counting
"""


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that has a byte for each time that the driver has read the clock for an execution."""
    path = tmp_path_factory.mktemp("reads") / "reads"
    path.touch()
    return path


@pytest.fixture(scope="module")
def driver(reads: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(COUNTING.format(path=str(reads)))
    environment = {**path_with(site), "NNFMQ_SANDBOX": "off"}  # its workers write a file
    with short_folder() as folder, running_daemon(folder / "d.sock", environment=environment) as daemon:
        yield daemon


@pytest.mark.parametrize("measure", [False, True], ids=["not measured", "measured"])
def test_TIM_8_measuring_reads_no_clock_that_is_not_read_anyway(driver: Daemon, reads: Path, measure: bool) -> None:
    counted = []
    with driver.connect() as client:
        for execute in (
            lambda model: model.execute(one(2), measure=measure),
            lambda model: model.execute_async(one(2), measure=measure).result(LIMIT_S),
        ):
            with client.device("reference").prepare(null_model()) as model:  # each its own: no burst after two calls
                execute(model)
                reads.write_text("")
                execute(model)
                counted.append(len(reads.read_text()))
    assert counted == [3, 3]  # when the engine begins, when it ends, and for the driver's statistics
