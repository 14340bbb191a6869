"""run: a model in one call, with a client and prepared models that this process keeps for later calls.

The client is connected at the first call and closed at exit; a forked child has its own. The models that were used last
are kept. A file that has changed is another model. After the driver's death the client recovers.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from nnfmq.base.deadlines import acquire, deadline_after, remaining_s
from nnfmq.client.connection.connect import connect

if TYPE_CHECKING:  # `connect` imports the client while an embedded driver starts
    from nnfmq.client.connection.client import Client
    from nnfmq.client.connection.prepare_arguments import ModelArgument
    from nnfmq.client.model.arrays import InputValue, Outputs
    from nnfmq.client.model.compiled_model import CompiledModel

__all__ = ["close_kept", "run"]

_KEPT_MODELS = 8  # each has memory in the driver
_Key: TypeAlias = tuple[Any, ...]
_Shapes: TypeAlias = Mapping[str | int, Sequence[int]]


def run(
    model: ModelArgument | CompiledModel,
    *inputs: InputValue,
    shapes: _Shapes | None = None,
    signature: str | None = None,
    runtime_options: Mapping[str, Any] | None = None,
    deterministic: bool = False,
    timeout: float | None = None,
) -> Outputs:
    """Run a model once and return its outputs; blocks. Nothing has to be closed.

    The first call connects, as `nnfmq.connect()` does, and prepares the model; later calls of this process use both
    again. Thread-safe. A file that nnfmq's own engine does not support runs on a hosted runtime, as with
    `Client.prepare`. Use `nnfmq.connect` to choose a device or an execution mode, or to free resources before the exit.

    Args:
        model: The path of a model file, its content, or a model. The 8 that were used last remain prepared. A path
            whose file has changed, or a file with its weights, is prepared again.
        inputs: An array for each input, in order, or one mapping with all of them by name.
        shapes: The shapes of inputs of a model file, as for `nnfmq.load`.
        signature: A signature of a .tflite file, as for `nnfmq.load`.
        runtime_options: Options of a hosted runtime, which executes the file then, as for `Client.prepare`.
        deterministic: Whether floats must have the same bits on every machine, as for `Device.prepare`.
        timeout: In seconds, of preparing and executing together; None = no limit.

    Raises:
        UnsupportedModel: If neither nnfmq's own engine nor a hosted runtime supports the model's file.
        InvalidArgument: If the model, its file or an input is not valid.
        OSError: If the model's file cannot be read.
        DeviceUnavailable: If no driver can be reached or started.
        MissedDeadline: If the timeout passes.
        NnfmqError: The error that the driver replied.
    """
    prepared = _as_prepared(model)
    if prepared is not None:
        return prepared.execute(*inputs, timeout=timeout)
    deadline_ns = deadline_after(timeout)
    options = _Options(shapes or {}, signature, runtime_options or {}, deterministic)
    with _process.kept.borrowed(cast("ModelArgument", model), options, deadline_ns) as kept:
        return kept.execute(*inputs, timeout=remaining_s(deadline_ns))


def _as_prepared(model: ModelArgument | CompiledModel) -> CompiledModel | None:
    module = sys.modules.get("nnfmq.client.model.compiled_model")  # there is no model if it has not been imported
    return model if module is not None and isinstance(model, module.CompiledModel) else None


def close_kept() -> None:
    """Close the models that `run` keeps, and its client; the next call makes new ones. Blocks."""
    kept, _process.kept = _process.kept, _Kept()
    kept.close()


class _Options(NamedTuple):
    """The arguments about a model file."""

    shapes: _Shapes
    signature: str | None
    runtime_options: Mapping[str, Any]
    deterministic: bool


class _KeptModel:
    """A prepared model, what it was prepared from, and how many calls execute it.

    `data_files` are the files with its weights, beside the model's, as they were.
    """

    def __init__(self, prepared: CompiledModel, source: object, data_files: Mapping[Path, _Key]) -> None:
        self.prepared = prepared
        self.source = source  # kept, because the key may have its id
        self.data_files = data_files
        self.users = 0

    def is_current(self) -> bool:
        """Return whether the files with the weights are as they were."""
        try:
            return all(_identity(path) == identity for path, identity in self.data_files.items())
        except OSError:
            return False


class _Kept:
    """The client, and the models by key; those that were used last come last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for a few assignments, never while blocking
        self._preparing = threading.Lock()  # held while connecting and preparing, so that a model is prepared once
        self._client: Client | None = None
        self._models: dict[_Key, _KeptModel] = {}

    @contextmanager
    def borrowed(self, model: ModelArgument, options: _Options, deadline_ns: int | None) -> Iterator[CompiledModel]:
        """Give the prepared model, which is not closed in the block."""
        key = _key(model, options)
        kept = self._take(key)
        if kept is None:
            with self._preparation(deadline_ns):
                kept = self._take(key) or self._keep(key, self._prepare(model, options, deadline_ns))
        try:
            yield kept.prepared
        finally:
            self._release(kept)

    def _take(self, key: _Key) -> _KeptModel | None:
        """Return the model, which has one user more now; None if there is none, or its weights have changed."""
        with self._lock:
            kept = self._models.pop(key, None)
            if kept is None:
                return None
            if not kept.is_current():
                self._models[(object(),)] = kept  # unused from now on; closed with the surplus, or at exit
                return None
            self._models[key] = kept
            kept.users += 1
            return kept

    def _keep(self, key: _Key, kept: _KeptModel) -> _KeptModel:
        with self._lock:
            self._models[key] = kept
            kept.users += 1
            return kept

    def _release(self, kept: _KeptModel) -> None:
        """End a use, and close the models that are too many."""
        with self._lock:
            kept.users -= 1
            unused = [key for key, other in self._models.items() if not other.users]
            surplus = [self._models.pop(key) for key in unused[: max(len(self._models) - _KEPT_MODELS, 0)]]
        for other in surplus:
            other.prepared.close()

    @contextmanager
    def _preparation(self, deadline_ns: int | None) -> Iterator[None]:
        """Let one thread prepare. Raises MissedDeadlineTransient if another one does until the deadline."""
        acquire(self._preparing, deadline_ns, "the timeout passed while another thread prepared a model")
        try:
            yield
        finally:
            self._preparing.release()

    def _prepare(self, model: ModelArgument, options: _Options, deadline_ns: int | None) -> _KeptModel:
        if (client := self._client) is None:  # another thread may close it meanwhile
            client = self._client = connect(recover=True)
        prepared = client.prepare(model, **options._asdict(), timeout=remaining_s(deadline_ns))
        data_files = {}
        if isinstance(model, (str, os.PathLike)):
            paths = (Path(model).parent / name for name in prepared.data_files)
            data_files = {path: _identity(path) for path in paths}
        return _KeptModel(prepared, model, data_files)

    def close(self) -> None:
        """Close the client, and with it the models; blocks. Idempotent."""
        with self._lock:
            client, self._client, self._models = self._client, None, {}
        if client is not None:
            client.close()


def _key(model: ModelArgument, options: _Options) -> _Key:
    """Return a key for a model: for the file as it is now, the content, or the object."""
    other = options.signature, repr(options.runtime_options), options.deterministic
    prepared_with = (*_checked(options.shapes).items(), *other)
    if isinstance(model, (bytes, bytearray, memoryview)):
        from nnfmq.base.digests import sha256  # few applications need it

        return (sha256(model), prepared_with)
    if isinstance(model, (str, os.PathLike)):
        return (os.path.abspath(model), _identity(model), prepared_with)
    return (id(model), prepared_with)


def _checked(shapes: _Shapes) -> _Shapes:
    if not shapes:
        return {}
    from nnfmq.importers.file_format import checked_shapes  # few calls have shapes

    return checked_shapes(shapes)


def _identity(path: str | os.PathLike[str]) -> _Key:
    """Return a key that changes with a file's content. Raises OSError if there is no such file."""
    status = os.stat(path)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class _Process:
    """The objects of which a process has one."""

    kept = _Kept()


_process = _Process()


def _forget_parent() -> None:
    """Leave the parent's client to the parent. Runs in the child after fork(2)."""
    _process.kept = _Kept()


atexit.register(close_kept)
os.register_at_fork(after_in_child=_forget_parent)
