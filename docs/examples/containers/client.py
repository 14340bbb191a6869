"""Classify a handwritten digit each second, by the driver of another container; with a number so many digits.

python client.py 3
"""

import itertools
import sys
import time

import numpy as np

import nnfmq

digits = np.load(nnfmq.example_path("digits.npz"))
images = digits["images"].reshape(-1, 1, 8, 8, 1).astype(np.float32) / 16
counts = range(int(sys.argv[1])) if sys.argv[1:] else itertools.count()

with (
    nnfmq.connect(wait=True, timeout=60) as client,  # no driver of its own is started
    client.prepare(nnfmq.example_path("digits.tflite")) as model,
    model.burst() as burst,
):
    for count in counts:
        (scores,) = burst.execute(images[count % len(images)])
        print(scores.argmax(), f"in {burst.last.latency_ns / 1000:.0f} µs")
        time.sleep(1)
