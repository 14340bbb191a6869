"""Arguments of `Device.prepare`: paths, names of preferences, keywords; and the notice of a compilation."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias, TypedDict, TypeGuard, TypeVar

from msgspec import Struct

from nnfmq.base import settings
from nnfmq.base.deadlines import remaining_s
from nnfmq.hal.capabilities import BYTE_SIZE_OF_CACHE_TOKEN
from nnfmq.hal.client_class import ClientClass
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.extensions import is_extension
from nnfmq.hal.preparation import DeviceChoice
from nnfmq.hal.summaries import nearest
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import (
    ExecutionPreference,
    ExtensionNameAndPrefix,
    Model,
    OperationType,
    Priority,
    TokenValuePair,
)

__all__ = [
    "ClassArgument",
    "FinishedModel",
    "ModelArgument",
    "ModelSignature",
    "NamedModel",
    "Preference",
    "PrepareOptions",
    "PriorityArgument",
    "ProgressCallback",
    "ProgressReport",
    "compile_notice",
    "has_vendor_operations",
    "is_file",
    "name_for_display",
    "to_client_class",
    "to_hal_model",
    "to_member",
    "to_model",
    "to_preference",
    "to_priority",
    "to_token",
    "with_time_left",
]

_NAME_CHARACTERS = 64  # the statistics show as many bytes


class ModelSignature(Protocol):
    """The inputs and outputs of a model: a NamedModel, a PreparedModel, or an application's own object."""

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The inputs, in order."""
        ...

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The outputs, in order."""
        ...


class NamedModel(ModelSignature, Protocol):
    """A model with names for its inputs and outputs, as `nnfmq.load` returns it."""

    @property
    def model(self) -> Model:
        """The HAL's model."""
        ...


class FinishedModel(Struct, frozen=True):
    """A model with descriptions of its inputs, outputs and states. Satisfies NamedModel.

    A prepared model keeps it, because it may be prepared again when the ModelBuilder that it came from is closed.
    """

    model: Model
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[StateInfo, ...] = ()
    metadata: Any = None
    """What the file's author says of the model, an `nnfmq.ModelMetadata`, or None."""
    data_files: tuple[str, ...] = ()
    """Other files of the model file's folder that belong to it."""

    @classmethod
    def of(cls, model: NamedModel) -> Self:
        """Return the present parts of `model`.

        Raises:
            BadState: If it is a ModelBuilder that is not finished.
            InvalidArgument: If it is no model.
        """
        states, metadata = tuple(getattr(model, "states", ())), getattr(model, "metadata", None)
        data_files = tuple(getattr(model, "data_files", ()))
        return cls(to_hal_model(model), model.inputs, model.outputs, states, metadata, data_files)


ModelArgument: TypeAlias = Model | NamedModel | str | os.PathLike[str] | bytes | bytearray | memoryview
"""A model, the path of a model file, or the content of one."""
Preference: TypeAlias = ExecutionPreference | Literal["low_power", "fast_single_answer", "sustained_speed"]
"""A preference, or its name."""
PriorityArgument: TypeAlias = Priority | Literal["low", "medium", "high"]
"""A priority, or its name."""
ClassArgument: TypeAlias = ClientClass | Literal["interactive", "normal", "batch"]
"""A class of clients, or its name."""
MemberT = TypeVar("MemberT", bound=IntEnum)


def to_model(
    model: ModelArgument, shapes: Mapping[str | int, Sequence[int]] | None = None, signature: str | None = None
) -> Model | FinishedModel:
    """Return a model that does not change any more; if `model` is a path or a file's content, load that.

    Raises:
        BadState: If `model` is a ModelBuilder that is not finished.
        InvalidArgument: If `model` is no model, `nnfmq.load` rejects the file, or there are shapes or a signature for a
            model that is loaded already.
        OSError: If the file cannot be read.
    """
    if is_file(model):
        from nnfmq.importers import load  # while an embedded driver starts, and not for a model that is built

        return FinishedModel.of(load(model, shapes=shapes, signature=signature))
    assert not isinstance(model, (str, os.PathLike, bytes, bytearray, memoryview))
    if shapes or signature is not None:
        raise InvalidArgument(
            f"`shapes` and `signature` are for model files; this is a {type(model).__name__}, which is loaded already: "
            "give them to nnfmq.load"
        )
    return model if isinstance(model, (Model, FinishedModel)) else FinishedModel.of(model)


def is_file(model: ModelArgument) -> TypeGuard[str | os.PathLike[str] | bytes | bytearray | memoryview]:
    """Return whether a model is given as the path of a file, or as its content."""
    return isinstance(model, (str, os.PathLike, bytes, bytearray, memoryview))


def to_hal_model(model: Model | ModelSignature) -> Model:
    """Return the HAL's model. Raises InvalidArgument if it is none (N-VAL-24)."""
    hal_model = model if isinstance(model, Model) else getattr(model, "model", None)
    if not isinstance(hal_model, Model):
        raise InvalidArgument(
            f"{type(model).__name__} is not a model: give the path of a .tflite or .onnx file, its content as bytes, "
            "what nnfmq.load returns, or a finished nnfmq.ModelBuilder"
        )
    return hal_model


def has_vendor_operations(model: Model) -> bool:
    """Return whether an operation is of an extension or OEM: the CPU device has none of those."""
    types = {operation.type for graph in (model.main, *model.referenced) for operation in graph.operations}
    if OperationType.OEM_OPERATION in types:
        return True
    return bool(model.extensions) and any(map(is_extension, types))  # without an extension none is of one


def name_for_display(model: ModelArgument, name: str | None) -> str:
    """Return the name of a model in the driver's statistics: `name`, or the name of its file, or nothing."""
    if name is None:
        name = Path(model).name if isinstance(model, (str, os.PathLike)) else str(getattr(model, "file_name", ""))
    return name[:_NAME_CHARACTERS].encode("utf-8", "replace").decode()  # file names may be undecodable


def to_preference(preference: Preference) -> ExecutionPreference:
    """Return the preference of this name. Raises InvalidArgument if there is none."""
    return to_member(ExecutionPreference, preference, "preference")


def to_token(token: bytes) -> bytes:
    """Return a cache token, whose length the driver checks. Raises InvalidArgument if it is of another type."""
    if not isinstance(token, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"`token` is {BYTE_SIZE_OF_CACHE_TOKEN} bytes, not of type {type(token).__name__}")
    return bytes(token)


def to_priority(priority: PriorityArgument) -> Priority:
    """Return the priority of this name. Raises InvalidArgument if there is none."""
    return to_member(Priority, priority, "priority")


def to_client_class(client_class: ClassArgument | str) -> ClientClass:
    """Return the class of this name. Raises InvalidArgument if there is none."""
    return to_member(ClientClass, client_class, "client_class")


def to_member(kind: type[MemberT], value: Any, what: str) -> MemberT:
    """Return the member of `kind` that `value` is, or that it names in any case; `what` is the argument.

    Raises:
        InvalidArgument: If there is none.
    """
    if isinstance(value, str):
        value = kind.__members__.get(value.upper(), value)
    try:
        return kind(value)
    except ValueError:
        words = [name.lower() for name in kind.__members__]
        allowed = ", ".join(map(repr, words))
        raise InvalidArgument(f"{what} {value!r}: allowed are {allowed}{nearest(value, words)}") from None


# ----------------------------------------------------------------------------------------------------------------------
# What stderr says while a model is compiled, for an application that has no progress callback of its own.
#
#     nnfmq: compiling net.tflite for this machine, once; later starts read it from the cache
#     nnfmq: compiling net.tflite: 3 of 8 kernels       (redrawn, on a terminal only)
#
# $NNFMQ_COMPILE_NOTICE=0 turns it off.


ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with the number of compiled units, and how many there are."""

DELAY_S = 0.25
_DRAW_DELAY_S = 1.0
_REDRAW_S = 0.1


class ProgressReport(Protocol):
    """Called as a ProgressCallback; `is_kept` tells that later starts need not compile the model."""

    def __call__(self, done: int, total: int, is_kept: bool = False) -> None:
        """Report progress."""


@contextmanager
def compile_notice(
    name: str, progress: ProgressCallback | None = None, choice: DeviceChoice = "application"
) -> Iterator[ProgressReport | None]:
    """Yield a function for the progress of a compilation: `progress`, or if that is None, one that writes to stderr.

    That is one line if the model is still compiled after a quarter of a second, by a thread of its own, because
    progress is reported rarely. After a second, a line on a terminal shows the progress; the thread that prepares draws
    it, and completes it with the time at the end.

    Yields None if there is no stderr, the setting says so, or for a step of a plan: the plan has a notice for all.
    """
    if progress is not None:
        yield _without_kept(progress)
    elif choice == "step" or sys.stderr is None or not settings.COMPILE_NOTICE.value():
        yield None
    else:
        notice = _Notice(name or "a model")
        try:
            yield notice.report
        finally:
            notice.end()


def _without_kept(progress: ProgressCallback) -> ProgressReport:
    return lambda done, total, is_kept=False: progress(done, total)


class _Notice:
    """The lines about one model. Any thread may report."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin = time.monotonic()
        self._reports = itertools.count()  # `next` is atomic
        self._timer: threading.Timer | None = None
        self._drawn_at: float | None = None

    def report(self, done: int, total: int, is_kept: bool = False) -> None:
        """Begin the wait for the first line, and draw the progress on a terminal."""
        now = time.monotonic()
        if next(self._reports) == 0:
            self._say_later(self._begin + DELAY_S - now, is_kept)
        last = self._begin + _DRAW_DELAY_S - _REDRAW_S if self._drawn_at is None else self._drawn_at
        if now - last >= _REDRAW_S and sys.stderr.isatty():
            self._drawn_at = now
            _write(f"\rnnfmq: compiling {self._name}: {done} of {total} kernels")

    def _say_later(self, delay_s: float, is_kept: bool) -> None:
        if delay_s <= 0:
            self._say(is_kept)
            return
        self._timer = threading.Timer(delay_s, self._say, [is_kept])
        self._timer.daemon = True
        self._timer.start()

    def _say(self, is_kept: bool) -> None:
        later = "; later starts read it from the cache" if is_kept else ""
        _write(f"nnfmq: compiling {self._name} for this machine, once{later}\n")

    def end(self) -> None:
        """Write no more, and complete the line that shows the progress."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._drawn_at is not None:
            _write(f"\rnnfmq: compiling {self._name}: {time.monotonic() - self._begin:.1f} s\x1b[K\n")


def _write(text: str) -> None:
    """Write to stderr, which the application may have closed; in one call, so that no other output comes between."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


# ----------------------------------------------------------------------------------------------------------------------
# The keyword arguments of `Device.prepare` as a dict, and what is done with them before a device is chosen.


class PrepareOptions(TypedDict, total=False):
    """The keyword arguments of `Device.prepare`."""

    preference: Preference
    priority: PriorityArgument
    hints: Sequence[TokenValuePair]
    extensions: Sequence[ExtensionNameAndPrefix]
    cache_dir: str | os.PathLike[str] | None
    token: bytes | None
    model_cache: Sequence[int]
    data_cache: Sequence[int]
    timeout: float | None
    progress: ProgressCallback | None
    name: str | None
    shapes: Mapping[str | int, Sequence[int]] | None
    signature: str | None
    runtime_options: Mapping[str, Any] | None
    deterministic: bool


def with_time_left(options: PrepareOptions, deadline_ns: int | None) -> PrepareOptions:
    """Return a copy of the options whose timeout is the time that is left until the deadline, if there is one."""
    left = options.copy()
    if deadline_ns is not None:
        left["timeout"] = remaining_s(deadline_ns)
    return left
