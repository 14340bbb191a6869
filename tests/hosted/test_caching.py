"""Caches of hosted models: the file in a client's cache files, and what a runtime saves of it in the driver's cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.drivers import running_daemon, short_folder

import nnfmq
from nnfmq.base import settings
from nnfmq.base.shared_constants import SharedConstants
from nnfmq.driver.cache.files import CacheContents
from nnfmq.driver.cache.programs import entry_sizes
from nnfmq.driver.devices.installation import installation
from nnfmq.driver.memory.private import ConstantPool
from nnfmq.hal.hosted import FileParts, HostedCall, HostedDescription, HostedTensor
from nnfmq.hal.types import Model
from nnfmq.hosted.adapter import HostedFile, HostedModel, HostedRun, OpenOptions
from nnfmq.hosted.device import HostedDevice
from nnfmq.importers.hosted import hosted_model
from nnfmq.operations.declaration import Array
from nnfmq.serialize.models import decode_model, encode_model

X = HostedTensor("x", "float32", (2,))
DESCRIPTION = HostedDescription((X,), (HostedTensor("y", "float32", (2,)),))
INPUT = np.float32([1, 2])


class _Model(HostedModel):
    description = DESCRIPTION

    def __init__(self, artefact: bytes) -> None:
        self.artefact = artefact

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> HostedRun:
        raise NotImplementedError

    def save(self) -> bytes | None:
        return self.artefact


class Saving(HostedDevice):
    """A device whose artefact of a file are its bytes in capitals; it opens no other artefact."""

    name, formats, saves = "saving", ("letters",), True

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[bytes | None] = []

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        self.opened.append(options.saved)
        artefact = bytes(file.model).upper()
        if options.saved not in (None, artefact):
            raise ValueError("the artefact is of another file")
        return _Model(artefact)


class Changed(Saving):
    """The same, of a release of the runtime that opens no artefact of another one."""

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        self.opened.append(options.saved)
        if options.saved is not None:
            raise ValueError("the artefact is of another release")
        return _Model(b"")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def model_of(data: bytes, **options: object) -> Model:
    call = HostedCall(
        "letters", (FileParts("a.letters", 1),), options=options, inputs=(X,), outputs=DESCRIPTION.outputs
    )
    parts = SharedConstants.of_values([memoryview(data)])[0]
    encoded, _ = encode_model(hosted_model(call, [parts], DESCRIPTION).model)
    return decode_model(encoded, [ConstantPool(data)])


def test_a_second_preparation_gets_what_the_runtime_saved_of_the_same_file_with_the_same_options() -> None:
    Saving().compile(model_of(b"abc"))
    again = Saving()
    for model in (model_of(b"abc"), model_of(b"abc", level=1), model_of(b"abcd"), model_of(b"abc", threads=1)):
        again.compile(model)
    assert again.opened[:3] == [b"ABC", None, None]
    assert again.opened[3] == (b"ABC" if len(os.sched_getaffinity(0)) == 1 else None)
    assert len(entry_sizes()) in (3, 4)


def test_another_version_of_the_runtime_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Saving().compile(model_of(b"abc"))
    monkeypatch.setattr(Saving, "version_string", "another")
    device = Saving()
    device.compile(model_of(b"abc"))
    assert device.opened == [None]


def test_the_question_what_is_in_a_file_gets_it_too_and_the_preparation_finds_the_file_open() -> None:
    Saving().compile(model_of(b"abc"))
    device, model = Saving(), model_of(b"abc")
    device.describe_file(HostedCall("letters", (FileParts("a.letters", 1),)), [ConstantPool(b"abc")])
    device.compile(model)
    assert device.opened == [b"ABC"]


def test_an_artefact_that_the_runtime_rejects_is_removed_and_the_file_opened() -> None:
    Saving().compile(model_of(b"abc"))
    device = Changed()
    device.compile(model_of(b"abc"))
    assert device.opened == [b"ABC", None]
    assert entry_sizes() == []


def test_nothing_is_kept_where_the_cache_is_off_or_the_runtime_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Changed().compile(model_of(b"abc"))
    monkeypatch.setenv(settings.CACHE_MIB.variable, "0")
    for _ in range(2):
        device = Saving()
        device.compile(model_of(b"abc"))
        assert device.opened == [None]
    assert entry_sizes() == []


def test_a_runtime_that_fails_to_save_a_file_has_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_model: _Model) -> bytes | None:
        raise ValueError("no space")

    monkeypatch.setattr(_Model, "save", fail)
    device = Saving()
    device.compile(model_of(b"abc"))
    assert device.opened == [None]
    assert entry_sizes() == []


def test_cache_files_have_the_file_and_the_artefact() -> None:
    device, restoring = Saving(), Saving()
    model = model_of(b"abc")
    contents = device.save(model, device.compile(model))
    assert isinstance(contents, CacheContents)
    restored, _ = restoring.restore(contents)
    assert [bytes(pool.view) for pool in restored.pools] == [b"abc"]
    assert restored.main == model.main
    assert restoring.opened == [b"ABC"]


# ----------------------------------------------------------------------------------------------------------------------
# ONNX Runtime, through two drivers.


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    from support.onnx_files import file_of
    from support.onnx_runtime import onnx

    node = onnx.helper.make_node("Mul", ["x", "w"], ["y"])
    path = tmp_path / "net.onnx"
    path.write_bytes(file_of([node], {"x": INPUT}, ["y"], {"w": np.float32([2, 3])}))
    return path


@pytest.fixture
def drivers() -> Iterator[Callable[[], nnfmq.Client]]:
    """Return a function that connects to another new driver each time."""
    with ExitStack() as stack:

        def connected() -> nnfmq.Client:
            made = stack.enter_context(short_folder())
            daemon = stack.enter_context(running_daemon(made / "d.sock"))
            return stack.enter_context(daemon.connect(recover=False))

        yield connected


def test_another_driver_prepares_the_saved_model_without_its_file(
    drivers: Callable[[], nnfmq.Client], onnx_file: Path, tmp_path: Path
) -> None:
    import onnxruntime

    token, caches = bytes(range(32)), tmp_path / "caches"
    caches.mkdir()
    first = drivers().device("onnxruntime")
    assert first.info.version.endswith(f" onnxruntime-{onnxruntime.__version__}")
    with first.prepare(onnx_file, cache_dir=caches) as kept:
        inodes = [path.stat().st_ino for path in sorted(caches.iterdir())]
        assert len(inodes) == 2
        files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("model", "data")]
        first.prepare(onnx_file, token=token, model_cache=files[:1], data_cache=files[1:]).close()
        inputs, outputs = kept.inputs, kept.outputs
    second = drivers().device("onnxruntime")
    with second.prepare(onnx_file, cache_dir=caches) as model:
        assert model.execute(INPUT)[0].tolist() == [2, 6]
        assert inodes == [path.stat().st_ino for path in sorted(caches.iterdir())]  # otherwise new ones replace them
    onnx_file.unlink()
    with second.prepare_from_cache(token, files[:1], files[1:], model=kept) as model:
        assert (model.inputs, model.outputs) == (inputs, outputs)
        assert model.execute(INPUT)[0].tolist() == [2, 6]
        with model.burst() as burst:
            assert burst.execute(INPUT)[0].tolist() == [2, 6]
    for fd in files:
        os.close(fd)


def test_the_version_of_a_runtime_is_read_with_the_installation() -> None:
    import onnxruntime

    assert installation().runtimes["onnxruntime"] == onnxruntime.__version__
