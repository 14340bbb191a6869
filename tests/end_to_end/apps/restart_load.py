"""An application that executes without a pause while its driver is restarted.

restart_load.py SOCKET WAY COUNTER: it executes in one of WAYS, and writes the number of its executions to COUNTER, a
file of 8 bytes. When its stdin is closed it ends, and prints JSON: `longest_ns`, and what its client has counted.
"""

from __future__ import annotations

import json
import mmap
import select
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from support.drivers import LIMIT_S, one
from support.models import null_model

import nnfmq

WAYS: Mapping[str, Callable[[nnfmq.PreparedModel, nnfmq.Burst, float], object]] = {
    "burst": lambda _model, burst, value: burst.execute(one(value), timeout=LIMIT_S),
    "execute": lambda model, _burst, value: model.execute(one(value), timeout=LIMIT_S),
    "execute_async": lambda model, _burst, value: model.execute_async(one(value), timeout=LIMIT_S).result(),
}
LOOK_EVERY = 64
socket, way, counter = sys.argv[1:]
execute = WAYS[way]
count = longest_ns = 0

with (
    Path(counter).open("r+b") as file,
    mmap.mmap(file.fileno(), 8) as shared,
    memoryview(shared).cast("Q") as words,
    nnfmq.connect(socket, timeout=LIMIT_S) as client,
):
    with client.device("compiled").prepare(null_model()) as model, model.burst() as burst:
        while count % LOOK_EVERY or not select.select([sys.stdin], [], [], 0)[0]:
            begin_ns = time.monotonic_ns()
            assert execute(model, burst, count) == (one(count),)
            longest_ns = max(longest_ns, time.monotonic_ns() - begin_ns)
            count += 1
            words[0] = count
    found = {"longest_ns": longest_ns, **client.recovery._asdict()}
print(json.dumps(found), flush=True)
