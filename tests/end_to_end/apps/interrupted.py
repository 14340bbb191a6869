"""An application that Ctrl-C interrupts while it waits, several times, and that goes on each time.

interrupted.py SOCKET|embedded WINDOW_US|ordinary: prints the driver's pid; for each line read it begins a call, prints
"waiting", and once interrupted the time (ns). After an empty line it prints the result of one more call.
"""

from __future__ import annotations

import sys
import threading
import time

from support.drivers import one, until, wait_until_waiting
from support.models import null_model

import nnfmq

target, way = sys.argv[1:]
client = nnfmq.connect(embedded=True) if target == "embedded" else nnfmq.connect(target)
model = client.device("reference").prepare(null_model())
burst = model.burst(polling_window_us=0 if way == "ordinary" else float(way))
execute = model.execute if way == "ordinary" else burst.execute
execute(one(0))


def announce(already_open: int) -> None:
    """Print that the main thread waits."""
    if way == "ordinary":
        until(lambda: len(client._connection._pending_calls) > already_open, "a call is open")
    else:
        wait_until_waiting(burst)
    print("waiting", flush=True)


print(client.worker_pid, flush=True)
while word := sys.stdin.readline().strip():
    thread = threading.Thread(target=announce, args=(len(client._connection._pending_calls),))
    thread.start()
    try:
        execute(one(float(word)))
    except KeyboardInterrupt:
        print(time.monotonic_ns(), flush=True)
    thread.join()
print(execute(one(99))[0][0], flush=True)
burst.close()
client.close()
