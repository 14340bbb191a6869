"""An application whose signal handler raises at random instants, in the middle of whatever a call is doing.

storm.py SOCKET|embedded burst|ordinary|devices COUNT: calls until COUNT handlers have raised out of a call, then prints
the result of one more call, which must come within the deadline, and "wrong" if a result was ever another call's.
"""

from __future__ import annotations

import random
import signal
import sys
from types import FrameType

from support.drivers import LIMIT_S, one
from support.models import null_model

import nnfmq


class Ping(Exception):
    """What the handler raises."""


def ping(_number: int, _frame: FrameType | None) -> None:
    raise Ping


target, way, count = sys.argv[1:]
client = nnfmq.connect(embedded=True) if target == "embedded" else nnfmq.connect(target)
model = client.device("reference").prepare(null_model())
burst = model.burst()
signal.signal(signal.SIGALRM, ping)
# Raised inside a destructor it can go nowhere, and Python says so: that is the storm's own doing.
sys.unraisablehook = lambda error: None if error.exc_type is Ping else sys.__unraisablehook__(error)
chance = random.Random(20)


def call(value: int) -> float:
    """Make one call in this execution mode; return the result for `value`."""
    if way == "devices":
        return float(value) if client.devices(timeout=LIMIT_S) else -1.0
    execute = burst.execute if way == "burst" else model.execute
    return float(execute(one(value), timeout=LIMIT_S)[0][0])


def disturbed(value: int) -> bool:
    """Make a call under the clock; return True if the handler raised out of it."""
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-6, 1e-3 if way == "ordinary" else 2e-4))
        try:
            if call(value) != value:
                print("wrong", flush=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Ping:
        return True
    return False


number = pings = 0
while pings < int(count):
    number = number % 1_000_000 + 1
    pings += disturbed(number)
print(call(7), flush=True)
burst.close()
client.close()
