"""An application that uses its client on both sides of a fork.

calls_after_fork.py SOCKET|embedded: the child prints what each call raised; then the parent prints what it computed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from support.drivers import one
from support.forking import fork
from support.models import null_model

import nnfmq

target = sys.argv[1]
client = nnfmq.connect(embedded=True) if target == "embedded" else nnfmq.connect(target)
device = client.device("reference")
model = device.prepare(null_model())
burst = model.burst()
burst.execute(one(1))

CALLS: list[Callable[[], Any]] = [
    client.devices,
    lambda: device.prepare(null_model()),
    lambda: model.execute(one(2)),
    lambda: burst.execute(one(3)),
    lambda: burst.execute(one(4), timeout=0),
    model.burst,
]


def raised(call: Callable[[], Any]) -> str:
    """Return what `call` raises, in one line."""
    try:
        return f"returned {call()!r}"
    except nnfmq.NnfmqError as error:
        return f"{type(error).__name__}: {error}"


child = fork()
if not child:
    for call in CALLS:
        print(raised(call), flush=True)
    burst.close()
    model.close()
    client.close()
    os._exit(0)
print(f"child ended with {os.waitpid(child, 0)[1]}", flush=True)
results = [*burst.execute(one(5)), *model.execute(one(6)), *burst.execute(one(7))]
print([float(result[0]) for result in results], flush=True)
burst.close()
client.close()
