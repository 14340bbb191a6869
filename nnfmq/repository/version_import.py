"""Import of a version in a child process: its files to the HAL's model, with all constants in one memory.

    python -P -m nnfmq.repository --import STAMP FD DIRECTORY SOCKET

The child sends one message over the connection FD, ImportedModel with the fds of its memories or ImportFailed, and
exits. It exits also when the connection hangs up, in the middle of the import. It has a sandbox, in which it reads the
version only, and takes at most $NNFMQ_IMPORT_MEMORY_MIB. A file that nnfmq's own engine does not support is opened by a
device of the driver at SOCKET that hosts another runtime.
"""

from __future__ import annotations

import io
import logging
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.base.channel import Channel
from nnfmq.base.deadlines import deadline_after
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.limits import data_bytes
from nnfmq.base.log_records import ChildLog
from nnfmq.base.memory import sealed_size
from nnfmq.base.processes import (
    child_environment,
    is_child_stopped,
    kill_and_reap,
    request_signal_at_parent_exit,
)
from nnfmq.base.sandbox import sandbox
from nnfmq.base.scheduling import lower_priority
from nnfmq.base.shared_constants import SharedConstants
from nnfmq.base.upgrades import loaded_stamp, require_unchanged
from nnfmq.hal.errors import (
    DeadObject,
    ErrorStatus,
    InvalidArgument,
    MissedDeadlineTransient,
    NnfmqError,
    ProtocolError,
    UnsupportedModel,
    error_for_status,
    status_for_error,
)
from nnfmq.hal.hosted import LIBRARIES, is_file_name, is_runtime_name, library_names
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import (
    DEFAULT_PREFERENCE,
    ExecutionPreference,
    LifeTime,
    Model,
    Priority,
    Protection,
    SharedPool,
    Subgraph,
)
from nnfmq.importers import LoadedModel, load
from nnfmq.importers.file_format import Shapes, UnknownFormat
from nnfmq.importers.loaded_model import UnknownShapes
from nnfmq.serialize.message_codec import MessageCodec
from nnfmq.serialize.messages import MAX_TEXT
from nnfmq.serialize.messages.common import MemoryData, MemoryList
from nnfmq.serialize.models import encode_model

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client
    from nnfmq.client.connection.hosted_choice import Host

__all__ = [
    "FILE_NAME",
    "MODEL_FILES",
    "ImportCancellation",
    "ImportCrashed",
    "ImportFailed",
    "ImportedModel",
    "ImportedVersion",
    "VersionOptions",
    "import_in_child",
    "import_in_process",
    "import_version",
    "read_options",
]


# ----------------------------------------------------------------------------------------------------------------------
# The options of a version: the file `model.toml` beside its model (docs/reference/model-options.md).


FILE_NAME = "model.toml"
_BYTES_MAX = 64 * 1024
_DEVICE_CHARACTERS_MAX = 256
_BATCH_MAX = 65536
_SHAPES_MAX, _RANK_MAX, _SIZE_MAX = 256, 32, 2**31 - 1
_SHOWN_CHARACTERS = 80


class VersionOptions(msgspec.Struct, frozen=True):
    """The options in a version's `model.toml`, or the defaults.

    `device` is empty for the best available one. `signature` is None for a file's first subgraph. `shapes` has new
    shapes of inputs, by name. `batch` is 1 unless the model's inputs get this first dimension. `runtime_options` are
    those of a hosted runtime, which then executes the model. `deterministic` is that of `Device.prepare`.
    """

    device: str = ""
    preference: int = DEFAULT_PREFERENCE
    priority: int = Priority.MEDIUM
    batch: int = 1
    signature: str | None = None
    shapes: dict[str, tuple[int, ...]] = {}
    runtime_options: dict[str, Any] = {}
    deterministic: bool = False


class _Key(NamedTuple):
    """The values of a key; `value` converts one to that of the option, None = it is not allowed."""

    allowed: str
    value: Callable[[Any], object]


_PREFERENCES = {
    "low_power": ExecutionPreference.LOW_POWER,
    "fast_single_answer": ExecutionPreference.FAST_SINGLE_ANSWER,
    "sustained_speed": ExecutionPreference.SUSTAINED_SPEED,
}
_PRIORITIES = {"low": Priority.LOW, "medium": Priority.MEDIUM, "high": Priority.HIGH}


def _text(value: Any) -> object:
    return value if isinstance(value, str) and 0 < len(value) <= _DEVICE_CHARACTERS_MAX else None


def _batch(value: Any) -> object:
    return value if _is_size(value) and value <= _BATCH_MAX else None


def _shapes(value: Any) -> object:
    is_table = isinstance(value, dict) and 0 < len(value) <= _SHAPES_MAX
    return (
        {name: tuple(shape) for name, shape in value.items()}
        if is_table and all(map(_is_shape, value.values()))
        else None
    )


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _RANK_MAX and all(map(_is_size, value))


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _SIZE_MAX  # a bool is no size


def _runtime_options(value: Any) -> object:
    return value if isinstance(value, dict) and value and _is_json(value) else None


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_json, value.values()))
    return all(map(_is_json, value)) if isinstance(value, list) else isinstance(value, (str, int, float, bool))


def _one_of(names: Mapping[str, int]) -> _Key:
    return _Key(", ".join(map(repr, names)), lambda value: names.get(value) if isinstance(value, str) else None)


def _flag(value: Any) -> object:
    return value if isinstance(value, bool) else None


_KEYS: dict[str, _Key] = {
    "device": _Key("the name of a device of the driver", _text),
    "preference": _one_of(_PREFERENCES),
    "priority": _one_of(_PRIORITIES),
    "batch": _Key(f"an integer from 1 to {_BATCH_MAX}", _batch),
    "signature": _Key("the name of a signature of the model file", _text),
    "shapes": _Key("a table of shapes by the names of inputs, each an array of integers of at least 1", _shapes),
    "runtime_options": _Key("a table of options of a hosted runtime, values of JSON", _runtime_options),
    "deterministic": _Key("true or false", _flag),
}


def read_options(folder: Path) -> VersionOptions:
    """Return the options of the version in `folder`; the defaults if it has no such file. Blocks.

    Raises:
        InvalidArgument: If the file is not valid; the message names the key, the value and what is allowed.
        OSError: If the file cannot be read.
    """
    try:
        fd = os.open(folder / FILE_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block without it
    except FileNotFoundError:
        return VersionOptions()
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidArgument(f"{FILE_NAME} is no regular file")
        data = os.read(fd, _BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > _BYTES_MAX:
        raise InvalidArgument(f"{FILE_NAME} has more than {_BYTES_MAX} bytes")
    try:
        table = msgspec.toml.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{FILE_NAME} is no TOML: {error}") from None
    return VersionOptions(**{name: _checked(name, value) for name, value in table.items()})


def _checked(name: str, value: object) -> Any:
    key = _KEYS.get(name)
    if key is None:
        raise InvalidArgument(f"{FILE_NAME}: there is no key {name!r}; allowed: {', '.join(_KEYS)}")
    checked = key.value(value)
    if checked is None:
        raise InvalidArgument(f"{FILE_NAME}: {name} is {repr(value)[:_SHOWN_CHARACTERS]}; allowed: {key.allowed}")
    return checked


# ----------------------------------------------------------------------------------------------------------------------
# Import of a version: its files to the HAL's model, with all constants in one memory. Runs in a child process.


MODEL_FILES = ("model.tflite", "model.onnx", "model.xml", "model.pt2", "model.jax")
CONNECT_S = 30.0
_OOM_SCORE = 500  # of 1000: if memory runs out, the kernel kills this process before the others of the driver
_MIB = 1 << 20
_log = logging.getLogger("nnfmq.repository")


class ImportedModel(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A version's model as `serialize.models.encode_model` returns it, its interface, and its options.

    The fds of the memories `pools` come with the message.
    """

    options: VersionOptions
    model: bytes
    pools: MemoryList
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[StateInfo, ...]


class ImportFailed(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Why a version cannot be imported."""

    status: ErrorStatus
    message: Annotated[str, Meta(max_length=MAX_TEXT)]


ImportResult: TypeAlias = ImportedModel | ImportFailed


class _Sender(Enum):
    CHILD = "child"


_codec: MessageCodec[ImportResult] = MessageCodec(
    {_Sender.CHILD: (ImportedModel, ImportFailed)}, {ImportedModel: "pools"}
)


# ------------------------------------------------------------------------------------------------ the child


def import_in_child(fd: int, folder: Path, socket: Path | None = None) -> None:
    """Import the version in `folder` and send the result over the connection `fd`, which this takes ownership of.

    The kernel kills this process when the parent's thread that started it exits.
    """
    request_signal_at_parent_exit(signal.SIGKILL)
    lower_priority(is_background=False)
    sandbox.enter(_sandbox(folder, socket))
    with Channel.adopt(fd) as channel, suppress(DeadObject):
        if _has_hung_up(channel.fileno()):
            return  # the parent exited before the kernel was asked
        result, memories = _result(folder, socket)
        channel.send(_codec.encode(result), [memory.fileno() for memory in memories])


def _sandbox(folder: Path, socket: Path | None) -> sandbox.Sandbox:
    """Return the sandbox of an import: it may read its version, also what its links name, and ask the driver."""
    limit = data_bytes() + settings.IMPORT_MEMORY_MIB.value() * _MIB
    names: list[str] = []
    with suppress(OSError):  # the import says that the folder is gone, or may not be read
        names = [os.path.realpath(entry.path) for entry in os.scandir(folder)]
    return sandbox.Sandbox(
        reads=(os.path.realpath(folder), *names),
        connects=socket is not None,
        oom_score=_OOM_SCORE,
        limits=((resource.RLIMIT_DATA, limit),),
    )


def _has_hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)  # no events: poll(2) reports POLLHUP and POLLERR in any case
    return bool(poll.poll(0))


def _result(folder: Path, socket: Path | None) -> tuple[ImportResult, Sequence[SharedPool]]:
    try:
        return import_version(folder, socket)
    except NnfmqError as error:
        return _failed(status_for_error(error), str(error).replace(f"{folder}{os.sep}", "")), []
    except OSError as error:
        return _failed(ErrorStatus.DEVICE_UNAVAILABLE, f"the files cannot be read: {error.strerror or error}"), []
    except MemoryError:
        limit = (
            f"{settings.IMPORT_MEMORY_MIB.value()} MiB, which ${settings.IMPORT_MEMORY_MIB.variable} of the driver sets"
        )
        text = f"the import of the model needs more than {limit}, or there is not enough memory"
        return _failed(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, text), []
    except Exception as error:  # noqa: BLE001  a bug of an importer fails this version
        _log.exception("the import of %s failed", folder)
        return _failed(ErrorStatus.GENERAL_FAILURE, f"the import failed: {error!r}"), []


def _failed(status: ErrorStatus, text: str) -> ImportFailed:
    return ImportFailed(status, text[:MAX_TEXT])


def import_version(folder: Path, socket: Path | None = None) -> tuple[ImportedModel, Sequence[SharedPool]]:
    """Return the model in `folder` and its memories. Blocks.

    `socket` is that of the driver; None: no hosted runtime is asked.

    Raises:
        InvalidArgument: If there is not exactly one model file, or it, or an option, is not valid.
        DeviceUnavailable: If the driver cannot be reached.
        ResourceExhausted: If there is not enough memory for the constants.
        OSError: If a file cannot be read.
    """
    options = read_options(folder)
    loaded, device = _load(_model_file(folder), options, socket)
    data, pools = encode_model(_with_shared_constants(loaded.model))
    described = tuple(MemoryData(pool.size_bytes, 0, int(Protection.READ)) for pool in pools)
    options = replace(options, device=device)
    imported = ImportedModel(options, data, described, loaded.inputs, loaded.outputs, loaded.states)
    return imported, cast("Sequence[SharedPool]", pools)


def _model_file(folder: Path) -> Path:
    """Return the only file with one of the names of model files; without one, the only `model.*` of another format."""
    found = [name for name in MODEL_FILES if (folder / name).is_file()]
    if not found:  # of the format of a plug-in's runtime
        found = sorted(path.name for path in folder.glob("model.*") if path.is_file() and path.name != FILE_NAME)
    if len(found) != 1:
        has = f"has both {' and '.join(found)}" if found else "has no model"
        raise InvalidArgument(f"the version {has}; it needs one file, {' or '.join(MODEL_FILES)}")
    return folder / found[0]


def _load(file: Path, options: VersionOptions, socket: Path | None) -> tuple[LoadedModel, str]:
    """Return the model, and the device of the options, or the one that runs a file which nnfmq's engine refuses."""
    refusal = None
    if not options.runtime_options and not is_runtime_name(options.device):
        try:
            loaded = _batched(lambda shapes: load(file, shapes=shapes, signature=options.signature), options)
            return loaded, options.device
        except (UnsupportedModel, UnknownShapes, UnknownFormat) as error:
            if socket is None:
                raise
            refusal = error
    if socket is None:
        raise InvalidArgument(f"device {options.device!r} hosts a runtime: only a driver opens the file")
    return _load_hosted(file, options, refusal, socket)


def _load_hosted(
    file: Path, options: VersionOptions, refusal: InvalidArgument | None, socket: Path
) -> tuple[LoadedModel, str]:
    """Return the model that runs a file on a hosted runtime of the driver, and the device."""
    from nnfmq.client.connection.connect import connect
    from nnfmq.client.connection.hosted_choice import FileOptions, GivenModel, Hosting

    shapes: Shapes = {name: tuple(shape) for name, shape in options.shapes.items()}
    runtime_options = _with_own_libraries(options.runtime_options, file.parent) or None
    of_file = FileOptions(shapes=shapes, signature=options.signature, runtime_options=runtime_options)

    def batched(host: Host, loaded: LoadedModel) -> tuple[LoadedModel, str]:
        def reload(shapes: Shapes) -> LoadedModel:
            given = FileOptions(**{**of_file, "shapes": shapes})
            return loaded if shapes == of_file["shapes"] else host.load(file, **given)

        return _batched(reload, options), host.name

    with connect(socket, timeout=CONNECT_S, recover=False) as client:
        hosting = Hosting(_hosts(client, options.device), client.why_absent)
        if options.device and not hosting.hosts:
            assert refusal is not None  # otherwise the device hosts a runtime, or the driver has none of that name
            raise refusal
        return hosting.first(GivenModel(None, file, of_file, refusal), None, batched)


def _with_own_libraries(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return options of a hosted runtime, with the paths of the libraries that they name: files of the version."""
    names = library_names(options.get(LIBRARIES, []))
    if others := [name for name in names if not is_file_name(name)]:
        raise InvalidArgument(f"{LIBRARIES}: {others[0]!r:.80} is no file of the version's folder")
    return {**options, LIBRARIES: [str(folder / name) for name in names]} if names else options


def _hosts(client: Client, name: str) -> list[Host]:
    """Return the devices of the driver that host a runtime; of a name, that one or nothing.

    Raises:
        InvalidArgument: If there is no device of that name.
    """
    from nnfmq.client.connection.device import hosts_runtime
    from nnfmq.client.connection.hosted_choice import Host

    infos = [client.device(name).info] if name else client.devices()
    return [Host.of(client.device_of(info)) for info in infos if hosts_runtime(info)]


def _batched(load: Callable[[Shapes], LoadedModel], options: VersionOptions) -> LoadedModel:
    """Return the model of `load` for the shapes of the options, with a batch if they have one."""
    shapes: Shapes = {name: tuple(shape) for name, shape in options.shapes.items()}
    loaded = load(shapes)
    if options.batch == 1:
        return loaded
    if loaded.states:
        raise InvalidArgument("batch: the model has states, which the rows of a batch would share")
    shapes = {index: (options.batch, *_row_shape(info)) for index, info in enumerate(loaded.inputs)}
    batched = load(shapes)
    _check_rows(loaded.outputs, batched.outputs, options.batch)
    return batched


def _row_shape(info: TensorInfo) -> tuple[int, ...]:
    if not info.shape:
        raise InvalidArgument(f"batch: input {info.name!r} is a scalar, which has no first dimension")
    return info.shape[1:]


def _check_rows(before: Sequence[TensorInfo], after: Sequence[TensorInfo], batch: int) -> None:
    """Raise InvalidArgument unless each output has `batch` rows of the shape that it had."""
    for old, new in zip(before, after, strict=True):
        expected = (batch, *old.shape[1:])
        if new.shape != expected or not old.shape:
            raise InvalidArgument(
                f"batch: with inputs of {batch} rows the output {new.name!r} has the shape {new.shape}, not {expected}"
            )


def _with_shared_constants(model: Model) -> Model:
    """Return the model with its constants in a memory that nobody can change, its last pool, if it has constants.

    The files of a hosted model are in such memories already.
    """
    values = model.operand_values
    if not values:
        return model
    memory, _ = SharedConstants.of_values([memoryview(values)])
    graphs = [_referring(graph, len(model.pools)) for graph in (model.main, *model.referenced)]
    pools = (*model.pools, memory)
    return replace(model, main=graphs[0], referenced=tuple(graphs[1:]), operand_values=b"", pools=pools)


def _referring(graph: Subgraph, pool: int) -> Subgraph:
    """Return a subgraph whose constants are in a pool of this index, at the same offsets."""
    operands = (
        replace(
            operand,
            lifetime=LifeTime.CONSTANT_REFERENCE,
            location=replace(operand.location, pool_index=pool),
        )
        if operand.lifetime == LifeTime.CONSTANT_COPY
        else operand
        for operand in graph.operands
    )
    return replace(graph, operands=tuple(operands))


# ----------------------------------------------------------------------------------------------------------------------
# The parent: it starts the child, waits for its result with a deadline, kills it then, and learns by its exit status of
# a crash.


TIMEOUT_S = 600.0
_EXIT_S = 5.0  # from the end of the connection to the exit
_PIPE_BYTES = 64 * 1024


class ImportCrashed(Exception):
    """The child process ended, or was killed, without a result."""


class ImportedVersion(NamedTuple):
    """The model of a version, and its memories, which nobody can change. The receiver closes these."""

    model: ImportedModel
    memories: tuple[FileMemory, ...]

    def close(self) -> None:
        """Close the memories. Idempotent."""
        for memory in self.memories:
            memory.close()


class ImportCancellation:
    """Lets any thread end an import at any time, also before it begins: it then raises ImportCrashed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cancelled = self._was_stopped = False

    def cancel(self) -> None:
        """Kill the import's process. Idempotent. Does not wait for its end."""
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.kill()

    def end_if_stopped(self) -> None:
        """Kill the import's process if it is stopped, and if it was when this was called before."""
        with self._lock:
            was_stopped = self._was_stopped
            self._was_stopped = self._process is not None and is_child_stopped(os.P_PID, self._process.pid)
            if self._process is not None and was_stopped and self._was_stopped:
                self._process.kill()

    def started(self, process: subprocess.Popen[bytes]) -> None:
        """Note the import's process; kill it if the import was cancelled before."""
        with self._lock:
            self._process = process
            if self._is_cancelled:
                process.kill()


def import_in_process(
    folder: Path, socket: Path | None = None, cancellation: ImportCancellation | None = None
) -> ImportedVersion:
    """Import the version in `folder` in a child process; blocks until that has ended. The caller closes the result.

    `socket` is that of the driver whose hosted runtimes may open the file; None: none is asked.

    Raises:
        NnfmqError: Why the version cannot be imported: also if nnfmq was upgraded under this process.
        ImportCrashed: If the process ends without a result, or takes longer than TIMEOUT_S.
        OSError: If the process cannot be started.
    """
    require_unchanged()
    with _child(folder, socket) as (channel, process):
        if cancellation is not None:
            cancellation.started(process)
        try:
            result, memories = _receive(channel)
        except DeadObject:
            raise ImportCrashed(f"the import process {_ending(process)}") from None
        except MissedDeadlineTransient:
            raise ImportCrashed(f"the import took longer than {TIMEOUT_S:g} s") from None
        except ProtocolError as error:
            raise ImportCrashed(f"the import process sent no valid result: {error}") from error
    if isinstance(result, ImportFailed):
        raise error_for_status(result.status, result.message)
    return ImportedVersion(result, memories)


@contextmanager
def _child(folder: Path, socket: Path | None) -> Iterator[tuple[Channel, subprocess.Popen[bytes]]]:
    """Start the process; yield the connection to it. At the end it is killed, if it still runs, and reaped if it ends.

    Then what it has logged, or written to stdout and stderr, is logged, as far as it did fit into a pipe.
    """
    parent_end, child_end = Channel.pair()
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with parent_end, open(reading, "rb", buffering=0) as pipe:
        with child_end, open(writing, "wb", buffering=0):
            fd = child_end.fileno()
            arguments = ["--import", loaded_stamp(), str(fd), str(folder), str(socket or "")]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nnfmq.repository", *arguments],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=child_environment(),
            )
        try:
            yield parent_end, process
        finally:
            kill_and_reap(process)
            _log_output(pipe, process.pid)


def _log_output(pipe: io.FileIO, pid: int) -> None:
    log = ChildLog("an import")
    log.pid = pid
    log.write(pipe.read(_PIPE_BYTES) or b"")  # None: it was empty, and a process of the import's still has it
    log.end()


def _receive(channel: Channel) -> tuple[ImportedModel | ImportFailed, tuple[FileMemory, ...]]:
    with channel.receive(deadline_after(TIMEOUT_S)) as frame, ExitStack() as undo:
        if frame.fds_truncated:
            raise ProtocolError("this process has no free descriptors (ulimit -n)")
        result = _codec.decode(frame.data, sender=_Sender.CHILD, fds=frame.fd_count)
        sizes = [pool.size_bytes for pool in result.pools] if isinstance(result, ImportedModel) else []
        memories: list[FileMemory] = []
        for size in sizes:  # the fds that are left after an error are closed with the frame
            if sealed_size(frame.fds[0]) != size:
                raise ProtocolError("a memory of the model is not sealed, or has another size than stated")
            memories.append(undo.enter_context(FileMemory.adopt(frame.fds.pop(0), size, 0, Protection.READ)))
        undo.pop_all()
    return result, tuple(memories)


def _ending(process: subprocess.Popen[bytes]) -> str:
    """Say how a process that has closed its connection ended."""
    try:
        status = process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        return "closed its connection without a result"
    return f"was killed by signal {-status}" if status < 0 else f"exited with status {status} and sent no result"
