"""Open a file on the device `openvino`, and again from what it saved: both compute the same."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from nnfmq.hosted.adapter import HostedFile, OpenOptions
from nnfmq.hosted.openvino import OpenVinoDevice

FOLDER = Path(sys.argv[1])
parts = {name: memoryview((FOLDER / name).read_bytes()) for name in ("vision.xml", "vision.bin")}
file, device = HostedFile("openvino", parts), OpenVinoDevice()
first = device.open(file, OpenOptions())
saved = first.save()
assert saved is not None
second = device.open(HostedFile("openvino", {"vision.xml": memoryview(b"")}), OpenOptions(saved=saved))
assert second.save() is None
assert first.description == second.description
image = np.random.default_rng(1).random((1, 3, 16, 16), np.float32)
outputs = [np.zeros((1, 5), np.float32) for _ in range(2)]
for model, output in zip((first, second), outputs, strict=True):
    model.bind([image], [output])()
assert outputs[0].any()
assert outputs[0].tobytes() == outputs[1].tobytes()
