"""An application whose process is traced: for each line N it executes N requests over a burst, then one synchronously.

traced.py SOCKET|embedded DEVICE: prints the worker's pid after each line, and exits at the end of its input.
"""

from __future__ import annotations

import sys

import numpy as np

import nnfmq

target, device = sys.argv[1:]
client = nnfmq.connect(None if target == "embedded" else target, embedded=target == "embedded" or None, recover=False)
with client, client.device(device).prepare(nnfmq.example_path("digits.tflite")) as model, model.burst() as burst:
    image = np.zeros(model.inputs[0].shape, model.inputs[0].dtype)
    for line in sys.stdin:
        for _ in range(int(line)):
            burst.execute(image)
        model.execute(image)
        print(client.worker_pid, flush=True)
