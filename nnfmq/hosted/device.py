"""HostedDevice: the base class of devices that run model files of another runtime, and what an adapter implements.

An adapter is a subclass of `HostedDevice` with `name`, `formats` and `open`, which returns a `HostedModel`. This module
does the rest: it reads the files and the options from the model, keeps a file open between the client's question what
is in it and its preparation, views the client's memory as the tensors that the file declares, copies integers, counts
memory, and ends executions at their deadline.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from nnfmq.base.packages import InstalledPackages
from nnfmq.base.processes import allowed_cpus
from nnfmq.driver.cache.files import CacheContents, PackedConstants, decode_program, encode_program
from nnfmq.driver.cache.programs import CacheEntry, entry_of
from nnfmq.driver.devices.device import DeviceBase
from nnfmq.driver.devices.installation import installation, version_of
from nnfmq.driver.memory.private import ConstantPool
from nnfmq.driver.memory.quota import add_to_limit
from nnfmq.engines import memory
from nnfmq.engines.execution import (
    DEFAULT_RUN_OPTIONS,
    InputSpec,
    PreparedProgram,
    RunOptions,
    check_inputs,
    copy_outputs,
)
from nnfmq.engines.memory import Charge
from nnfmq.hal.capabilities import NumberOfCacheFiles
from nnfmq.hal.errors import (
    GeneralFailure,
    InvalidArgument,
    NnfmqError,
    ResourceExhaustedTransient,
)
from nnfmq.hal.extensions import extension_prefix, extension_type
from nnfmq.hal.hosted import (
    NAME,
    RUN,
    Dimension,
    HostedCall,
    HostedDescription,
    HostedTensor,
    decode_call,
    require_number_type,
)
from nnfmq.hal.types import LifeTime, Model, Operand, Operation, OutputShape, Subgraph
from nnfmq.hosted.watchdog import WATCHDOG
from nnfmq.operations.declaration import Array
from nnfmq.operations.extensions import VendorExtension

__all__ = ["HOSTED", "HostedDevice", "HostedFile", "HostedModel", "HostedRun", "OpenOptions"]

HOSTED = VendorExtension(NAME, (), ())
"""The extension as a device reports it: it has no types of its own, and its operation has no declaration."""

Shape = tuple[Dimension, ...]
_log = logging.getLogger("nnfmq.hosted")
_COPIED_KINDS = "iub"  # dtype.kind of what may be an index or a size


class HostedFile(Struct, frozen=True):
    """A model file and those that belong to it, in memory that never changes.

    Attributes:
        format: The format of the first file.
        files: The bytes of each file by its name, read-only; the model is the first. A file of several operands is a
            copy, any other is the client's sealed memory.
    """

    format: str
    files: Mapping[str, memoryview]

    @property
    def model(self) -> memoryview:
        """The bytes of the first file."""
        return next(iter(self.files.values()))

    @property
    def others(self) -> dict[str, memoryview]:
        """The bytes of the other files, by name."""
        return dict(list(self.files.items())[1:])


class OpenOptions(Struct, frozen=True):
    """How to open a file.

    Attributes:
        threads: How many threads an execution may use, the calling one included.
        signature: One of the file's signatures; None: its default.
        options: The runtime's own options, as the client gave them: check them.
        saved: What `HostedModel.save` returned for this file and these options, or None.
    """

    threads: int = 1
    signature: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    saved: bytes | None = None

    def require_known(self, *names: str) -> None:
        """Check that the runtime has all options that the client gave; `names` are its own.

        Raises:
            InvalidArgument: If one is another; the message lists those that are allowed.
        """
        for name in self.options:
            if name not in names:
                raise InvalidArgument(
                    f"runtime option {name!r:.80} is not known; known are {', '.join(('threads', *names))}"
                )


class HostedRun:
    """What executes an opened file with the arrays to which it is bound. One thread calls it at a time."""

    def __call__(self) -> Sequence[Array | None]:
        """Execute once; blocks. Return an array for each output that was bound to None, and None for the others."""
        raise NotImplementedError

    def abort(self) -> bool:
        """End the running call, which then raises; another thread calls this. Return False if the runtime cannot."""
        return False


class HostedModel:
    """A file that a runtime has opened. Subclasses define `description` and `bind`.

    `is_thread_safe`: several threads may call the bound functions at the same time. Otherwise this module's lock
    admits one at a time, `bind` included.
    """

    is_thread_safe: ClassVar[bool] = False
    description: HostedDescription
    """What is in the file."""

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> HostedRun:
        """Return what executes the file.

        Args:
            inputs: An array for each input, of its element type ("bfloat16": uint16) and with its rank. Floats lie in
                the client's memory, where they may change while they are read; others are private. The arrays live as
                long as the result. Their contents are not set yet.
            outputs: An array in the client's memory for each output whose shape is known, which each call fills; None
                for the others, which it returns.
        """
        raise NotImplementedError

    def save(self) -> bytes | None:
        """Return what makes opening the file again faster (`OpenOptions.saved`), or None; also if it was opened so."""
        return None


class HostedDevice(DeviceBase):
    """A device that runs model files. Subclasses define `name`, `formats` and `open`.

    Attributes:
        formats: The formats of files, as `importers.file_format` names them.
        package: The package whose version becomes part of the device's version; empty for none.
        reserved_bytes: Private memory that the runtime reserves without using it (thread stacks, arenas), which the
            limit of a worker's memory must allow.
        saves: Whether the models implement `save`: then the driver's cache is looked up for each file.
    """

    formats: ClassVar[tuple[str, ...]]
    package: ClassVar[str] = ""
    reserved_bytes: ClassVar[int] = 256 << 20
    saves: ClassVar[bool] = False
    uses_cores = True

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._opened: tuple[object, HostedModel, int] | None = None  # for the preparation that follows a question
        self._has_reserved = False

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        """Open a file; blocks. Any exception becomes INVALID_ARGUMENT with its text.

        Raises:
            Exception: If the runtime rejects the file, or an option is not valid.
        """
        raise NotImplementedError

    @property
    def extensions(self) -> tuple[VendorExtension, ...]:
        """The extension `nnfmq.hosted`."""
        return (HOSTED,)

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """Return whether it is a hosted model's operation and a file of one of the formats; the file is not opened."""
        return _is_hosted(model, operation) and _call_of(model, subgraph, operation).format in self.formats

    def describe_file(self, call: HostedCall, pools: Sequence[ConstantPool]) -> HostedDescription:
        """Return what is in a file; the preparation that follows finds it open. Blocks.

        Raises:
            InvalidArgument: If the runtime does not run this format, or rejects the file or an option.
        """
        if call.format not in self.formats:
            allowed = ", ".join(self.formats)
            raise InvalidArgument(f"device {self.name!r} runs files of the formats {allowed}, not {call.format!r}")
        parts = [pool.view for pool in pools]
        opened, size = self._open(call, parts)
        with self._lock:
            self._opened = (_key(call, parts), opened, size)
        return opened.description

    def compile(self, model: Model) -> PreparedProgram:
        """Return the program that runs the file.

        Raises:
            InvalidArgument: If the runtime rejects the file, or the model declares other inputs or outputs.
            ResourceExhausted: If the quota does not allow the memory that it takes.
        """
        return self._prepared(model)

    def _prepared(self, model: Model, packed: PackedConstants = ()) -> HostedProgram:
        """Return the program that runs the file; `packed` is what `_packed` returned of it."""
        (operation,) = model.main.operations
        call = _call_of(model, model.main, operation)
        parts = [_part(model, model.main.operands[index]) for index in _file_operands(call, operation)]
        with self._lock:
            found, self._opened = self._opened, None
        if found is not None and found[0] == _key(call, parts):
            _, opened, size = found
        else:
            found = None
            opened, size = self._open(call, parts, packed)
        _require_same(call, opened.description)
        return HostedProgram(self.name, model, opened, call, memory.charge(size))

    def _open(
        self, call: HostedCall, parts: Sequence[memoryview], packed: PackedConstants = ()
    ) -> tuple[HostedModel, int]:
        """Return the opened file, and how much private memory that took."""
        if not self._has_reserved:
            self._has_reserved = True
            add_to_limit(self.reserved_bytes)
        options = dict(call.options)
        threads = _threads(options.pop("threads", None))
        before = _private_bytes()
        try:
            opened = self._open_saved(_file(call, parts), OpenOptions(threads, call.signature, options), packed)
        except NnfmqError:
            raise
        except MemoryError as error:
            raise ResourceExhaustedTransient(f"{self.name} has not enough memory for the file: {error}") from error
        except Exception as error:
            raise InvalidArgument(f"{self.name}: {str(error) or repr(error)}") from error
        description = opened.description
        require_number_type("input", description.inputs)
        require_number_type("output", description.outputs)
        return opened, max(_private_bytes() - before, 0)

    # -- caches: the file and what its runtime saves of it, in a client's cache files; the latter in the driver's cache

    @property
    def version_string(self) -> str:
        """The releases of nnfmq and of the runtime."""
        if not self.package:
            return super().version_string
        version = installation().runtimes.get(self.package) or version_of(self.package, InstalledPackages())
        return f"{super().version_string} {self.package}-{version}"

    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        """One model file, and one data file with the files of the model."""
        return NumberOfCacheFiles(1, 1)

    def save(self, model: Model, program: PreparedProgram) -> CacheContents | None:
        """Return the model with its files, and what the runtime saves of them."""
        assert isinstance(program, HostedProgram)
        return encode_program(model, _packed(program.opened.save() if self.saves else None))

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Open the saved files again."""
        return decode_program(contents, self._prepared)

    def _open_saved(self, file: HostedFile, options: OpenOptions, packed: PackedConstants) -> HostedModel:
        """Open a file with what was saved of it; if the driver's cache has nothing, store what the runtime saves."""
        entry = self._entry(file, options) if self.saves and not packed else None
        packed = packed or (entry and entry.load()) or ()
        if packed:
            try:
                return self.open(file, replace(options, saved=packed[0][0].tobytes()))
            except Exception as error:  # noqa: BLE001  the runtime's own; without it, the error is that of the file
                _log.warning("%s does not open what it saved, but the file: %s", self.name, str(error) or repr(error))
                if entry is not None:
                    entry.remove()
        opened = self.open(file, options)
        if entry is not None and (packed := _packed(opened.save())):
            entry.store(packed)
        return opened

    def _entry(self, file: HostedFile, options: OpenOptions) -> CacheEntry | None:
        """Return the entry of the driver's cache for a file that is opened with these options."""
        names = msgspec.json.encode([file.format, list(file.files), options])
        return entry_of(self.identity, names, *file.files.values())


def _packed(saved: bytes | None) -> PackedConstants:
    """Return what a runtime saves as the caches keep it."""
    return ((np.frombuffer(saved, np.uint8),),) if saved else ()


def _threads(given: object) -> int:
    """Return the number of threads of an execution: the option, at most the CPUs of this process."""
    available = allowed_cpus()
    if given is None:
        return available
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise InvalidArgument(f"threads {given!r}: a number of at least 1 is needed")
    return min(given, available)


def _private_bytes() -> int:
    """Return the private memory of this process that is in use."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


# ----------------------------------------------------------------------------------------------------------------------
# The operands of a hosted model's operation.


def _is_hosted(model: Model, operation: Operation) -> bool:
    prefixes = [entry.prefix for entry in model.extensions if entry.name == NAME]
    return extension_prefix(operation.type) in prefixes and extension_type(operation.type) == RUN


def _call_of(model: Model, subgraph: Subgraph, operation: Operation) -> HostedCall:
    """Return the first operand of a hosted model's operation, whose operands fit it.

    Raises:
        InvalidArgument: If they do not.
    """
    is_whole = len(model.main.operations) == 1 and subgraph is model.main and not model.referenced
    if not is_whole or not operation.inputs:
        raise InvalidArgument(f"a hosted model has one operation, {NAME}.{RUN}, with the call as its first operand")
    call = decode_call(_part(model, subgraph.operands[operation.inputs[0]]))
    inputs = operation.inputs[1 + sum(file.parts for file in call.files) :]
    for kind, indexes, tensors in (("input", inputs, call.inputs), ("output", operation.outputs, call.outputs)):
        model_indexes = subgraph.input_indexes if kind == "input" else subgraph.output_indexes
        if not len(indexes) == len(tensors) or tuple(indexes) != tuple(model_indexes):
            raise InvalidArgument(f"the {kind}s of a hosted model are those of its operation, {len(tensors)} tensors")
        require_number_type(kind, tensors)
    return call


def _file_operands(call: HostedCall, operation: Operation) -> Sequence[int]:
    return operation.inputs[1 : 1 + sum(file.parts for file in call.files)]


def _part(model: Model, operand: Operand) -> memoryview:
    """Return the bytes of a constant operand, without a copy.

    Raises:
        InvalidArgument: If it is no constant.
    """
    location = operand.location
    if operand.lifetime is LifeTime.CONSTANT_COPY:
        source = memoryview(model.operand_values)
    elif operand.lifetime is LifeTime.CONSTANT_REFERENCE:
        source = model.pools[location.pool_index].view
    else:
        raise InvalidArgument("the call and the files of a hosted model are constants")
    return source[location.offset : location.offset + location.length]


def _file(call: HostedCall, parts: Sequence[memoryview]) -> HostedFile:
    if sum(file.parts for file in call.files) != len(parts):
        raise InvalidArgument(f"the files have {sum(file.parts for file in call.files)} parts, {len(parts)} were given")
    left, files = list(parts), {}
    for file in call.files:
        own, left = left[: file.parts], left[file.parts :]
        files[file.name] = own[0] if len(own) == 1 else memoryview(b"".join(own))
    return HostedFile(call.format, files)


def _key(call: HostedCall, parts: Sequence[memoryview]) -> object:
    """Return what two questions about the same file have in common.

    Equal bytes of the same files: clients send the same sealed memory twice, so the comparison is that of addresses if
    both are mapped alike, otherwise of the contents.
    """
    return call.format, call.files, call.signature, dict(call.options), [_SameBytes(part) for part in parts]


class _SameBytes:
    """Bytes, equal to the same bytes."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameBytes) and np.array_equal(_bytes(self.data), _bytes(other.data))

    __hash__ = None  # type: ignore[assignment]


def _bytes(data: memoryview) -> Array:
    return np.frombuffer(data, np.uint8)


def _require_same(call: HostedCall, description: HostedDescription) -> None:
    """Check that a model declares the inputs and outputs of its file."""
    for kind, given, found in (
        ("input", call.inputs, description.inputs),
        ("output", call.outputs, description.outputs),
    ):
        if len(given) != len(found):
            raise InvalidArgument(f"the model declares {len(given)} {kind}s, its file has {len(found)}")
        for index, (ours, theirs) in enumerate(zip(given, found, strict=True)):
            if (ours.name, ours.dtype) != (theirs.name, theirs.dtype) or not _is_case(ours.shape, theirs.shape):
                raise InvalidArgument(
                    f"the model declares {kind} {index} as {ours.name!r}, {ours.dtype} {ours.shape}; "
                    f"its file as {theirs.name!r}, {theirs.dtype} {theirs.shape}"
                )


def _is_case(ours: Shape | None, theirs: Shape | None) -> bool:
    """Return whether a shape is that of the file, perhaps with sizes that the file leaves open."""
    if ours is None or theirs is None:
        return theirs is None
    return len(ours) == len(theirs) and all(a == b or not isinstance(b, int) for a, b in zip(ours, theirs, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Executions.


class HostedProgram:
    """A prepared hosted model. Thread-safe."""

    def __init__(self, device: str, model: Model, opened: HostedModel, call: HostedCall, charge: Charge | None) -> None:
        main = model.main
        self.device, self.opened, self.call = device, opened, call
        self.charge = charge  # as long as this object exists
        self.inputs = [InputSpec.of(main, index, False) for index in main.input_indexes]
        self.output_dtypes = [InputSpec.of(main, index, True).dtype for index in main.output_indexes]
        self.lock = None if opened.is_thread_safe else threading.Lock()

    def bind(self, inputs: Sequence[Array | None], outputs: Sequence[Any]) -> HostedExecution:
        """See `PreparedProgram.bind`."""
        check_inputs(self.inputs, inputs)
        return HostedExecution(self, [_required(array) for array in inputs], outputs)


def _required(array: Array | None) -> Array:
    assert array is not None  # no input of a hosted model is optional
    return array


class HostedExecution:
    """A program that is bound to the buffers of one request. One thread runs it at a time."""

    __slots__ = ("_copies", "_is_direct", "_outputs", "_program", "_run", "_shapes")

    def __init__(self, program: HostedProgram, inputs: Sequence[Array], outputs: Sequence[Any]) -> None:
        self._program, self._outputs = program, outputs
        call = program.call
        self._copies: list[tuple[Array, Array]] = []
        views = [self._private(_declared(array, tensor)) for array, tensor in zip(inputs, call.inputs, strict=True)]
        targets = [_target(out, tensor) for out, tensor in zip(outputs, call.outputs, strict=True)]
        self._is_direct = all(target is not None for target in targets)
        self._shapes = tuple(OutputShape(tensor.dimensions) for tensor in call.outputs)
        if program.lock is None:
            self._run = program.opened.bind(views, targets)
        else:
            with program.lock:
                self._run = program.opened.bind(views, targets)

    def _private(self, array: Array) -> Array:
        """Return what the runtime reads: integers, which may be indices or sizes, are copied before each run."""
        if array.dtype.kind not in _COPIED_KINDS or not array.size:
            return array
        copy = np.empty_like(array)
        self._copies.append((copy, array))
        return copy

    def run(self, options: RunOptions = DEFAULT_RUN_OPTIONS) -> tuple[OutputShape, ...]:
        """Execute once; see `BoundProgram.run`. At the deadline the runtime is told to stop, if it can be."""
        options.check()
        for copy, array in self._copies:
            np.copyto(copy, array)
        results = self._results(options)
        if self._is_direct:
            return self._shapes
        return self._copied(results)

    def _results(self, options: RunOptions) -> Sequence[Array | None]:
        program = self._program
        if program.lock is not None:
            with program.lock:
                return self._run_until(options)
        return self._run_until(options)

    def _run_until(self, options: RunOptions) -> Sequence[Array | None]:
        if options.deadline_ns is None:
            return self._called(options)
        token = WATCHDOG.begin(options.deadline_ns, self._run.abort)
        try:
            return self._called(options)
        finally:
            WATCHDOG.end(token)

    def _called(self, options: RunOptions) -> Sequence[Array | None]:
        try:
            return self._run()
        except NnfmqError:
            raise
        except MemoryError as error:
            raise ResourceExhaustedTransient(f"{self._program.device} has not enough memory: {error}") from error
        except Exception as error:
            options.check()  # the runtime was told to stop at the deadline
            raise GeneralFailure(f"{self._program.device}: {str(error) or repr(error)}") from error

    def _copied(self, results: Sequence[Array | None]) -> tuple[OutputShape, ...]:
        """Copy what the runtime returned to the buffers. Raises OutputInsufficientSize."""
        program = self._program
        arrays = []
        for result, out, tensor, dtype in zip(
            results, self._outputs, program.call.outputs, program.output_dtypes, strict=True
        ):
            if result is None:
                arrays.append(out)  # filled in place
                continue
            if result.dtype.itemsize != dtype.itemsize:
                raise GeneralFailure(f"{program.device} computed {result.dtype} for {tensor.name!r}, not {dtype}")
            arrays.append(_crossing(result.view(dtype) if result.dtype != dtype else result, tensor))
        return copy_outputs(arrays, self._outputs)


def _declared(array: Array, tensor: HostedTensor) -> Array:
    """Return an input as the file declares it: of rank 0, without elements, of bools."""
    if tensor.dtype == "bool":
        array = array.view(np.bool_)
    if tensor.is_rank_0:
        return array.reshape(())
    return array[:0].reshape(tensor.known_shape or 0) if tensor.is_empty else array


def _target(out: Any, tensor: HostedTensor) -> Array | None:
    """Return the client's memory as the output that the file declares; None if the runtime returns an array."""
    if not isinstance(out, np.ndarray) or tensor.known_shape is None or not out.flags.c_contiguous:
        return None
    return None if tensor.is_empty else _declared(out, tensor)


def _crossing(result: Array, tensor: HostedTensor) -> Array:
    """Return a result in the form of its operand: one element for rank 0, and for no elements if that is declared."""
    if tensor.is_empty:
        return np.zeros(1, result.dtype)
    return result.reshape(1) if tensor.is_rank_0 and result.ndim == 0 else result
