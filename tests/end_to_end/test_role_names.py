"""The processes and threads of a driver carry their roles in the kernel's names, which ps, top and debuggers show."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from support.drivers import one, process_name, running_daemon, short_folder, until
from support.models import null_model

import nnfmq
from nnfmq.base.processes import descendants


def names_of_threads(pid: int) -> Counter[str]:
    """Return the names of a process's threads; the main thread's is the process's."""
    return Counter(path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm"))


def test_processes_and_threads_of_a_driver_are_named_after_their_roles() -> None:
    with short_folder() as folder:
        models = folder / "models"
        models.mkdir()
        with running_daemon(folder / "d.sock", models=models) as daemon, daemon.connect() as client:
            assert process_name(daemon.program.pid) == "nnfmq-driver"
            until(lambda: "nnfmq-models" in map(process_name, descendants(daemon.program.pid)), "the repository runs")
            model = client.device("reference").prepare(null_model())
            with model.burst() as burst:
                burst.execute(one(1))
                assert process_name(client.worker_pid) == "nnfmq-worker"
                assert "nnfmq-burst" in names_of_threads(client.worker_pid)


def test_an_embedded_driver_is_named_and_its_application_keeps_its_name() -> None:
    before = Path("/proc/self/comm").read_text()
    with nnfmq.connect(embedded=True) as client:
        client.device("reference").prepare(null_model()).execute(one(1))
        assert process_name(client.worker_pid) == "nnfmq-driver"
    assert Path("/proc/self/comm").read_text() == before
