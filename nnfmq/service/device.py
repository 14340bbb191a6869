"""DeviceBase: what a driver writer subclasses, and what the driver asks of every device (IDevice).

A subclass says which operations it `supports` and how it makes a model ready (`compile`); everything else has a
default. The driver calls the methods of the lower half: they judge what a client gave, although the client library
has done so as well (applications are not trusted), and refuse while an administrator has the device BUSY or OFFLINE.
Numbers of extensions are each model's own, so they are translated first.
docs/how-to/devices.md has a whole driver to copy.
(REQUIREMENTS DEV, SUP, PREP, EXT)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

from nnfmq.engines.control_flow import reachable_subgraphs
from nnfmq.engines.execution import PreparedProgram, TieredProgram
from nnfmq.hal.capabilities import CPU_PERFORMANCE, Capabilities, NumberOfCacheFiles, uniform_capabilities
from nnfmq.hal.errors import DeviceUnavailable, GeneralFailure, InvalidArgument, MissedDeadlinePersistent
from nnfmq.hal.feature_levels import FeatureLevel
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
from nnfmq.operations.extensions import VendorExtension, translated
from nnfmq.serialize import messages
from nnfmq.service.caching.cache_key import is_key_available
from nnfmq.service.caching.compilation_cache import CacheContents, CacheFiles, DeviceIdentity, read_files, save_files
from nnfmq.service.driver_prepared_model import DriverPreparedModel
from nnfmq.service.error_translation import errors_to_status
from nnfmq.validation import validate_model
from nnfmq.validation.interface_conversion import require_level, require_prefixes
from nnfmq.validation.values import validate_extensions, validate_hints

__all__ = ["FEATURE_LEVEL", "DeviceBase", "release"]

FEATURE_LEVEL = FeatureLevel.AIDL_V4


@cache
def release() -> str:
    """Return nnfmq's own."""
    try:
        return version("nnfmq")
    except PackageNotFoundError:
        return "source"  # run from a tree that nobody installed


class DeviceBase:
    """One device of a driver. Subclass it: `name`, `supports` and `compile` are enough.

    `name` is unique in the driver. `type` says what it computes on, honestly. `feature_level` is the newest interface
    whose operations it may support.
    """

    name: str
    type: DeviceType = DeviceType.CPU
    feature_level: int = FEATURE_LEVEL

    def __init__(self) -> None:
        self.status_byte = memoryview(bytearray(1))  # a driver with workers puts one in its place that all of them see

    @property
    def unavailable_reason(self) -> str:
        """Why it can compute nothing on this machine, as the end of a sentence; empty where it can."""
        return ""

    @property
    def version_string(self) -> str:
        """A string that differs between any two releases of this device (DEV-4); here nnfmq's release."""
        return f"nnfmq-{release()}"

    @property
    def capabilities(self) -> Capabilities:
        """How fast it is, relative to the CPU; lower is better (CAP)."""
        return uniform_capabilities(CPU_PERFORMANCE)

    @property
    def extensions(self) -> Iterable[VendorExtension]:
        """The extensions whose every type and operation it supports (DEV-5); here none."""
        return ()

    def supports(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """Return True if this device can execute `operation`, one of `subgraph`'s, in `model`, which is valid.

        The driver itself looks at all that an IF or a WHILE calls (SUP-4). False whenever unsure (SUP-1): types,
        parameters and sizes are all good reasons (SUP-3).
        """
        raise NotImplementedError

    def compile(self, model: Model) -> PreparedProgram:
        """Make a model ready whose every operation is supported; called on a thread of its own, and may take long.

        Return something like `engines.interpreter.prepare(model)`, or an `engines.function.FunctionProgram`. The model
        is valid and private: it never changes, and its pools outlive the result. Raise GeneralFailure for what cannot
        be executed after all.
        """
        raise NotImplementedError

    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        """How many files it needs to `save` a compilation (DEV-6); here none, so that nothing is ever saved."""
        return NumberOfCacheFiles()

    def save(self, model: Model, program: PreparedProgram) -> CacheContents | None:
        """Return what `restore` needs to make `program`, which `compile` made of `model`, again; None: not this one.

        As many bytes as `cache_files_needed` says. The driver writes and seals them, so `restore` is given exactly what
        was saved by this version of the device, or nothing.
        """
        raise NotImplementedError

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Return the model and the program that were saved. `contents` is private, and lives as long as the result."""
        raise NotImplementedError

    def load_cached(self, _model: Model) -> PreparedProgram | None:
        """Return what `compile` made of an equal model before, where the driver keeps that; here nothing."""
        return None

    def compile_baseline(self, _model: Model) -> PreparedProgram | None:
        """Return a program that is ready sooner than `compile`'s, and answers alike; None: there is no such thing.

        A client that prefers a FAST_SINGLE_ANSWER is given it, until `compile` is done on a thread of its own.
        """
        return None

    # -- what the driver calls ----------------------------------------------------------------------------------------

    @property
    def info(self) -> messages.DeviceInfo:
        """What clients are told of it."""
        offered = sorted(self.extensions, key=lambda extension: extension.name)
        extensions = tuple(_extension_data(extension) for extension in offered)
        level, status, caches = self.feature_level, self.status, self.number_of_cache_files
        kind, version = self.type, self.version_string
        return messages.DeviceInfo(self.name, kind, version, level, status, extensions, caches.model, caches.data)

    @property
    def number_of_cache_files(self) -> NumberOfCacheFiles:
        """What it needs, and none where this driver has no key to seal them by."""
        needed = self.cache_files_needed
        return needed if needed != NumberOfCacheFiles() and is_key_available() else NumberOfCacheFiles()

    @property
    def identity(self) -> DeviceIdentity:
        """What its caches are bound to, beside the driver's build."""
        return DeviceIdentity(self.name, self.version_string)

    @property
    def status(self) -> DeviceStatus:
        """What an administrator made of it; OFFLINE where there is an unavailable_reason."""
        return DeviceStatus.OFFLINE if self.unavailable_reason else DeviceStatus(self.status_byte[0])

    def require_available(self) -> None:
        """Raise DeviceUnavailable while the device is BUSY or OFFLINE (DEV-14)."""
        if self.unavailable_reason:
            raise DeviceUnavailable(f"device {self.name!r} is OFFLINE: {self.unavailable_reason}")
        if self.status_byte[0]:
            raise DeviceUnavailable(f"device {self.name!r} is {self.status.name}")

    def get_capabilities(self) -> Capabilities:
        """Return the capabilities. Raises DeviceUnavailable."""
        self.require_available()
        return self.capabilities

    def supported_operations(self, model: Model, level: FeatureLevel = FeatureLevel.AIDL_V4) -> list[bool]:
        """Return one boolean per operation of the main subgraph; IF and WHILE need all that they call (SUP-4).

        Raises DeviceUnavailable, and InvalidArgument for a model that is invalid or newer than the interface `level`.
        """
        self.require_available()
        with errors_to_status("looking at the model"):
            return self._supported(_checked(model, level))

    def _supported(self, model: Model) -> list[bool]:
        inner = [
            all(self._can(model, graph, operation) for operation in graph.operations) for graph in model.referenced
        ]
        return [
            all(inner[index] for index in reachable_subgraphs(model, operation))
            and self._can(model, model.main, operation)
            for operation in model.main.operations
        ]

    def _can(self, model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        return bool(self.supports(model, subgraph, operation))

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
        """Judge the arguments of prepareModel, and return the model for `prepare_model`.

        Raises DeviceUnavailable, InvalidArgument, MissedDeadlinePersistent.
        """
        self.require_available()
        _check_code(ExecutionPreference, preference)
        _check_code(Priority, priority)
        validate_hints(hints, extensions)  # which no device here knows, and which are ignored then (PREP-10)
        with errors_to_status("looking at the model"):
            model = _checked(model, level)
        _check_deadline(deadline_ns)
        return model

    def prepare_model(
        self, model: Model, caches: CacheFiles | None = None, preference: int = ExecutionPreference.SUSTAINED_SPEED
    ) -> DriverPreparedModel:
        """Compile a model that `check_prepare_arguments` returned, and save that to `caches`, if it can be. Blocks.

        For a FAST_SINGLE_ANSWER the program may be a TieredProgram: whoever calls lets its `make` run somewhere.
        Not where there are caches, which a client may read once the model is ready.

        Raises GeneralFailure for what is not supported, ResourceExhaustedTransient where memory runs out.
        """
        with errors_to_status("preparing the model"):
            program = self._program(model, not caches and preference == ExecutionPreference.FAST_SINGLE_ANSWER)
        if caches:
            save_files(caches, self.number_of_cache_files, self.identity, lambda: self.save(model, program))
        return DriverPreparedModel(model, program, status_byte=self.status_byte)

    def _program(self, model: Model, is_in_a_hurry: bool) -> PreparedProgram:
        supported = self._supported(model)
        if not all(supported):
            number = supported.index(False)
            name = model.main.operations[number].type.name
            raise GeneralFailure(f"device {self.name!r} does not support operation {number} ({name}) as it is here")
        cached = self.load_cached(model)  # perhaps under a configuration that left out less, so not before
        if cached is not None:
            return cached
        baseline = self.compile_baseline(model) if is_in_a_hurry else None
        if baseline is None:
            return self.compile(model)
        return TieredProgram(baseline, partial(self.compile, model))

    def load_caches(self, caches: CacheFiles, deadline_ns: int | None, limit_bytes: int) -> tuple[CacheContents, int]:
        """Judge the arguments of prepareModelFromCache; return what is for `restore_model`, and its bytes. Blocks.

        Raises DeviceUnavailable, InvalidArgument, MissedDeadlinePersistent, and GeneralFailure for files that are not
        exactly what was saved.
        """
        self.require_available()
        with errors_to_status("reading the cache"):
            contents = read_files(caches, self.number_of_cache_files, self.identity, limit_bytes)
        _check_deadline(deadline_ns)
        return contents

    def restore_model(self, contents: CacheContents) -> DriverPreparedModel:
        """Make a model of what `load_caches` returned. Blocks. Raises as `prepare_model`."""
        with errors_to_status("preparing the model from its cache"):
            model, program = self.restore(contents)
            if not all(self._supported(model)):
                raise GeneralFailure(f"device {self.name!r} does not support what it saved any more")
        return DriverPreparedModel(model, program, status_byte=self.status_byte)


def _check_deadline(deadline_ns: int | None) -> None:
    if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
        raise MissedDeadlinePersistent("the deadline had passed before the preparation began")


def _checked(model: Model, level: FeatureLevel) -> Model:
    """Return `model`, which is valid at `level`, with this process's numbers of extensions. Raises InvalidArgument."""
    validate_extensions(model.extensions)
    require_prefixes(model, level)
    model = translated(model)
    require_level(validate_model(model), level)
    return model


def _extension_data(extension: VendorExtension) -> messages.ExtensionData:
    types = ((element, element.information) for element in extension.types)
    return messages.ExtensionData(
        extension.name,
        tuple(messages.OperandTypeData(i.type, i.is_tensor, i.byte_size, element.dtype) for element, i in types),
    )


def _check_code(kind: type[IntEnum], code: int) -> None:
    allowed = [member.value for member in kind]
    if code not in allowed:
        raise InvalidArgument(f"{kind.__name__} {code} is unknown; allowed are {allowed[0]} to {allowed[-1]}")
