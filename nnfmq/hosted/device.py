"""HostedDevice: the base class of devices that run model files of another runtime.

An adapter is a subclass of `HostedDevice` with `name`, `formats` and `open`, which returns a `HostedModel` (`adapter`).
The rest is done here: this module reads the files and the options from the model, keeps a file open between the
client's question what is in it and its preparation, and stores what a runtime saves; `open_files` charges the client
for the memory; and `execution` views the client's memory as the tensors that the file declares, and ends executions at
their deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from nnfmq.base.deadlines import CLOCK_MAX_NS, has_passed
from nnfmq.base.digests import sha256
from nnfmq.driver.cache.files import CacheContents, PackedConstants, decode_program, encode_program
from nnfmq.driver.cache.programs import CacheEntry, entry_of
from nnfmq.driver.cache.shared_files import SharedFile, shared_file_of
from nnfmq.driver.compilation.jobs import current_prepare_context
from nnfmq.driver.devices.hosted_runtimes import DescribedDevice
from nnfmq.driver.execution import watchdog
from nnfmq.driver.execution.watchdog import WATCHDOG, cannot_abort
from nnfmq.driver.memory.private import ConstantPool
from nnfmq.driver.memory.quota import add_to_limit
from nnfmq.engines.execution import PreparedProgram
from nnfmq.hal.errors import InvalidArgument, MissedDeadlineTransient
from nnfmq.hal.hosted import (
    LIBRARIES,
    OPERAND_TYPES,
    HostedCall,
    HostedDescription,
    HostedTensor,
    Shape,
    call_of,
    constant_bytes,
    fits_declaration,
    is_hosted,
    library_names,
    require_number_types,
    runtime_named,
)
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, Pool, Subgraph
from nnfmq.hosted.adapter import HostedFile, HostedModel, OpenOptions
from nnfmq.hosted.execution import HostedProgram
from nnfmq.hosted.libraries import trusted_library
from nnfmq.hosted.open_files import KeptFile, OpenFile, errors_of
from nnfmq.hosted.options import thread_count

__all__ = ["HostedDevice"]

_log = logging.getLogger("nnfmq.hosted")


class HostedDevice(DescribedDevice):
    """A device that runs model files. Subclasses define `name`, `formats` and `open`.

    Attributes:
        formats: The formats of files, as `importers.file_format` names them; for a runtime of this build they,
            and `package`, are those of `RUNTIMES`.
        reserved_bytes: Private memory that the runtime reserves without using it (thread stacks, arenas), which the
            limit of a worker's memory must allow.
        saves: Whether the models implement `save`: then the driver's cache is looked up for each file.
        reopens: Whether a file is opened again with what was just saved, which then takes less memory.
        takes_libraries: Whether `open` loads `HostedFile.libraries`.
        has_signatures: Whether its files may have signatures.
    """

    formats: tuple[str, ...]
    reserved_bytes: ClassVar[int] = 256 << 20
    saves: ClassVar[bool] = False
    reopens: ClassVar[bool] = False
    takes_libraries: ClassVar[bool] = False
    has_signatures: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        if runtime := runtime_named(self.name):
            self.package, self.formats = runtime.package, runtime.formats
        self._kept: KeptFile[HostedModel] = KeptFile()
        self._has_reserved = False

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        """Open a file; blocks. Any exception becomes INVALID_ARGUMENT with its text.

        Raises:
            Exception: If the runtime rejects the file, or an option is not valid.
        """
        raise NotImplementedError

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """Return whether it is a hosted model's operation and a file of one of the formats; the file is not opened."""
        return is_hosted(model) and _valid_call(model).format in self.formats

    def describe_file(self, call: HostedCall, pools: Sequence[ConstantPool]) -> HostedDescription:
        """Return the description of a file, which the preparation that follows finds open. Blocks.

        If the call has inputs, their sizes are those that the caller chose.

        Raises:
            InvalidArgument: If the runtime does not run this format, or rejects the file, an option or a size.
        """
        if call.format not in self.formats:
            allowed = " or ".join(self.formats)
            raise InvalidArgument(f"device {self.name!r} runs {allowed} files, not {call.format!r}")
        parts = [_Part.of_pool(pool, 0, pool.view[: pool.size_bytes]) for pool in pools]
        key = _key(call, parts)
        opened = self._kept.take(key) or self._open(call, parts)
        self._kept.keep(key, opened, [part.data for part in parts])
        return self._resolved(opened.model, call) if call.inputs else opened.model.description

    def _resolved(self, model: HostedModel, call: HostedCall) -> HostedDescription:
        """Return the description of an open file for the sizes of a call's inputs. Raises InvalidArgument."""
        found = model.description
        if len(call.inputs) != len(found.inputs):
            raise InvalidArgument(f"the model declares {len(call.inputs)} inputs, its file has {len(found.inputs)}")
        shapes = [tensor.shape for tensor in call.inputs]
        if shapes == [tensor.shape for tensor in found.inputs]:
            return found
        with errors_of(self.name):
            outputs = _with_shapes(found.outputs, model.resolve(shapes))
        return replace(found, inputs=_with_shapes(found.inputs, shapes), outputs=outputs)

    def compile(self, model: Model, packed: PackedConstants = ()) -> HostedProgram:
        """Return the program that runs the file; `packed` is what `_packed` returned of it.

        Raises:
            InvalidArgument: If the runtime rejects the file, or the model declares other inputs or outputs.
            ResourceExhausted: If the quota does not allow the memory that it takes.
        """
        call = _valid_call(model)
        count = sum(file.parts for file in call.files)
        indexes = model.main.operations[0].inputs[1 : 1 + count]
        parts = [_Part.of_operand(model, model.main.operands[index]) for index in indexes]
        key = _key(call, parts)
        opened = self._kept.take(key)
        if opened is None:
            opened = self._open(call, parts, packed)
            if has_passed(current_prepare_context().deadline_ns):
                self._kept.keep(key, opened, [part.data for part in parts])  # the next attempt finds it
                raise MissedDeadlineTransient(f"the deadline passed while {self.name} opened the file")
        _require_same(call, self._resolved(opened.model, call))
        return HostedProgram(self.name, model, opened, call)

    def _open(self, call: HostedCall, parts: Sequence[_Part], packed: PackedConstants = ()) -> OpenFile[HostedModel]:
        """Return the opened file. If that takes much longer than the deadline, the worker exits."""
        if not self._has_reserved:
            self._has_reserved = True
            add_to_limit(self.reserved_bytes)
        if call.signature is not None and not self.has_signatures:
            raise InvalidArgument(f"signature {call.signature!r:.80}: files on {self.name} have no signatures")
        options = dict(call.options)
        threads = thread_count(options.pop("threads", None))
        names = library_names(options.pop(LIBRARIES, [])) if self.takes_libraries else []
        file = _file(call, [part.data for part in parts], names)
        open_options = OpenOptions(threads, call.signature, options, _unpacked(packed))
        limit_ns = current_prepare_context().deadline_ns or CLOCK_MAX_NS
        token = WATCHDOG.begin(limit_ns, cannot_abort, watchdog.OPEN_GRACE_S)
        try:
            with errors_of(self.name):
                opened = OpenFile(
                    threads, lambda: self._open_saved(file, open_options), [part.shared for part in parts]
                )
        finally:
            WATCHDOG.end(token)
        require_number_types(opened.model.description)
        return opened

    # -- caches: cache files of a client have the file, and what its runtime saves; the driver's own cache has only that

    def save(self, model: Model, program: PreparedProgram) -> CacheContents | None:
        """Return the model with its files, and what the runtime saves of them."""
        assert isinstance(program, HostedProgram)
        return encode_program(model, _packed(program.opened.save() if self.saves else None))

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Open the saved files again."""
        return decode_program(contents, self.compile)

    def _open_saved(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        """Open a file with what was saved of it; if the driver's cache has nothing, store what the runtime saves."""
        entry = self._entry(file, options) if self.saves and options.saved is None else None
        saved = options.saved if entry is None else _unpacked(entry.load())
        options = replace(options, saved=None)
        if saved is not None:
            reopened = self._reopened(file, options, saved)
            if reopened is not None:
                return reopened
            if entry is not None:
                entry.remove()
        if entry is None:
            return self.open(file, options)
        opened = self.open(file, replace(options, saves=True))
        saved = self._stored(opened, entry)
        if not (saved and self.reopens):
            return opened
        del opened  # two would take twice the memory
        return self._reopened(file, options, saved) or self.open(file, options)

    def _reopened(self, file: HostedFile, options: OpenOptions, saved: bytes) -> HostedModel | None:
        """Open a file with what the runtime saved of it; return None if the runtime does not, which is logged."""
        try:
            return self.open(file, replace(options, saved=saved))
        except Exception as error:  # noqa: BLE001  the runtime's own; without it, the error is that of the file
            _log.warning("%s does not open what it saved, but the file: %s", self.name, str(error) or repr(error))
            return None

    def _stored(self, opened: HostedModel, entry: CacheEntry) -> bytes | None:
        """Store what the runtime saves of an open file, and return it; None if that fails, which is logged."""
        try:
            saved = opened.save()
            if saved:
                entry.store(_packed(saved))
            return saved
        except Exception as error:  # noqa: BLE001  the runtime's own; the file is open
            _log.warning("%s does not save what it opened: %s", self.name, str(error) or repr(error))
            return None

    def _entry(self, file: HostedFile, options: OpenOptions) -> CacheEntry | None:
        """Return the entry of the driver's cache for a file that is opened with these options."""
        digests = [library.digest for library in file.libraries]
        names = msgspec.json.encode([file.format, list(file.files), digests, options])
        return entry_of(self.identity, names, *file.files.values())


def _packed(saved: bytes | None) -> PackedConstants:
    """Return the bytes that a runtime saves in the form that the caches keep."""
    return ((np.frombuffer(saved, np.uint8),),) if saved else ()


def _unpacked(packed: PackedConstants | None) -> bytes | None:
    """Return the bytes that `_packed` was given; None for nothing."""
    return packed[0][0].tobytes() if packed else None


# ----------------------------------------------------------------------------------------------------------------------
# The operands of a hosted model's operation.


def _valid_call(model: Model) -> HostedCall:
    """Return the call of a hosted model. Raises InvalidArgument if it does not fit the operands."""
    call, main = call_of(model), model.main
    (operation,) = main.operations
    inputs = operation.inputs[1 + sum(file.parts for file in call.files) :]
    require_number_types(call)
    for kind, indexes, of_model, tensors in (
        ("input", inputs, main.input_indexes, call.inputs),
        ("output", operation.outputs, main.output_indexes, call.outputs),
    ):
        if not len(indexes) == len(tensors) or tuple(indexes) != tuple(of_model):
            raise InvalidArgument(f"the {kind}s of a hosted model are those of its operation, {len(tensors)} tensors")
        for operand, tensor in zip((main.operands[index] for index in indexes), tensors, strict=True):
            if (operand.type, operand.dimensions) != (OPERAND_TYPES[tensor.dtype], tensor.dimensions):
                stated = f"{operand.type.name} {operand.dimensions}"
                raise InvalidArgument(f"{kind} {tensor.name!r} is {tensor.dtype} {tensor.shape}, its operand {stated}")
    return call


class _Part(NamedTuple):
    """Bytes of a file; `origin` names them if they are in sealed memory, otherwise it is None."""

    data: memoryview
    origin: tuple[tuple[int, int], int, int] | None = None

    @classmethod
    def of_pool(cls, pool: Pool, offset: int, data: memoryview) -> _Part:
        """Return the bytes that are at `offset` of a pool."""
        if isinstance(pool, ConstantPool) and pool.is_sealed and pool.identity is not None:
            return cls(data, (pool.identity, pool.offset + offset, len(data)))
        return cls(data)

    @classmethod
    def of_operand(cls, model: Model, operand: Operand) -> _Part:
        """Return the bytes of a constant operand. Raises InvalidArgument if it is none."""
        data, location = constant_bytes(model, operand), operand.location
        if operand.lifetime is LifeTime.CONSTANT_COPY:
            return cls(data)
        return cls.of_pool(model.pools[location.pool_index], location.offset, data)

    @property
    def shared(self) -> SharedFile | None:
        """The memory that this part is in, if other workers have it, too."""
        return shared_file_of(self.origin[0]) if self.origin else None

    @property
    def key(self) -> object:
        """A key that is equal for equal bytes, if the client sends them twice in the same way."""
        return self.origin or sha256(self.data)


def _file(call: HostedCall, parts: Sequence[memoryview], libraries: Sequence[str]) -> HostedFile:
    """Return the files of a call; those that `libraries` names are loaded as code. Raises InvalidArgument."""
    if sum(file.parts for file in call.files) != len(parts):
        raise InvalidArgument(f"the files have {sum(file.parts for file in call.files)} parts, {len(parts)} were given")
    left, files = list(parts), {}
    for file in call.files:
        own, left = left[: file.parts], left[file.parts :]
        files[file.name] = own[0] if len(own) == 1 else memoryview(b"".join(own))
    if missing := set(libraries) - set(list(files)[1:]):
        raise InvalidArgument(f"{LIBRARIES}: the client has sent no library {min(missing)!r:.80}")
    trusted = [trusted_library(name, files.pop(name)) for name in libraries]
    return HostedFile(call.format, files, trusted)


def _key(call: HostedCall, parts: Sequence[_Part]) -> object:
    """Return a key that is equal for two calls with the same files and options."""
    return call.format, call.files, call.signature, dict(call.options), [part.key for part in parts]


def _require_same(call: HostedCall, description: HostedDescription) -> None:
    """Check that a model declares the inputs and outputs of its file."""
    for kind, given, found in (
        ("input", call.inputs, description.inputs),
        ("output", call.outputs, description.outputs),
    ):
        if len(given) != len(found):
            raise InvalidArgument(f"the model declares {len(given)} {kind}s, its file has {len(found)}")
        for index, (ours, theirs) in enumerate(zip(given, found, strict=True)):
            if (ours.name, ours.dtype) != (theirs.name, theirs.dtype) or not fits_declaration(ours.shape, theirs.shape):
                raise InvalidArgument(
                    f"the model declares {kind} {index} as {ours.name!r}, {ours.dtype} {ours.shape}; "
                    f"its file as {theirs.name!r}, {theirs.dtype} {theirs.shape}"
                )


def _with_shapes(tensors: Sequence[HostedTensor], shapes: Sequence[Shape | None]) -> tuple[HostedTensor, ...]:
    """Return tensors with other shapes."""
    return tuple(replace(tensor, shape=shape) for tensor, shape in zip(tensors, shapes, strict=True))
