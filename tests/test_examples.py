"""The programs of docs/examples that use models: each runs as a process, on files of the repository."""

from __future__ import annotations

import re
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.both_runners import Theirs
from support.places import ROOT

EXAMPLES = ROOT / "docs" / "examples"
DATA = EXAMPLES / "data"
LINES_MAX = 60
FACE = (90, 41, 137, 88)  # read off the picture: from the chin to the brows, and from ear to ear
SAID_S = (3.6, 5.0)  # when "okay Nabu" is said


def run(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", ["embed.py", "faces.py", "listen.py"])
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
    path = tmp_path / "other.wav"
    with wave.open(str(DATA / "okay_nabu.wav")) as whole, wave.open(str(path), "wb") as part:
        part.setparams(whole.getparams())
        part.writeframes(whole.readframes(int(SAID_S[0] * whole.getframerate())))
    assert run("listen.py", path) == ""


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


def test_the_model_of_texts_is_litert_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    embed: Any = pytest.importorskip("embed")
    import nnfmq

    rows = embed.words("the driver validates, compiles and keeps the model")
    with nnfmq.connect(embedded=True) as client, client.prepare(embed.MODEL) as model:
        (found,) = model.execute(rows)
    (expected,) = Theirs(embed.MODEL.read_bytes())([rows])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert abs(float(np.linalg.norm(found)) - 1) < 1e-5
