"""Print when speech starts and ends in a WAV file, or with a microphone.

python voice.py speech.wav               # 16-bit samples, mono, 16,000 of them a second
python voice.py microphone               # pip install sounddevice

The model gets 32 ms at a time and gives the probability that a voice is in them: whether they are periodic, and louder
than the quietest ones so far, which are the state that the burst keeps.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from audio import RATE, steps

import nnfmq

MODEL = Path(__file__).parent / "data" / "voice.tflite"  # tools/example_models.py writes it
PAUSE_S = 0.4  # a shorter one is within speech: a consonant without a voice, a breath


def changes(voices: Iterable[bool], step_s: float) -> Iterator[str]:
    """Yield when speech starts and ends, given whether a voice is in each step. A voice in only one is a click."""
    start, end, last = None, -math.inf, False  # the start of speech, the end of the last voice; the step before
    for number, voice in enumerate(voices):
        if voice and last and start is None:
            start = (number - 1) * step_s
            yield f"{start:.2f} s speech starts"
        if voice:
            end = (number + 1) * step_s
        elif start is not None and (number + 1) * step_s - end > PAUSE_S:
            start = None
            yield f"{end:.2f} s speech ends"
        last = voice
    if start is not None:
        yield f"{end:.2f} s speech ends"


def main() -> None:
    """Print what the model hears."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a WAV file, or the word microphone")
    parser.add_argument("--model", default=MODEL, help="takes samples from -1 to 1, gives one probability")
    arguments = parser.parse_args()
    with nnfmq.connect() as client, client.prepare(arguments.model) as model, model.burst() as burst:
        shape = model.inputs[0].shape
        windows = (np.frombuffer(samples, np.int16) for samples in steps(arguments.source, math.prod(shape)))
        results = (burst.execute((window / np.float32(32768)).reshape(shape))[0] for window in windows)
        for line in changes((result.item() > 0.5 for result in results), math.prod(shape) / RATE):
            print(line, flush=True)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, OSError, nnfmq.InvalidArgument) as error:
        raise SystemExit(str(error) or 130) from None
