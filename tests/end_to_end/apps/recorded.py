"""An application that is recorded, or reports telemetry, as its environment says.

recorded.py SOCKET: prints the worker's pid; for each line `N` executes N times and prints `done`; ends with its input.
With `fork` instead of a number it forks a child that executes once over a connection of its own, and waits for it.
"""

import os
import sys

import numpy as np
from support.models import null_model

import nnfmq


def prepared(client: nnfmq.Client) -> nnfmq.PreparedModel:
    return client.device("reference").prepare(null_model())


client = nnfmq.connect(sys.argv[1])
burst = prepared(client).burst()
print(client.worker_pid, flush=True)
count = 0
for line in sys.stdin:
    if line.strip() == "fork":
        child = os.fork()
        if not child:
            with nnfmq.connect(sys.argv[1]) as own:
                prepared(own).execute(np.float32([-1]))
            sys.exit(0)
        os.waitpid(child, 0)
    else:
        for _ in range(int(line)):
            count += 1
            burst.execute(np.float32([count]))
    print("done", flush=True)
