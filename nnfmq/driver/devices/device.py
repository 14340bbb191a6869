"""DeviceBase: the base class of a driver's devices, and the driver's interface to them (HAL `IDevice`).

A subclass implements `supports` and `compile`; everything else has a default. The driver calls the methods of the
second half. These validate a client's arguments although the client library has done so, because applications are not
trusted; they raise DeviceUnavailable while an administrator has set the device BUSY or OFFLINE; and they translate a
model's extension prefixes, which each model assigns itself, to those of this process.

docs/how-to/devices.md contains a complete driver. (DEV, SUP, PREP and EXT requirements)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import partial

from msgspec import Struct

from nnfmq.driver.cache.files import CacheContents, CacheFiles, DeviceIdentity, is_key_available, read_files, save_files
from nnfmq.driver.devices.configuration import WORD_BYTES, status_of
from nnfmq.driver.devices.installation import installation
from nnfmq.driver.execution.prepared_model import DriverPreparedModel
from nnfmq.driver.memory.private import ConstantPool
from nnfmq.driver.session.error_translation import errors_to_status
from nnfmq.engines.execution import PreparedProgram, TieredProgram
from nnfmq.hal.capabilities import CPU_PERFORMANCE, Capabilities, NumberOfCacheFiles, uniform_capabilities
from nnfmq.hal.deterministic import is_deterministic
from nnfmq.hal.errors import DeviceUnavailable, GeneralFailure, InvalidArgument, MissedDeadlinePersistent
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.hosted import HostedCall, HostedDescription
from nnfmq.hal.preparation import ProgramKind
from nnfmq.hal.summaries import listed
from nnfmq.hal.types import (
    DeviceStatus,
    DeviceType,
    ExecutionPreference,
    ExtensionNameAndPrefix,
    Model,
    Operation,
    Priority,
    Subgraph,
    TokenValuePair,
)
from nnfmq.operations.control_flow import reachable_subgraphs
from nnfmq.operations.extensions import VendorExtension, to_local_prefixes
from nnfmq.serialize import messages
from nnfmq.validation import validate_model
from nnfmq.validation.interface_versions import require_level, require_prefixes
from nnfmq.validation.values import validate_extensions, validate_hints

__all__ = ["FEATURE_LEVEL", "DeviceBase", "SandboxNeeds"]

FEATURE_LEVEL = FeatureLevel.AIDL_V4
_NAMES_SHOWN, _INDEXES_SHOWN = 40, 4  # of operations that are not supported, in the message


class SandboxNeeds(Struct, frozen=True):
    """The rights that a device needs in its worker's sandbox, beside reading what Python imports from.

    A worker has all devices of its driver, so what one of them declares, each worker may.

    Attributes:
        reads: Absolute paths of files and folders that it reads.
        nodes: Absolute paths of device nodes, such as /dev/dri/renderD128, that it opens and controls (ioctl(2)).
        generates_code: Whether it makes memory executable that it has written: a compiler at run time.
        has_private_folder: Whether it keeps files: in a folder of the worker, where Python's `tempfile` creates them.
    """

    reads: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    generates_code: bool = False
    has_private_folder: bool = False


class DeviceBase:
    """A device of a driver. Subclasses define at least `name`, `supports` and `compile`.

    `name` is unique in the driver. `type` is the kind of processor that the device computes on. `feature_level` is the
    newest interface version whose operations the device may support. `uses_cores` says whether an execution computes on
    this machine's cores from its beginning to its end, so that it waits for its turn there. `sandbox_needs` is what it
    does in its worker that others may not.
    """

    name: str
    type: DeviceType = DeviceType.CPU
    feature_level: int = FEATURE_LEVEL
    uses_cores: bool = False
    sandbox_needs: SandboxNeeds = SandboxNeeds()
    compiled_kind: ProgramKind = ProgramKind.OTHER  # of what `compile` returns
    restored_kind: ProgramKind = ProgramKind.OTHER  # of what `load_cached` and `restore` return

    def __init__(self) -> None:
        # The status as an administrator set it. `DeviceRegistry.share_status` replaces this private word by one that
        # all workers map.
        self.status_word = memoryview(bytearray(WORD_BYTES))

    @property
    def status_byte(self) -> memoryview:
        """A view of one byte, which is 0 while an administrator has the device AVAILABLE."""
        return self.status_word[:1]

    @property
    def unavailable_reason(self) -> str:
        """The reason why the device cannot execute anything on this machine; empty if it can. Clients get it."""
        return ""

    @property
    def version_string(self) -> str:
        """A string that differs between any two releases of the device (DEV-4). The default is nnfmq's release."""
        return f"nnfmq-{installation().release}"

    @property
    def capabilities(self) -> Capabilities:
        """Performance relative to the CPU; lower is better (CAP). The default is the CPU's own performance."""
        return uniform_capabilities(CPU_PERFORMANCE)

    @property
    def extensions(self) -> Iterable[VendorExtension]:
        """The vendor extensions of which the device supports all types and operations (DEV-5). The default is none."""
        return ()

    def prefetch_imports(self) -> None:
        """Import what preparations need, before a client waits for one. Blocks for milliseconds, raises nothing."""

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """Return whether the device can execute `operation`, which is in `subgraph` of `model`. The model is valid.

        Return False if unsure (SUP-1); types, parameters and sizes are all good reasons (SUP-3). The driver checks the
        subgraphs that an IF or WHILE calls by itself (SUP-4).
        """
        raise NotImplementedError

    def compile(self, model: Model) -> PreparedProgram:
        """Prepare a model all of whose operations are supported. May block: it runs on a thread of the session's pool.

        Return for example `engines.interpreter.prepare(model)` or an `engines.function.FunctionProgram`. The model is
        valid and private: it never changes, and its memory pools outlive the returned program.

        Raises:
            GeneralFailure: If the model cannot be executed after all.
        """
        raise NotImplementedError

    def describe_file(self, call: HostedCall, pools: Sequence[ConstantPool]) -> HostedDescription:
        """Return the description of a file, whose bytes are `pools`, by a device with the extension `nnfmq.hosted`.

        Raises:
            InvalidArgument: If the device does not run such files, or cannot open this one.
        """
        del call, pools
        raise InvalidArgument(f"device {self.name!r} runs no files of other runtimes")

    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        """The number of files that `save` returns (DEV-6). The default is none: compilations are not cached."""
        return NumberOfCacheFiles()

    def save(self, model: Model, program: PreparedProgram) -> CacheContents | None:
        """Return the contents from which `restore` recreates `program`, or None if this one cannot be cached.

        `compile` returned `program` for `model`. The number of files is that of `cache_files_needed`. The driver writes
        and seals them, so `restore` receives exactly what this version of the device saved.
        """
        raise NotImplementedError

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Return model and program from saved contents, which are private and live as long as the program."""
        raise NotImplementedError

    def load_cached(self, _model: Model) -> PreparedProgram | None:
        """Return a program from a cache of the device's own, or None. The default is None."""
        return None

    def compile_baseline(self, _model: Model) -> PreparedProgram | None:
        """Return a program that is available faster than that of `compile` and gives the same results, or None.

        Used for FAST_SINGLE_ANSWER while `compile` runs on a background thread. The default is None.
        """
        return None

    # -- the driver's interface ---------------------------------------------------------------------------------------

    @property
    def info(self) -> messages.DeviceInfo:
        """The description that clients receive."""
        extensions = sorted(self.extensions, key=lambda extension: extension.name)
        cache_files = self.number_of_cache_files
        return messages.DeviceInfo(
            self.name,
            self.type,
            self.version_string,
            self.feature_level,
            self.status,
            tuple(_extension_data(extension) for extension in extensions),
            cache_files.model,
            cache_files.data,
        )

    @property
    def number_of_cache_files(self) -> NumberOfCacheFiles:
        """The number of cache files that clients should pass: none if this driver has no key to seal them."""
        needed = self.cache_files_needed
        return needed if needed != NumberOfCacheFiles() and is_key_available() else NumberOfCacheFiles()

    @property
    def identity(self) -> DeviceIdentity:
        """Name and version, which caches of this device are valid for (besides the driver's build)."""
        return DeviceIdentity(self.name, self.version_string)

    @property
    def status(self) -> DeviceStatus:
        """The status that an administrator has set; OFFLINE if the device cannot be used on this machine."""
        return DeviceStatus.OFFLINE if self.unavailable_reason else status_of(self.status_word)

    def require_available(self) -> None:
        """Raise DeviceUnavailable, with the reason if there is one, while the device is BUSY or OFFLINE (DEV-14)."""
        if self.unavailable_reason:
            raise DeviceUnavailable(f"device {self.name!r} is OFFLINE: {self.unavailable_reason}")
        if self.status_word[0]:
            raise DeviceUnavailable(f"device {self.name!r} is {self.status.name}")

    def get_capabilities(self) -> Capabilities:
        """Return the capabilities. Raises DeviceUnavailable."""
        self.require_available()
        return self.capabilities

    def supported_operations(self, model: Model, level: FeatureLevel = FeatureLevel.AIDL_V4) -> list[bool]:
        """Return one boolean for each operation of the main subgraph.

        An IF or WHILE is supported if all operations of the subgraphs that it can call are (SUP-4).

        Raises:
            DeviceUnavailable: If the device is BUSY or OFFLINE.
            InvalidArgument: If the model is not valid, or newer than the interface `level`.
        """
        self.require_available()
        with errors_to_status("checking the model"):
            return self._supported(_validated(model, level))

    def _supported(self, model: Model) -> list[bool]:
        subgraphs = [
            all(bool(self.supports(model, subgraph, operation)) for operation in subgraph.operations)
            for subgraph in model.referenced
        ]
        return [
            all(subgraphs[index] for index in reachable_subgraphs(model, operation))
            and bool(self.supports(model, model.main, operation))
            for operation in model.main.operations
        ]

    def check_prepare_arguments(
        self,
        model: Model,
        preference: int,
        priority: int,
        deadline_ns: int | None,
        level: FeatureLevel = FeatureLevel.AIDL_V4,
        hints: Sequence[TokenValuePair] = (),
        extensions: Sequence[ExtensionNameAndPrefix] = (),
    ) -> Model:
        """Validate the arguments of prepareModel. Return the model to be passed to `prepare_model`.

        Raises:
            DeviceUnavailable: If the device is BUSY or OFFLINE.
            InvalidArgument: If an argument is not valid.
            MissedDeadlinePersistent: If the deadline has passed.
        """
        self.require_available()
        _require_member(ExecutionPreference, preference)
        _require_member(Priority, priority)
        validate_hints(hints, extensions)
        is_deterministic(hints, extensions)  # raises if its value is wrong; other hints are ignored (PREP-10)
        with errors_to_status("checking the model"):
            model = _validated(model, level)
        _require_before(deadline_ns)
        return model

    def prepare_model(
        self, model: Model, caches: CacheFiles | None = None, preference: int = ExecutionPreference.SUSTAINED_SPEED
    ) -> DriverPreparedModel:
        """Compile a model that `check_prepare_arguments` returned, and save it to `caches` if possible. Blocks.

        For FAST_SINGLE_ANSWER the program may be a `TieredProgram`; the caller then arranges for its compilation in the
        background. Not if there are caches: a client may read them as soon as the model is prepared.

        Raises:
            GeneralFailure: If an operation is not supported, or compiling fails.
            ResourceExhaustedTransient: If there is not enough memory.
        """
        with errors_to_status("preparing the model"):
            prefer_fast = not caches and preference == ExecutionPreference.FAST_SINGLE_ANSWER
            program, kind = self._program(model, prefer_fast)
        if caches:
            save_files(caches, self.number_of_cache_files, self.identity, lambda: self.save(model, program))
        return DriverPreparedModel(model, program, kind, status_byte=self.status_byte)

    def _program(self, model: Model, prefer_fast: bool) -> tuple[PreparedProgram, ProgramKind]:
        supported = self._supported(model)
        if not all(supported):
            raise GeneralFailure(f"device {self.name!r} does not support {_unsupported(model, supported)}")
        # Only now: a program in the cache may be that of a configuration which supported more operations.
        cached = self.load_cached(model)
        if cached is not None:
            return cached, self.restored_kind
        baseline = self.compile_baseline(model) if prefer_fast else None
        if baseline is None:
            return self.compile(model), self.compiled_kind
        return TieredProgram(baseline, partial(self.compile, model)), ProgramKind.BASELINE

    def load_caches(self, caches: CacheFiles, deadline_ns: int | None, limit_bytes: int) -> tuple[CacheContents, int]:
        """Validate the arguments of prepareModelFromCache and read the files. Blocks.

        Return the contents to be passed to `restore_model`, and their size in bytes.

        Raises:
            DeviceUnavailable: If the device is BUSY or OFFLINE.
            InvalidArgument: If the token, the number of files or a file is not valid.
            GeneralFailure: If the files are not exactly what was saved for this device, or exceed `limit_bytes`.
            MissedDeadlinePersistent: If the deadline has passed.
        """
        self.require_available()
        with errors_to_status("reading the cache"):
            contents = read_files(caches, self.number_of_cache_files, self.identity, limit_bytes)
        _require_before(deadline_ns)
        return contents

    def restore_model(self, contents: CacheContents) -> DriverPreparedModel:
        """Return the prepared model from contents that `load_caches` returned. Blocks. Raises as `prepare_model`."""
        with errors_to_status("preparing the model from its cache"):
            model, program = self.restore(contents)
            if not all(self._supported(model)):
                raise GeneralFailure(f"device {self.name!r} no longer supports the model that it saved")
        return DriverPreparedModel(model, program, self.restored_kind, status_byte=self.status_byte)


def _unsupported(model: Model, supported: Sequence[bool]) -> str:
    """Return the operations of the main subgraph that are not supported, by name, with some of their indexes."""
    indexes: dict[str, list[int]] = {}
    for index, operation in enumerate(model.main.operations):
        if not supported[index]:
            indexes.setdefault(operation.type.name, []).append(index)
    names = [
        f"{listed(found[:_INDEXES_SHOWN], len(found))} ({name})" for name, found in list(indexes.items())[:_NAMES_SHOWN]
    ]
    plural = "s" if supported.count(False) > 1 else ""
    return f"operation{plural} {listed(names, len(indexes))} as {'they are' if plural else 'it is'} here"


def _require_before(deadline_ns: int | None) -> None:
    if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
        raise MissedDeadlinePersistent("the deadline passed before the preparation began")


def _validated(model: Model, level: FeatureLevel) -> Model:
    """Return `model` with this process's extension prefixes. Raises InvalidArgument if it is not valid at `level`."""
    validate_extensions(model.extensions)
    require_prefixes(model, level)
    model = to_local_prefixes(model)
    require_level(validate_model(model), level)
    return model


def _extension_data(extension: VendorExtension) -> messages.ExtensionData:
    types = ((element, element.information) for element in extension.types)
    return messages.ExtensionData(
        extension.name,
        tuple(messages.OperandTypeData(i.type, i.is_tensor, i.byte_size, element.dtype) for element, i in types),
    )


def _require_member(kind: type[IntEnum], code: int) -> None:
    allowed = [member.value for member in kind]
    if code not in allowed:
        raise InvalidArgument(f"{kind.__name__} {code} is unknown; allowed are {allowed[0]} to {allowed[-1]}")
