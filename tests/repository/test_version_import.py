"""The import of a version: one memory for all constants, the batch, and the child process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from support.drivers import Process
from support.model_folders import adder
from support.tflite_files import Operator, Tensor, floats, single, writer

import nnfmq
from nnfmq.base import processes
from nnfmq.base.channel import Channel
from nnfmq.base.memory import CONSTANT_SEALS, Memory
from nnfmq.engines import interpreter
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import LifeTime, Model, Protection, SharedPool
from nnfmq.importers import LoadedModel
from nnfmq.repository import version_import
from nnfmq.repository.version_import import (
    ImportCrashed,
    ImportedModel,
    ImportFailed,
    import_in_process,
    import_version,
)
from nnfmq.serialize.models import decode_model
from nnfmq.validation.models import validate_model


def version(folder: Path, content: bytes, options: str = "") -> Path:
    (folder / "model.tflite").write_bytes(content)
    (folder / "model.toml").write_text(options)
    return folder


@contextmanager
def imported(folder: Path) -> Iterator[tuple[ImportedModel, Sequence[SharedPool]]]:
    yield import_version(folder)


def computed(model: Model, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the output, of the input's shape, that the interpreter computes from a valid model."""
    validate_model(model)
    result = np.empty_like(x)
    interpreter.prepare(model).execute([x], [result])
    return result


def test_all_constants_are_in_one_sealed_memory_and_the_model_computes_the_same(tmp_path: Path) -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 4)
    with imported(version(tmp_path, adder(3))) as (sent, memories):
        assert [(pool.size_bytes, pool.protection) for pool in sent.pools] == [
            (memories[0].size_bytes, Protection.READ)
        ]
        model = decode_model(sent.model, memories)
        kinds = {operand.lifetime for operand in model.main.operands}
        assert LifeTime.CONSTANT_REFERENCE in kinds and LifeTime.CONSTANT_COPY not in kinds
        assert model.operand_values == b""
        result = computed(model, x)
        assert (result == x + 3).all()
        assert sent.inputs == (TensorInfo("x", (1, 4), "float32"),)
        assert sent.outputs == (TensorInfo("y", (1, 4), "float32"),)


def calling() -> bytes:
    """Return a model that adds a constant in a subgraph, which an IF calls."""
    tensors = [Tensor("c", (1,), "BOOL"), Tensor("x", (1, 4)), Tensor("y", (1, 4))]
    constant = Tensor("v", (1, 4), data=floats(1, 4))
    branch = writer.Subgraph(
        [Tensor("x", (1, 4)), constant, Tensor("y", (1, 4))],
        [Operator("ADD", (0, 1), (2,), "AddOptions", {})],
        (0,),
        (2,),
    )
    operator = Operator("IF", (0, 1), (2,), "IfOptions", {"ThenSubgraphIndex": 1, "ElseSubgraphIndex": 1})
    data: bytes = writer.write(tensors, [operator], (0, 1), (2,), more=[branch])
    return data


def test_the_constants_of_called_subgraphs_are_in_it_too(tmp_path: Path) -> None:
    with imported(version(tmp_path, calling())) as (sent, memories):
        model = decode_model(sent.model, memories)
        validate_model(model)
        kinds = [{operand.lifetime for operand in graph.operands} for graph in model.referenced]
        assert kinds and all(LifeTime.CONSTANT_REFERENCE in found for found in kinds)
        assert all(LifeTime.CONSTANT_COPY not in found for found in kinds)


def test_a_batch_becomes_the_first_dimension_of_inputs_and_outputs(tmp_path: Path) -> None:
    with imported(version(tmp_path, adder(2), "batch = 8")) as (sent, memories):
        assert (sent.inputs[0].shape, sent.outputs[0].shape, sent.options.batch) == ((8, 4), (8, 4), 8)
        x = np.arange(32, dtype=np.float32).reshape(8, 4)
        result = computed(decode_model(sent.model, memories), x)
        assert (result == x + 2).all()


def test_a_batch_of_one_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    with imported(version(tmp_path, adder(2, shape=(3, 4)), "batch = 1")) as (sent, _):
        assert (sent.inputs[0].shape, sent.options.batch) == ((3, 4), 1)


def mean_over_rows() -> bytes:
    """Return a model whose output has one row, whatever the input has."""
    tensors = [Tensor("x", (1, 4)), Tensor("axes", (1,), "INT32", bytes(4)), Tensor("y", (1, 4))]
    return single("MEAN", tensors, "ReducerOptions", {"KeepDims": True})


def test_a_batch_that_the_outputs_do_not_have_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=r"with inputs of 8 rows the output 'y' has the shape \(1, 4\)"):
        import_version(version(tmp_path, mean_over_rows(), "batch = 8"))


def test_a_batch_needs_inputs_with_a_first_dimension(tmp_path: Path) -> None:
    scalar = single("ABS", [Tensor("x", ()), Tensor("y", ())])
    with pytest.raises(nnfmq.InvalidArgument, match="input 'x' is a scalar, which has no first dimension"):
        import_version(version(tmp_path, scalar, "batch = 8"))


def test_a_model_with_states_has_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path, **_: object) -> LoadedModel:
        loaded = nnfmq.load(path)
        return msgspec.structs.replace(loaded, states=(StateInfo(loaded.inputs[0]),))

    monkeypatch.setattr(version_import, "load", load)
    with pytest.raises(nnfmq.InvalidArgument, match="the model has states, which the rows of a batch would share"):
        import_version(version(tmp_path, adder(1), "batch = 8"))


def test_a_signature_can_be_chosen(tmp_path: Path) -> None:
    operator = Operator("ABS", (0,), (1,), "", {})
    signature = writer.Signature("serve", {"given": 0}, {"found": 1})
    tensors = [Tensor("x", (1, 2)), Tensor("y", (1, 2))]
    data = writer.write(tensors, [operator], (0,), (1,), signatures=[signature])
    with imported(version(tmp_path, data, 'signature = "serve"\nbatch = 3')) as (sent, _):
        assert sent.inputs == (TensorInfo("given", (3, 2), "float32"),)
        assert sent.outputs == (TensorInfo("found", (3, 2), "float32"),)


def test_sizes_that_an_onnx_file_leaves_open_come_from_the_options(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 4]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Abs", ["x"], ["y"])], "g", [x], [y])
    (tmp_path / "model.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    with pytest.raises(nnfmq.InvalidArgument, match="sizes of dimensions are not known"):
        import_version(tmp_path)
    for batch in (1, 8):
        (tmp_path / "model.toml").write_text(f"batch = {batch}\nshapes = {{ x = [1, 4] }}")
        with imported(tmp_path) as (sent, _):
            assert (sent.inputs[0].shape, sent.outputs[0].shape) == ((batch, 4), (batch, 4))


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_model_that_is_no_file_does_not_count(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "model.tflite")
    with pytest.raises(nnfmq.InvalidArgument, match="the version has no model; it needs one file"):
        import_version(tmp_path)


def test_a_model_without_constants_has_no_memory(tmp_path: Path) -> None:
    with imported(version(tmp_path, single("ABS", [Tensor("x", (1, 2)), Tensor("y", (1, 2))]))) as (sent, memories):
        assert (memories, sent.pools) == ((), ())


# ---------------------------------------------------------------------------------------------------------- the child


def test_the_child_sends_the_model_and_its_memory(tmp_path: Path) -> None:
    found = import_in_process(version(tmp_path, adder(2), 'device = "reference"'))
    assert found.model.options.device == "reference"
    (memory,) = found.memories
    with Memory.adopt_constant(os.dup(memory.fileno())) as mapped:  # fails unless it is sealed
        model = decode_model(found.model.model, [mapped])
        assert (computed(model, np.ones((1, 4), np.float32)) == 3).all()
    found.close()
    assert memory.closed


def test_the_child_reports_why_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=r"^model\.tflite: corrupt or truncated file"):
        import_in_process(version(tmp_path, adder(2)[:-100]))


def fail_with(error: BaseException) -> ImportFailed:
    """Return what a child sends whose import raises `error`."""

    def fail(_folder: Path, _socket: Path | None) -> None:
        raise error

    near, far = Channel.pair()
    with pytest.MonkeyPatch.context() as patch, near:
        patch.setattr(version_import, "import_version", fail)
        patch.setattr(version_import, "request_signal_at_parent_exit", lambda number: None)
        patch.setattr(version_import.sandbox, "enter", lambda _: None)  # this process must stay as it is
        patch.setattr(version_import, "lower_priority", lambda is_background: None)
        version_import.import_in_child(far.detach(), Path("/models/m/1"))
        with near.receive() as frame:
            assert frame.fds == []
            return msgspec.msgpack.decode(frame.data, type=ImportFailed)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (nnfmq.InvalidArgument("/models/m/1/model.tflite: bad"), ErrorStatus.INVALID_ARGUMENT, "model.tflite: bad"),
        (OSError(5, "Input/output error"), ErrorStatus.DEVICE_UNAVAILABLE, "the files cannot be read: Input/output"),
        (MemoryError(), ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, "the import of the model needs more than 1024 MiB, "),
        (KeyError("bug"), ErrorStatus.GENERAL_FAILURE, "the import failed: KeyError('bug')"),
        (nnfmq.InvalidArgument("x" * 10_000), ErrorStatus.INVALID_ARGUMENT, "x" * 4096),
    ],
    ids=["invalid", "unreadable", "memory", "bug", "long"],
)
def test_each_error_of_an_import_has_its_status(error: Exception, status: ErrorStatus, message: str) -> None:
    result = fail_with(error)
    assert result.status is status
    assert result.message.startswith(message) and len(result.message) <= 4096


def run_instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the child be a program of the test; its arguments are the fd, the folder and the socket."""
    start = version_import.subprocess.Popen

    def popen(words: list[str], **options: object) -> object:
        return start([words[0], "-P", "-c", code, *words[-3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(version_import.subprocess, "Popen", popen)


SEND = "import sys, os, signal, fcntl\nfrom nnfmq.base.channel import Channel\nc = Channel.adopt(int(sys.argv[1]))\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(3)", "the import process exited with status 3 and sent no result"),
        ("import os; os.kill(os.getpid(), 11)", "the import process was killed by signal 11"),
        (SEND + "c.send(b'nothing')", "the import process sent no valid result: the child may not send these 7 bytes"),
        (
            SEND + "from nnfmq.repository.version_import import *\nimport msgspec\n"
            "c.send(msgspec.msgpack.encode(ImportFailed(3, '')), [os.memfd_create('m')])",
            "ImportFailed came with 1 file descriptors instead of 0",
        ),
    ],
    ids=["exit", "signal", "no message", "surplus fd"],
)
def test_a_child_without_a_valid_result_has_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    run_instead(monkeypatch, code)
    with pytest.raises(ImportCrashed) as raised:
        import_in_process(tmp_path)
    assert message in str(raised.value)


@pytest.mark.parametrize(("seals", "size"), [(0, 8), (CONSTANT_SEALS, 9)], ids=["unsealed", "another size"])
def test_a_memory_that_is_not_what_the_child_says_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seals: int, size: int
) -> None:
    code = SEND + (
        "import msgspec\nfrom nnfmq.repository.version_import import *\n"
        "from nnfmq.repository.version_import import VersionOptions\n"
        "from nnfmq.serialize.messages.common import MemoryData\n"
        "fd = os.memfd_create('m', os.MFD_ALLOW_SEALING)\nos.write(fd, bytes(8))\n"
        f"fcntl.fcntl(fd, fcntl.F_ADD_SEALS, {seals})\n"
        f"model = ImportedModel(VersionOptions(), b'', (MemoryData({size}),), (), (), ())\n"
        "c.send(msgspec.msgpack.encode(model), [fd])"
    )
    run_instead(monkeypatch, code)
    with pytest.raises(ImportCrashed, match="is not sealed, or has another size than stated"):
        import_in_process(tmp_path)


def test_a_child_that_takes_too_long_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_import, "TIMEOUT_S", 0.2)
    run_instead(monkeypatch, "import signal; signal.pause()")
    with pytest.raises(ImportCrashed, match=r"the import took longer than 0\.2 s"):
        import_in_process(tmp_path)


def test_a_child_that_closes_its_connection_and_stays_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_import, "_EXIT_S", 0.2)
    run_instead(monkeypatch, SEND + "c.close(); signal.pause()")
    with pytest.raises(ImportCrashed, match="the import process closed its connection without a result"):
        import_in_process(tmp_path)


def test_a_killed_child_that_does_not_end_is_waited_for_with_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(version_import, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(processes, "KILLED_S", 0.1)
    run_instead(monkeypatch, "import signal; signal.pause()")
    start, started = version_import.subprocess.Popen, []

    def unkillable(*words: Any, **options: Any) -> Any:
        started.append(process := start(*words, **options))
        process.kill = lambda: None  # type: ignore[method-assign]
        return process

    monkeypatch.setattr(version_import.subprocess, "Popen", unkillable)
    with pytest.raises(ImportCrashed, match=r"the import took longer than 0\.2 s"):
        import_in_process(tmp_path)
    (process,) = started
    assert process.returncode is None
    assert f"process {process.pid} has been killed and does not end" in caplog.text
    del process.kill
    process.kill()
    process.wait()


def test_a_child_imports_nothing_for_a_parent_that_has_exited() -> None:
    near, far = Channel.pair()
    near.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version_import, "request_signal_at_parent_exit", lambda number: None)
        patch.setattr(version_import.sandbox, "enter", lambda _: None)  # this process must stay as it is
        patch.setattr(version_import, "lower_priority", lambda is_background: None)
        patch.setattr(version_import, "import_version", lambda folder, socket: pytest.fail("it imports"))
        version_import.import_in_child(far.detach(), Path("/models/m/1"))


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_a_child_ends_with_its_parent_in_the_middle_of_an_import(is_stopped: bool, tmp_path: Path) -> None:
    child = (
        "import sys, signal\nfrom pathlib import Path\nfrom nnfmq.repository import version_import as v\n"
        "v.import_version = lambda folder, socket: print('importing', flush=True) or signal.pause()\n"
        "v.import_in_child(int(sys.argv[1]), Path(sys.argv[2]))"
    )
    parent = (
        "import subprocess, sys\nfrom nnfmq.base.channel import Channel\nnear, far = Channel.pair()\n"
        f"child = subprocess.Popen([sys.executable, '-P', '-c', {child!r}, str(far.fileno()), {str(tmp_path)!r}],"
        " pass_fds=[far.fileno()])\nprint(child.pid, flush=True)\nchild.wait()"
    )
    command = [version_import.sys.executable, "-P", "-c", parent]
    with version_import.subprocess.Popen(command, stdout=version_import.subprocess.PIPE) as program:
        assert program.stdout is not None
        with Process(int(program.stdout.readline())) as process:
            assert program.stdout.readline() == b"importing\n"
            if is_stopped:
                process.stop()
            program.kill()
            process.wait_for_end()
