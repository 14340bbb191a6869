"""The built-in devices: the reference interpreter and the compiling engine.

A device of the configuration file is one of these two engines, perhaps limited to some operations, with the performance
info that its entry states (docs/how-to/devices.md).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable
from enum import IntEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from nnfmq.engines import interpreter
from nnfmq.engines.execution import PreparedProgram
from nnfmq.hal.capabilities import Capabilities, NumberOfCacheFiles
from nnfmq.hal.extension_codes import is_extension
from nnfmq.hal.types import Model, Operation, OperationType, Subgraph
from nnfmq.operations.extensions import INSTALLED, VendorExtension
from nnfmq.service import compile_jobs
from nnfmq.service.caching import interpreter_cache_format, program_cache
from nnfmq.service.caching.compilation_cache import CacheContents, DeviceIdentity
from nnfmq.service.caching.interpreter_cache_format import PackedConstants
from nnfmq.service.device import DeviceBase
from nnfmq.service.device_configuration import DeviceEntry

__all__ = ["CompiledDevice", "InterpreterDevice"]

_log = logging.getLogger("nnfmq.devices")


class InterpreterDevice(DeviceBase):
    """The reference interpreter, whole or limited to some operations, as its entry in the configuration says."""

    def __init__(self, entry: DeviceEntry) -> None:
        super().__init__()
        self.name = entry.name
        self._types = entry.types()
        self._operations = entry.operation_types()
        self._capabilities = entry.capabilities()

    @property
    def capabilities(self) -> Capabilities:
        """What the configuration says."""
        return self._capabilities

    @property
    def extensions(self) -> Iterable[VendorExtension]:
        """All that plug-ins brought, where nothing is left out."""
        return INSTALLED.values() if self._types is None and self._operations is None else ()

    def supports(self, _model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """Return True for what the interpreter computes and the configuration does not leave out."""
        return self._admits(subgraph, operation) and interpreter.supports(subgraph, operation)

    def _admits(self, subgraph: Subgraph, operation: Operation) -> bool:
        if self._types is None and self._operations is None:
            return True
        if is_extension(operation.type) or not operation.inputs:
            return False
        first = operation.inputs[operation.type == OperationType.SELECT]  # its first one is always a boolean
        return _is_one_of(operation.type, self._operations) and _is_one_of(subgraph.operands[first].type, self._types)

    def compile(self, model: Model) -> PreparedProgram:
        """Prepare the model for the interpreter."""
        return interpreter.prepare(model)

    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        """The model's file, and the constants'."""
        return NumberOfCacheFiles(1, 1)

    def save(self, model: Model, program: PreparedProgram) -> CacheContents | None:
        """Return the model and its packed constants."""
        assert isinstance(program, interpreter.Program)
        return interpreter_cache_format.encode_program(model, program.prepacked)

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Bind the saved model, without validating or packing again."""
        return interpreter_cache_format.decode_program(contents)


class CompiledDevice(InterpreterDevice):
    """As the interpreter, with machine code for what the compiling engine has kernels for (the extra `compiled`)."""

    @property
    def unavailable_reason(self) -> str:
        """That llvmlite is not installed."""
        return "" if _llvmlite() else "llvmlite is not installed: pip install 'nnfmq[compiled]'"

    @property
    def version_string(self) -> str:
        """What generates the code belongs to it."""
        return f"{super().version_string} llvmlite-{_llvmlite() or 'none'}"

    @property
    def identity(self) -> DeviceIdentity:
        """The instruction set, which may be forced, is part of it."""
        from nnfmq.engines.compiled.jit import host_target

        return DeviceIdentity(self.name, f"{self.version_string} {host_target().name}")

    def compile(self, model: Model) -> PreparedProgram:
        """Generate machine code, which takes long, and keep it in the driver's cache.

        Where workers share it the program is linked once more, over the memory that they share: its own goes.
        """
        compile_jobs.prefetch_imports()
        from nnfmq.engines.compiled.partition import prepare  # what it imports need not be installed

        program = prepare(model, compile=compile_jobs.compile_in_processes)
        entry = program_cache.entry_for(self.identity, model)
        shared = None if entry is None else entry.store(program.prepacked)
        if entry is None or shared is None:
            return program
        try:
            return _link(entry, model, shared) or program
        except MemoryError:  # for both at once: its own will do
            return program

    def load_cached(self, model: Model) -> PreparedProgram | None:
        """Link what the driver's cache has. What cannot be linked is forgotten: else it would fail for good."""
        entry = program_cache.entry_for(self.identity, model)
        packed = None if entry is None else entry.load()
        return None if entry is None or packed is None else _link(entry, model, packed)

    def compile_baseline(self, model: Model) -> PreparedProgram | None:
        """Prepare the model for the interpreter."""
        return interpreter.prepare(model)

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Link the saved code, without validating, packing or generating again."""
        from nnfmq.engines.compiled.partition import prepare

        return interpreter_cache_format.decode_program(contents, prepare)


def _link(entry: program_cache.CacheEntry, model: Model, packed: PackedConstants) -> PreparedProgram | None:
    """Return the program that lies in `packed`; None where it cannot be linked, after removing it from the cache."""
    from nnfmq.engines.compiled.partition import prepare

    try:
        return prepare(model, packed)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  the linker's too: the model is compiled afresh
        _log.error("an entry of the cache is removed: it cannot be linked\n%s", traceback.format_exc())
        entry.remove()
        return None


@cache
def _llvmlite() -> str | None:
    """Return its version, None where it is not installed."""
    try:
        return version("llvmlite")
    except PackageNotFoundError:
        return None


def _is_one_of(code: IntEnum, allowed: frozenset[int] | None) -> bool:
    return allowed is None or code in allowed
