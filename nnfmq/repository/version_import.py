"""Import of a version: its files to the HAL's model, with all constants in one memory. Runs in a child process.

    python -P -m nnfmq.repository --import FD DIRECTORY

The child sends one message over the connection FD, ImportedModel with the fds of its memories or ImportFailed, and
exits. It exits also when the connection hangs up, in the middle of the import.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from nnfmq.channel import Channel
from nnfmq.hal.errors import DeadObject, ErrorStatus, InvalidArgument, NnfmqError, ProtocolError, status_for_error
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import LifeTime, Model, Protection, Subgraph
from nnfmq.importers import LoadedModel, load
from nnfmq.importers.file_format import Shapes
from nnfmq.memory import Memory
from nnfmq.parent_exit import request_signal_at_parent_exit
from nnfmq.repository.version_options import VersionOptions, read_options
from nnfmq.serialize.messages import MAX_TEXT
from nnfmq.serialize.messages.common import MemoryData, MemoryList
from nnfmq.serialize.model_codec import encode_model

__all__ = ["MODEL_FILES", "ImportFailed", "ImportedModel", "decode_result", "import_in_child", "import_version"]

MODEL_FILES = ("model.tflite", "model.onnx")
_OOM_SCORE_ADJ = "500"  # of 1000: if memory runs out, the kernel kills this process before the others of the driver
_log = logging.getLogger("nnfmq.repository")


class ImportedModel(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A version's model as `model_codec.encode_model` returns it, its interface, and its options.

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
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ImportResult)


def decode_result(data: bytearray, fds: int) -> ImportResult:
    """Return the message of a child, which came with `fds` file descriptors.

    Raises:
        ProtocolError: If it is none, or the number of fds is wrong.
    """
    try:
        result: ImportResult = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes are no result of an import: {error}") from error
    expected = len(result.pools) if isinstance(result, ImportedModel) else 0
    if fds != expected:
        raise ProtocolError(f"the result of an import has {expected} memories and came with {fds} fds")
    return result


# ------------------------------------------------------------------------------------------------ the child


def import_in_child(fd: int, folder: Path) -> None:
    """Import the version in `folder` and send the result over the connection `fd`, which this takes ownership of.

    The kernel kills this process when the parent's thread that started it exits.
    """
    request_signal_at_parent_exit(signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE_ADJ)
    with Channel.adopt(fd) as channel, ExitStack() as stack, suppress(DeadObject):
        if _has_hung_up(channel.fileno()):
            return  # the parent exited before the kernel was asked
        result, memories = _result(folder, stack)
        channel.send(_encoder.encode(result), [memory.fileno() for memory in memories])


def _has_hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)  # no events: poll(2) reports POLLHUP and POLLERR in any case
    return bool(poll.poll(0))


def _result(folder: Path, stack: ExitStack) -> tuple[ImportResult, list[Memory]]:
    try:
        imported, memories = import_version(folder)
    except NnfmqError as error:
        return _failed(status_for_error(error), str(error).replace(f"{folder}{os.sep}", "")), []
    except OSError as error:
        return _failed(ErrorStatus.DEVICE_UNAVAILABLE, f"the files cannot be read: {error.strerror or error}"), []
    except MemoryError:
        return _failed(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, "there is not enough memory to import the model"), []
    except Exception as error:  # noqa: BLE001  a bug of an importer fails this version
        _log.exception("the import of %s failed", folder)
        return _failed(ErrorStatus.GENERAL_FAILURE, f"the import failed: {error!r}"), []
    for memory in memories:
        stack.enter_context(memory)
    return imported, memories


def _failed(status: ErrorStatus, text: str) -> ImportFailed:
    return ImportFailed(status, text[:MAX_TEXT])


def import_version(folder: Path) -> tuple[ImportedModel, list[Memory]]:
    """Return the model in `folder` and its memories, which the caller closes. Blocks.

    Raises:
        InvalidArgument: If there is not exactly one model file, or it, or an option, is not valid.
        ResourceExhausted: If there is not enough memory for the constants.
        OSError: If a file cannot be read.
    """
    options = read_options(folder)
    loaded = _load(_model_file(folder), options)
    model, memories = _with_shared_constants(loaded.model)
    data, pools = encode_model(model)
    described = tuple(MemoryData(pool.size_bytes, 0, int(Protection.READ)) for pool in pools)
    return ImportedModel(options, data, described, loaded.inputs, loaded.outputs, loaded.states), memories


def _model_file(folder: Path) -> Path:
    found = [name for name in MODEL_FILES if (folder / name).is_file()]
    if len(found) != 1:
        has = f"has both {' and '.join(found)}" if found else "has no model"
        raise InvalidArgument(f"the version {has}; it needs one file, {' or '.join(MODEL_FILES)}")
    return folder / found[0]


def _load(file: Path, options: VersionOptions) -> LoadedModel:
    shapes: Shapes = {name: tuple(shape) for name, shape in options.shapes.items()}
    loaded = load(file, shapes=shapes, signature=options.signature)
    if options.batch == 1:
        return loaded
    if loaded.states:
        raise InvalidArgument("batch: the model has states, which the rows of a batch would share")
    shapes = {index: (options.batch, *_row_shape(info)) for index, info in enumerate(loaded.inputs)}
    batched = load(file, shapes=shapes, signature=options.signature)
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


def _with_shared_constants(model: Model) -> tuple[Model, list[Memory]]:
    """Return the model with its constants in a memory that nobody can change, and that memory, if it has constants."""
    values = model.operand_values
    if not values:
        return model, []
    memory = Memory.create_constant(len(values), lambda fd: _write(fd, values), "nnfmq-constants")
    graphs = [_referring(graph) for graph in (model.main, *model.referenced)]
    shared = replace(model, main=graphs[0], referenced=tuple(graphs[1:]), operand_values=b"", pools=(memory,))
    return shared, [memory]


def _write(fd: int, values: bytes) -> None:
    done = 0
    with memoryview(values) as rest:
        while done < len(rest):
            done += os.pwrite(fd, rest[done:], done)


def _referring(graph: Subgraph) -> Subgraph:
    """Return a subgraph whose constants are in the first pool, at the same offsets."""
    operands = (
        replace(operand, lifetime=LifeTime.CONSTANT_REFERENCE)
        if operand.lifetime == LifeTime.CONSTANT_COPY
        else operand
        for operand in graph.operands
    )
    return replace(graph, operands=tuple(operands))
