"""Executes a model by name over a burst for ever. Prints its worker's pid, and each version that has executed."""

import sys

import numpy as np

import nnfmq

with nnfmq.connect(sys.argv[1]) as client, client.model(sys.argv[2]) as model, model.burst() as burst:
    print(client.worker_pid, flush=True)
    version = 0
    while True:
        burst.execute(np.zeros(1, np.float32))
        if burst.version != version:
            version = burst.version
            print(version, flush=True)
