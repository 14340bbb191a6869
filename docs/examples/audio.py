"""Samples of a WAV file or a microphone, for listen.py and voice.py."""

import wave
from collections.abc import Iterator

RATE = 16_000  # samples in a second


def steps(source: str, length: int) -> Iterator[bytes]:
    """Yield `length` 16-bit samples at a time, of a WAV file or, endlessly, of the microphone.

    Raises:
        SystemExit: If there are none, with the reason.
    """
    return microphone(length) if source == "microphone" else wav_file(source, length)


def microphone(length: int) -> Iterator[bytes]:
    """Yield what the default microphone records."""
    try:
        from sounddevice import PortAudioError, RawInputStream
    except (ImportError, OSError) as error:  # OSError: PortAudio itself is not installed
        raise SystemExit(f"{error}: pip install sounddevice (and on Debian, apt install libportaudio2)") from None
    try:
        with RawInputStream(RATE, length, channels=1, dtype="int16") as stream:
            while True:
                yield bytes(stream.read(length)[0])
    except PortAudioError as error:
        raise SystemExit(f"the microphone: {error}") from None


def wav_file(path: str, length: int) -> Iterator[bytes]:
    """Yield the samples of a file, without the last ones if they are less than `length`."""
    try:
        with wave.open(path) as file:
            found = (file.getnchannels(), 8 * file.getsampwidth(), file.getframerate())
            if found != (1, 16, RATE):
                required = f"1 channel of 16 bits at {RATE} Hz is required"
                raise SystemExit(f"{path}: {required}; it has {found[0]} of {found[1]} bits at {found[2]} Hz")
            while len(samples := file.readframes(length)) == 2 * length:
                yield samples
    except (wave.Error, EOFError) as error:
        raise SystemExit(f"{path} is not read as a WAV file: {str(error) or 'it ends too early'}") from None
