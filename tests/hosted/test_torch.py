"""The device `torch`, against what PyTorch computes in a process of its own; no file of a client runs code."""

from __future__ import annotations

import hashlib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.drivers import running_daemon, short_folder
from support.hosted_files import assert_equal, examples, made

import nnfmq

if find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

ONE_THREAD = {"threads": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("torch_models", tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="module")
def device(shared_client: nnfmq.Client) -> nnfmq.Device:
    return shared_client.device("torch")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("vision", "vision"), ("transformer", "transformer"), ("transformer", "transformer1"), ("types", "types"),
        ("found", "found"),
    ],
)  # fmt: skip
def test_a_file_computes_what_torch_does_bit_for_bit(device: nnfmq.Device, files: Path, name: str, case: str) -> None:
    inputs, outputs = examples(files, case)
    with device.prepare(files / f"{name}.pt2", runtime_options=ONE_THREAD) as model:
        assert_equal(model.execute(*inputs), outputs)
        assert_equal(model.execute(*inputs), outputs)


@pytest.mark.parametrize("name", ["vision", "types"])
def test_a_burst_computes_the_same(device: nnfmq.Device, files: Path, name: str) -> None:
    inputs, outputs = examples(files, name)
    with device.prepare(files / f"{name}.pt2", runtime_options=ONE_THREAD) as model, model.burst() as burst:
        burst.execute(*(np.zeros_like(array) for array in inputs))
        for _ in range(3):
            assert_equal(burst.execute(*inputs), outputs)


@pytest.mark.parametrize("name", ["counter", "functional"])
def test_a_buffer_is_a_state_and_an_input_stays_as_it_was(device: nnfmq.Device, files: Path, name: str) -> None:
    x = np.float32([1, 2])
    with device.prepare(files / f"{name}.pt2") as model, model.burst() as burst, model.burst() as other:
        assert [burst.execute(x)[0].tolist() for _ in range(2)] == [[2, 4], [4, 8]]
        assert other.execute(x)[0].tolist() == [2, 4]
        assert x.tolist() == [1, 2]


def test_a_number_that_the_export_fixed_is_no_input(device: nnfmq.Device, files: Path) -> None:
    with device.prepare(files / "scaled.pt2") as model:
        assert model.execute(np.float32([1, 2]))[0].tolist() == [3, 6]


def test_a_result_that_is_no_tensor_is_refused_by_name(device: nnfmq.Device, files: Path) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match="only tensors cross"):
        device.prepare(files / "number.pt2")


def test_sizes_outside_those_of_the_export_are_refused(device: nnfmq.Device, files: Path) -> None:
    with device.prepare(files / "transformer.pt2") as model:
        assert model.execute(np.zeros((1, 1), np.int64))[0].shape == (1, 1, 16)
        with pytest.raises(nnfmq.InvalidArgument, match=r"input 'tokens': \w+ is 65; the program is for 0 to 64"):
            model.execute(np.zeros((65, 3), np.int64))
    with device.prepare(files / "pair.pt2") as model:
        assert model.execute(np.ones((3, 2), np.float32), np.ones((6, 2), np.float32))[0].shape == (9, 2)
        with pytest.raises(nnfmq.InvalidArgument, match=r"input 'y': a size is 5, but 2\*\w+ is 6"):
            model.execute(np.ones((3, 2), np.float32), np.ones((5, 2), np.float32))


def test_a_deadline_ends_the_execution_and_the_worker_stays(device: nnfmq.Device, files: Path) -> None:
    inputs, outputs = examples(files, "vision")
    x = np.zeros((1200, 1200), np.float32)
    with (
        device.prepare(files / "long.pt2") as long,
        device.prepare(files / "vision.pt2", runtime_options=ONE_THREAD) as short,
    ):
        for _ in range(2):
            with pytest.raises(nnfmq.MissedDeadline):
                long.execute(x, timeout=0.2)
            assert_equal(short.execute(*inputs), outputs)


HOSTILE = {
    "weights": "has the member 'archive/data/weights/model.pt'",
    "pickled_weight": "has the pickled object 'weight_0'",
    "library": r"has the member 'archive/data/aotinductor/model/a.so'",
    "size": "an expression of sizes is '__import__",
    "size_object": "an expression of sizes is no text",
    "number": "as_int is '__import__",
    "operator": "its graph has as_operator 'torch.os.system'",
    "object": "has the member 'archive/data/constants/opaque_obj_0'",
    "name": "is no name of a value in a graph",
    "target": "its graph calls 'torch.os.system'",
    "file": "its graph calls 'torch.ops.aten.from_file.default'",
    "save": "its graph calls 'torch.ops.aten.save.default'",
}
LEFT_OUT = ("sample_inputs", "guard", "spec")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_would_run_code_is_refused_and_runs_none(device: nnfmq.Device, files: Path, name: str) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=HOSTILE[name]):
        device.prepare(files / f"hostile_{name}.pt2")
    assert not (files / "written").exists()


@pytest.mark.parametrize("name", LEFT_OUT)
def test_code_that_an_execution_does_not_need_is_left_out(device: nnfmq.Device, files: Path, name: str) -> None:
    inputs, outputs = examples(files, "transformer")
    with device.prepare(files / f"hostile_{name}.pt2", runtime_options=ONE_THREAD) as model:
        assert_equal(model.execute(*inputs), outputs)
    assert not (files / "written").exists()


def test_a_file_whose_digest_the_driver_trusts_is_loaded_as_it_is(files: Path) -> None:
    path = files / "legacy.pt2"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    inputs, outputs = examples(files, "transformer")
    with short_folder() as made_folder:
        environment = {"NNFMQ_TRUSTED_FILES": digest}
        with running_daemon(made_folder / "d.sock", environment=environment) as daemon, daemon.connect() as client:
            with client.device("torch").prepare(path, runtime_options=ONE_THREAD) as model:
                assert_equal(model.execute(*inputs), outputs)
            with daemon.connect() as other, pytest.raises(nnfmq.InvalidArgument, match="NNFMQ_TRUSTED_FILES"):
                other.device("torch").prepare(files / "hostile_weights.pt2")


def test_what_torch_says_of_an_archive_reaches_the_caller(device: nnfmq.Device, files: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(files / "vision.pt2") as given, zipfile.ZipFile(tmp_path / "net.pt2", "w") as archive:
        for name in (name for name in given.namelist() if not name.endswith("/weight_0")):
            archive.writestr(name, given.read(name))
    with pytest.raises(nnfmq.InvalidArgument, match=r"torch: .*data/weights/weight_0: file not found"):
        device.prepare(tmp_path / "net.pt2")


def test_a_truncated_or_compressed_archive_is_refused(device: nnfmq.Device, files: Path) -> None:
    data = (files / "vision.pt2").read_bytes()
    with pytest.raises(nnfmq.InvalidArgument, match="zip"):
        device.prepare(data[: len(data) // 2])
    with pytest.raises(nnfmq.InvalidArgument, match="compressed"):
        device.prepare(files / "compressed.pt2")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"device": "mps"}, "'cpu', 'cuda' or 'cuda:N' is needed"), ({"compile": True}, "allowed are threads, device")],
)
def test_an_option_that_is_not_allowed_is_refused(
    device: nnfmq.Device, files: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=message):
        device.prepare(files / "vision.pt2", runtime_options=options)


def test_outputs_have_sizes_as_soon_as_those_of_the_inputs_are_known(device: nnfmq.Device, files: Path) -> None:
    shapes = {"x": (3, 2), "y": (6, 2)}
    with device.prepare(files / "pair.pt2", shapes=shapes) as model, model.burst() as burst:
        assert [output.shape for output in model.outputs] == [(9, 2)]
        assert burst.execute(np.ones((3, 2), np.float32), np.ones((6, 2), np.float32))[0].sum() == 18
    with pytest.raises(nnfmq.InvalidArgument, match="a size is 5"):
        device.prepare(files / "pair.pt2", shapes={"x": (3, 2), "y": (5, 2)})


def test_a_burst_of_open_sizes_takes_those_of_each_request(device: nnfmq.Device, files: Path) -> None:
    cases = [examples(files, case) for case in ("transformer", "transformer1", "transformer")]
    path = files / "transformer.pt2"
    with device.prepare(path, runtime_options=ONE_THREAD) as model, model.burst() as burst:
        for inputs, outputs in cases:
            assert_equal(burst.execute(*inputs), outputs)
