"""The programs of docs/examples that use models: each runs as a process, on files of the repository."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import wave
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.both_runners import Theirs
from support.places import ROOT

import nnfmq

EXAMPLES = ROOT / "docs" / "examples"
DATA = EXAMPLES / "data"
LINES_MAX = 60
RATE = 16_000
FACE = (90, 41, 137, 88)  # read off the picture: from the chin to the brows, and from ear to ear
SAID_S = (3.6, 5.0)  # when "okay Nabu" is said


@pytest.fixture(autouse=True)
def _next_to_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an example import audio.py and pictures.py, as it does for a user."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)


def command(name: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / name), *map(str, arguments)]


def run(name: str, *arguments: str | Path) -> str:
    done = subprocess.run(command(name, *arguments), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def fails(name: str, *arguments: str | Path) -> str:
    """Run an example that ends with one line on stderr, and return that."""
    done = subprocess.run(command(name, *arguments), capture_output=True, text=True, timeout=120, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    return line


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A function that imports an example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module


def speech() -> NDArray[np.int16]:
    with wave.open(str(DATA / "okay_nabu.wav")) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


def wav_file(path: Path, samples: NDArray[np.int16], *, channels: int = 1, rate: int = RATE) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.py"))])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < LINES_MAX


def test_a_face_is_found() -> None:
    found = re.findall(
        r"picture 0: a face from (\d+),(\d+) to (\d+),(\d+), score 0\.\d+", run("faces.py", DATA / "astronaut.jpg")
    )
    (corners,) = found
    np.testing.assert_allclose([int(number) for number in corners], FACE, atol=6)


def test_a_keyword_is_heard_when_it_is_said() -> None:
    pytest.importorskip("pymicro_features", reason="pymicro-features is not installed")
    (heard,) = re.findall(r"([\d.]+) s: heard", run("listen.py", DATA / "okay_nabu.wav"))
    assert SAID_S[0] < float(heard) < SAID_S[1]


def test_other_words_are_not_heard(tmp_path: Path) -> None:
    pytest.importorskip("pymicro_features", reason="pymicro-features is not installed")
    assert run("listen.py", wav_file(tmp_path / "other.wav", speech()[: int(SAID_S[0] * RATE)])) == ""


def times(output: str) -> list[tuple[str, float]]:
    return [(what, float(time)) for time, what in re.findall(r"([\d.]+) s speech (starts|ends)", output)]


def loud_parts() -> list[tuple[str, float]]:
    """Return when the sentences of the file start and end: between them is digital silence, of more than 0.4 s."""
    loud = np.flatnonzero(np.abs(speech().astype(int)) > 300)
    gaps = np.flatnonzero(np.diff(loud) > 0.4 * RATE)
    edges = [loud[0], *(loud[index] for gap in gaps for index in (gap, gap + 1)), loud[-1]]
    return [(what, edge / RATE) for what, edge in zip(("starts", "ends") * len(edges), edges, strict=False)]


@pytest.mark.parametrize("noise", [0.0, 0.1**0.5], ids=["quiet", "10 dB"])
def test_speech_starts_and_ends_where_the_samples_get_loud_and_quiet(tmp_path: Path, noise: float) -> None:
    samples = speech().astype(float)
    noise *= float(np.std(samples[np.abs(samples) > 300]))
    samples += np.random.default_rng(1).normal(0, noise, len(samples))
    path = wav_file(tmp_path / "noisy.wav", samples.clip(-32768, 32767).astype(np.int16))
    found, expected = times(run("voice.py", path)), loud_parts()
    assert [what for what, _ in found] == [what for what, _ in expected]
    np.testing.assert_allclose([time for _, time in found], [time for _, time in expected], atol=0.2)


def test_noise_is_no_speech(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    loudness = np.repeat(rng.choice([30, 3000], 20), RATE // 4)
    samples = rng.normal(0, loudness).astype(np.int16)
    assert run("voice.py", wav_file(tmp_path / "noise.wav", samples)) == ""


def test_a_pause_ends_speech_and_a_click_does_not_start_it(example: Callable[[str], Any]) -> None:
    click, word, breath, pause = [True, False], [True] * 4, [False] * 3, [False] * 5
    found = list(example("voice").changes([*click, *word, *breath, *word, *pause, *word], 0.1))
    assert found == ["0.20 s speech starts", "1.30 s speech ends", "1.80 s speech starts", "2.20 s speech ends"]


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("voice.py", ["{tmp}/none.wav"], r"No such file or directory: '.*none.wav'"),
        ("voice.py", [DATA / "astronaut.jpg"], r"astronaut.jpg is not read as a WAV file: .* RIFF"),
        ("voice.py", ["/dev/null"], r"/dev/null is not read as a WAV file: it ends too early"),
        (
            "voice.py",
            ["{tmp}/fast.wav"],
            r"required; it has 1 of 16 bits at 44100 Hz",
        ),
        (
            "voice.py",
            ["{tmp}/stereo.wav"],
            r"required; it has 2 of 16 bits at 16000",
        ),
        ("voice.py", [DATA / "okay_nabu.wav", "--model", DATA / "words.tflite"], "input 'words' holds int32"),
        (
            "voice.py",
            [DATA / "okay_nabu.wav", "--model", DATA / "CREDITS.txt"],
            "this is a text file; models are read from",
        ),
        ("faces.py", ["{tmp}/none.jpg"], "No such file or directory"),
        ("faces.py", ["{tmp}/text.jpg"], "cannot identify image file"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, name: str, arguments: list[str | Path], reason: str) -> None:
    wav_file(tmp_path / "fast.wav", speech(), rate=44_100)
    wav_file(tmp_path / "stereo.wav", speech(), channels=2)
    (tmp_path / "text.jpg").write_text("text")
    assert re.search(reason, fails(name, *(str(argument).format(tmp=tmp_path) for argument in arguments)))


def test_a_model_without_features_is_one_line() -> None:
    pytest.importorskip("pymicro_features", reason="pymicro-features is not installed")
    line = fails("listen.py", DATA / "okay_nabu.wav", "--model", DATA / "words.tflite")
    assert re.search(r"words.tflite does not take feature vectors: it takes .*'words', int32 1x64", line)


def test_interrupting_an_example_prints_nothing(tmp_path: Path) -> None:
    fifo, content = tmp_path / "endless.wav", (DATA / "okay_nabu.wav").read_bytes()
    os.mkfifo(fifo)
    with subprocess.Popen(
        command("voice.py", fifo), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stderr
        with fifo.open("r+b", buffering=0) as file:
            file.write(content[:60_000])  # all that a pipe takes without a reader, in case the program has ended
            assert process.stdout.readline().endswith("speech starts\n")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert process.stderr.read() == ""


def test_the_nearest_paragraph_is_found(tmp_path: Path) -> None:
    texts = {
        "memory": "Each client has a worker process, whose private memory is limited.",
        "queue": "Records travel through a ring buffer in shared memory, and a futex wakes the reader.",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.md").write_text(f"# Title\n\n{text} {text}\n")
    lines = run("embed.py", "ring buffer and futex of the queue", tmp_path).splitlines()
    assert lines[0].endswith("queue.md:3")
    assert float(lines[0].split()[0]) > float(lines[2].split()[0])


def assert_equal_litert_s(model: Path, inputs: Iterable[list[NDArray[Any]]], atol: float) -> None:
    """Compare the results of one execution after the other, with the states of both kept."""
    theirs = Theirs(model.read_bytes())
    with nnfmq.connect(embedded=True) as client, client.prepare(model) as prepared, prepared.burst() as burst:
        for given in inputs:
            for found, expected in zip(burst.execute(*given), theirs(given), strict=True):
                np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=1e-5, atol=atol)


def test_the_model_of_faces_is_litert_s(example: Callable[[str], Any]) -> None:
    faces = example("faces")
    picture = Image.open(DATA / "astronaut.jpg").convert("RGB").resize((128, 128))
    pixels = np.asarray(picture, np.float32)[None] / 127.5 - 1
    assert_equal_litert_s(faces.MODEL, [[pixels]], 1e-3)


def test_the_model_of_a_keyword_is_litert_s(example: Callable[[str], Any]) -> None:
    pytest.importorskip("pymicro_features", reason="pymicro-features is not installed")
    listen = example("listen")
    frontend = listen.MicroFrontend()
    parts = (speech()[begin : begin + listen.STEP].tobytes() for begin in range(0, RATE * 5, listen.STEP))
    features = [found for part in parts if (found := frontend.process_samples(part).features)]
    (given,) = nnfmq.load(listen.MODEL).inputs
    values = np.round(np.array(features) / given.scale + given.zero_point).clip(-128, 127).astype(np.int8)
    steps = values[: len(values) // 3 * 3].reshape(-1, *given.shape)
    assert_equal_litert_s(listen.MODEL, ([step] for step in steps), 1)


def test_the_model_of_voices_is_litert_s(example: Callable[[str], Any]) -> None:
    windows = speech()[: len(speech()) // 512 * 512].reshape(-1, 1, 512) / np.float32(32768)
    assert_equal_litert_s(example("voice").MODEL, ([window] for window in windows), 1e-5)


def test_the_model_of_voices_is_what_its_tool_writes(tmp_path: Path) -> None:
    path = tmp_path / "voice.tflite"
    subprocess.run([sys.executable, ROOT / "tools" / "example_models.py", "voice", "--out", path.parent], check=True)
    windows = speech()[: RATE // 512 * 512].reshape(-1, 1, 512) / np.float32(32768)
    theirs, written = Theirs((DATA / "voice.tflite").read_bytes()), Theirs(path.read_bytes())
    for window in windows:
        np.testing.assert_allclose(written([window])[0], theirs([window])[0], atol=1e-6)


def test_the_model_of_texts_is_litert_s(example: Callable[[str], Any]) -> None:
    embed = example("embed")
    rows = embed.words("the driver validates, compiles and keeps the model")
    assert_equal_litert_s(embed.MODEL, [[rows]], 1e-5)
    with nnfmq.connect(embedded=True) as client, client.prepare(embed.MODEL) as model:
        (found,) = model.execute(rows)
    assert abs(float(np.linalg.norm(found)) - 1) < 1e-5
