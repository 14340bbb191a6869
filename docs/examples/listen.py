"""Listen for "okay Nabu" in a WAV file or with a microphone, and print when it is heard: pip install pymicro-features.

python listen.py speech.wav              # 16-bit samples, mono, 16,000 of them a second
python listen.py microphone              # pip install sounddevice

The model gets features of 30 ms at a time. What it heard before is its state, which the burst keeps.
"""

import argparse
import wave
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pymicro_features import MicroFrontend

import nnfmq

MODEL = Path(__file__).parent / "data" / "okay_nabu.tflite"  # of microWakeWord
RATE, STEP = 16_000, 160  # samples in a second, and in the 10 ms of one feature vector


def steps(source: str) -> Iterator[bytes]:
    """Yield the samples of 10 ms at a time."""
    if source == "microphone":
        from sounddevice import RawInputStream

        with RawInputStream(RATE, STEP, channels=1, dtype="int16") as stream:
            while True:
                yield bytes(stream.read(STEP)[0])
    with wave.open(source) as file:
        if file.getparams()[:3] != (1, 2, RATE):
            raise SystemExit(f"{source}: {file.getparams()}: 16-bit mono samples at {RATE} Hz are required")
        while len(samples := file.readframes(STEP)) == 2 * STEP:
            yield samples


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", help="a WAV file, or the word microphone")
source, frontend = parser.parse_args().source, MicroFrontend()
features, recent = [], deque([0.0] * 5, maxlen=5)  # for the next execution; the last probabilities
with nnfmq.connect() as client, client.prepare(MODEL) as model, model.burst() as burst:
    (given,), (result,) = model.inputs, model.outputs
    for number, samples in enumerate(steps(source)):
        if found := frontend.process_samples(samples).features:
            features.append(found)
        if len(features) < given.shape[1]:
            continue
        values = np.round(np.array([features]) / given.scale + given.zero_point).clip(-128, 127).astype(np.int8)
        features = []
        recent.append((int(burst.execute(values)[0][0, 0]) - result.zero_point) * result.scale)
        if sum(recent) > 0.85 * len(recent):
            print(f"{number * STEP / RATE:.2f} s: heard, in {burst.last.latency_ns / 1000:.0f} µs", flush=True)
            recent.extend([0.0] * 5)
            burst.reset_state()
