"""What a worker keeps of a model's constants, as its anonymous memory shows (/proc/PID/smaps_rollup).

The program that workers share is a memfd, which is not anonymous.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder, until
from support.models import weighty_model

import nnfmq
from nnfmq.hal.types import ExecutionPreference, Model

pytest.importorskip("llvmlite", exc_type=ImportError)

FAST, SUSTAINED = ExecutionPreference.FAST_SINGLE_ANSWER, ExecutionPreference.SUSTAINED_SPEED
SIDE = 3072  # a worker writes to some 10 MiB of its own besides
WEIGHTS_KB = SIDE * SIDE * 4 // 1024
MODEL = weighty_model(1.0, SIDE)
READS_A_CONSTANT = weighty_model(1.0, SIDE, summand=0.0)  # an element that lies beside the weights
INPUT = np.ones((1, SIDE), np.float32)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with (
        short_folder() as folder,
        running_daemon(folder / "d.sock", environment={"XDG_CACHE_HOME": str(tmp_path)}) as d,
    ):
        yield d


def anonymous_kb(client: nnfmq.Client) -> int:
    """Return the size of the anonymous memory of the client's worker, in KiB."""
    lines = Path(f"/proc/{client.worker_pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))


@pytest.mark.parametrize("model", [MODEL, READS_A_CONSTANT], ids=["packed", "reads a constant"])
@pytest.mark.parametrize("preference", [FAST, SUSTAINED])
def test_no_worker_keeps_a_private_copy_of_the_weights_of_a_compiled_model(
    daemon: Daemon, preference: ExecutionPreference, model: Model
) -> None:
    """The first worker compiles the model, the second one finds its program; a burst of each stays open."""
    with ExitStack() as stack:
        for _ in range(2):
            client = stack.enter_context(daemon.connect())
            before = anonymous_kb(client)
            prepared = stack.enter_context(client.device("compiled").prepare(model, preference=preference))
            burst = stack.enter_context(prepared.burst())
            limit_kb = before + WEIGHTS_KB // 2
            until(partial(is_below, limit_kb, client, burst), f"the worker has less than {limit_kb} kB")


def is_below(limit_kb: int, client: nnfmq.Client, burst: nnfmq.Burst) -> bool:
    """Execute once, because a burst changes over to machine code between two executions; then read the memory."""
    (result,) = burst.execute(INPUT)
    assert (result == SIDE).all()
    return anonymous_kb(client) < limit_kb
