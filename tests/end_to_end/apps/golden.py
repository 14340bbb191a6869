"""An application that executes models on inputs that it reads from stdin, over a burst.

golden.py SOCKET RESULTS.npz: reads lines of JSON {"key": ..., "model": path, "input": path, "device": name} until an
empty one; prints the core of each side, and saves the results under their keys. On the device `compiled` machine code
must execute every operation.
"""

from __future__ import annotations

import json
import sys
from functools import cache

import numpy as np
from support.machine_code import machine_code

import nnfmq
from nnfmq.queue import core

client = nnfmq.connect(sys.argv[1])


@cache
def burst_of(path: str, device: str) -> tuple[nnfmq.Burst, nnfmq.TensorInfo]:
    """Prepare a model, once, and return a burst of it and its input."""
    loaded = nnfmq.load(path)
    model = client.device(device).prepare(loaded)
    if device == "compiled":
        machine_code(model, len(loaded.model.main.operations))
    return model.burst(), model.inputs[0]


results = {}
while (line := sys.stdin.readline()) != "\n":
    case = json.loads(line)
    burst, wanted = burst_of(case["model"], case["device"])
    image = np.fromfile(case["input"], wanted.dtype).reshape(wanted.shape)
    (results[case["key"]],) = burst.execute(image)
np.savez(sys.argv[2], **results)
print(core.core_name, client.driver_core, flush=True)
client.close()
