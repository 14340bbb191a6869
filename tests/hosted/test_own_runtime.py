"""The device that docs/how-to/host-a-runtime.md shows: it runs files of a format of its own, over a burst."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder
from support.places import ROOT
from support.plugins import add_example, path_with

import nnfmq
from nnfmq.cli import main

EXAMPLE = ROOT / "docs" / "examples" / "hosted"
PAGE = ROOT / "docs" / "how-to" / "host-a-runtime.md"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    site = tmp_path_factory.mktemp("site")
    add_example(site, EXAMPLE)
    with short_folder() as made, running_daemon(made / "d.sock", environment=path_with(site)) as daemon:
        yield daemon


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "net.npz"
    np.savez(path, w0=np.float32([[1, -1], [2, 0.5]]), b0=np.float32([0.5, 0]))
    return path


def test_the_page_includes_the_package_s_files_of_at_most_sixty_lines() -> None:
    text = PAGE.read_text()
    assert all(f"../examples/hosted/{name}" in text for name in ("nnfmq_layers.py", "pyproject.toml"))
    assert len((EXAMPLE / "nnfmq_layers.py").read_text().splitlines()) <= 60


def test_a_file_runs_by_call_and_by_burst(driver: Daemon, layers: Path) -> None:
    with driver.connect() as client, client.device("layers").prepare(layers, shapes={"x": (1, 2)}) as model:
        assert (model.inputs[0].shape, model.outputs[0].dtype) == ((1, 2), "float32")
        assert model.execute(np.float32([[1, 2]]))[0].tolist() == [[5.5, 0]]
        with driver.connect() as other, other.device("layers").prepare(layers) as open_model:
            assert open_model.execute(np.float32([[1, 2], [0, 0]]))[0].tolist() == [[5.5, 0], [0.5, 0]]


def test_a_file_of_the_format_is_prepared_without_a_device_s_name(driver: Daemon, layers: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("no model")
    with driver.connect() as client:
        with client.prepare(layers, shapes={"x": (1, 2)}) as model:
            assert model.device == "layers"
        with pytest.raises(nnfmq.InvalidArgument, match=r"this is a text file; .*\ndevice 'layers' rejects it: "):
            client.prepare(text)


def test_commands_find_the_device_of_a_file_that_nnfmq_s_engine_does_not_read(
    driver: Daemon, layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.float32([[1, 2]]))
    for words in (["model", "show", str(layers)], ["run", str(layers), "--input", str(tmp_path / "x.npy")]):
        assert main([*words, "--connect", str(driver.path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["device"] == "layers"
    assert main(["model", "show", str(layers), "--connect", str(driver.path)]) == 0
    assert "this is a zip archive" in capsys.readouterr().out


def test_what_the_runtime_says_of_a_bad_file_reaches_the_caller_and_the_device_lives_on(
    driver: Daemon, layers: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.npz"
    bad.write_bytes(layers.read_bytes()[:100])
    with driver.connect(recover=False) as client:
        device, text = client.device("layers"), tmp_path / "a.txt"
        text.write_text("no model")
        with pytest.raises(nnfmq.InvalidArgument, match="layers: File is not a zip file"):
            device.prepare(bad)
        with pytest.raises(nnfmq.InvalidArgument, match="runs npz files, not 'txt'"):
            device.prepare(text)
        with device.prepare(layers, shapes={"x": (1, 2)}) as model:
            assert model.execute(np.float32([[0, 0]]))[0].tolist() == [[0.5, 0]]
