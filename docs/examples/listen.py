"""Listen for "okay Nabu" in a WAV file or with a microphone, and print when it is heard: pip install pymicro-features.

python listen.py speech.wav              # 16-bit samples, mono, 16,000 of them a second
python listen.py microphone              # pip install sounddevice

The model gets features of 30 ms at a time. What it heard before is its state, which the burst keeps.
"""

import argparse
from collections import deque
from pathlib import Path

import numpy as np
from audio import RATE, steps
from pymicro_features import MicroFrontend

import nnfmq

MODEL = Path(__file__).parent / "data" / "okay_nabu.tflite"  # of microWakeWord
STEP = 160  # the samples of 10 ms, from which one feature vector is computed


def main() -> None:
    """Print when it is heard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a WAV file, or the word microphone")
    parser.add_argument("--model", default=MODEL, help="another one of microWakeWord (default: okay_nabu.tflite)")
    arguments, frontend = parser.parse_args(), MicroFrontend()
    features, recent = [], deque([0.0] * 5, maxlen=5)  # for the next execution; the last probabilities
    with nnfmq.connect() as client, client.prepare(arguments.model) as model, model.burst() as burst:
        (given,), (result,) = model.inputs, model.outputs
        if given.dtype != "int8" or given.shape[2:] != (40,):
            raise SystemExit(f"{arguments.model} does not take feature vectors: it takes {given}")
        for number, samples in enumerate(steps(arguments.source, STEP)):
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


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, OSError, nnfmq.InvalidArgument) as error:
        raise SystemExit(str(error) or 130) from None
