"""The built-in devices: the reference interpreter and the compiling engine.

A device of the configuration file is one of these two engines, perhaps limited to some operations, with the performance
info that its entry states (docs/how-to/devices.md).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable

from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.base.digests import sha256
from nnfmq.driver.cache import files, programs
from nnfmq.driver.cache.files import CacheContents, DeviceIdentity, PackedConstants
from nnfmq.driver.compilation import jobs
from nnfmq.driver.compilation.kernel_cache import KernelCache
from nnfmq.driver.devices.configuration import DeviceEntry
from nnfmq.driver.devices.device import DeviceBase
from nnfmq.driver.devices.installation import installation
from nnfmq.engines import interpreter
from nnfmq.engines.execution import PreparedProgram
from nnfmq.engines.program import Program
from nnfmq.hal.capabilities import Capabilities, NumberOfCacheFiles
from nnfmq.hal.deterministic import DETERMINISTIC
from nnfmq.hal.extensions import is_extension
from nnfmq.hal.preparation import ProgramKind
from nnfmq.hal.types import Model, Operation, OperationType, Subgraph
from nnfmq.operations.extensions import INSTALLED, VendorExtension

__all__ = ["CompiledDevice", "InterpreterDevice"]

_log = logging.getLogger("nnfmq.devices")
_DETERMINISTIC = VendorExtension(DETERMINISTIC, (), ())


class InterpreterDevice(DeviceBase):
    """The reference interpreter, limited to the operations and types of its configuration entry."""

    uses_cores = True
    compiled_kind = restored_kind = ProgramKind.INTERPRETER

    def __init__(self, entry: DeviceEntry) -> None:
        super().__init__()
        self.name = entry.name
        self._types = entry.types
        self._operations = entry.operation_types
        self._capabilities = entry.capabilities

    @property
    def capabilities(self) -> Capabilities:
        """The performance info of the configuration entry."""
        return self._capabilities

    @property
    def extensions(self) -> Iterable[VendorExtension]:
        """All installed extensions if the device is not limited, else none."""
        return INSTALLED.values() if self._types is None and self._operations is None else ()

    def supports(self, _model: Model, subgraph: Subgraph, operation: Operation) -> bool:
        """Return whether the configuration allows the operation and the interpreter supports it."""
        return self._allows(subgraph, operation) and interpreter.supports(subgraph, operation)

    def _allows(self, subgraph: Subgraph, operation: Operation) -> bool:
        if self._types is None and self._operations is None:
            return True
        if is_extension(operation.type) or not operation.inputs:
            return False
        # The first operand of SELECT is the boolean condition; its second has the type that matters.
        first = operation.inputs[operation.type == OperationType.SELECT]
        first_type = subgraph.operands[first].type
        return (self._operations is None or operation.type in self._operations) and (
            self._types is None or first_type in self._types
        )

    def compile(self, model: Model) -> PreparedProgram:
        """Prepare the model for the interpreter."""
        return interpreter.prepare(model)

    @property
    def cache_files_needed(self) -> NumberOfCacheFiles:
        """One model file, and one data file for the constants."""
        return NumberOfCacheFiles(1, 1)

    def save(self, model: Model, program: PreparedProgram) -> CacheContents | None:
        """Return the model and its packed constants, or None for a model with extensions of plug-ins."""
        assert isinstance(program, Program)
        return files.encode_program(model, program.prepacked)

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Bind the saved model again, without validating it or packing its constants."""
        return files.decode_program(contents)


class CompiledDevice(InterpreterDevice):
    """The compiling engine: machine code for operations that have kernels, the interpreter for the others.

    It requires llvmlite (the extra `compiled`).
    """

    compiled_kind, restored_kind = ProgramKind.COMPILED, ProgramKind.CACHED

    @property
    def extensions(self) -> Iterable[VendorExtension]:
        """Those of the interpreter, and `nnfmq.deterministic`."""
        return (*super().extensions, _DETERMINISTIC)

    @property
    def unavailable_reason(self) -> str:
        """The advice to install llvmlite, if it is missing."""
        return "" if installation().llvmlite else "llvmlite is not installed: pip install 'nnfmq[compiled]'"

    @property
    def version_string(self) -> str:
        """Nnfmq's release and the version of llvmlite, which generates the code."""
        return f"{super().version_string} llvmlite-{installation().llvmlite or 'none'}"

    def prefetch_imports(self) -> None:
        """Import what links a program from the driver's cache, if there may be one."""
        if not self.unavailable_reason and programs.cache_limit_bytes():
            sha256()  # loads OpenSSL, if that computes the digests
            import nnfmq.engines.compiled.artifact  # noqa: F401

    @property
    def identity(self) -> DeviceIdentity:
        """Name and version, with the instruction set, which $NNFMQ_TARGET selects, and $NNFMQ_GUARD_PAGES."""
        from nnfmq.engines.compiled.target import host_target

        guards = settings.GUARD_PAGES.value()
        suffix = f" guard-pages-{guards}" if guards else ""
        return DeviceIdentity(self.name, f"{self.version_string} {host_target().name}{suffix}")

    def compile(self, model: Model) -> PreparedProgram:
        """Generate machine code of kernels that the driver's cache lacks, and store program and kernels there. Blocks.

        If workers share the program, it is linked again over the shared memory, so that the private copy is freed.
        """
        jobs.prefetch_imports()
        from nnfmq.engines.compiled.partition import prepare  # imports llvmlite, which need not be installed

        is_deterministic = jobs.current_prepare_context().is_deterministic
        kernels = KernelCache(self.identity)
        program = prepare(model, compile=kernels.compile, is_deterministic=is_deterministic)
        entry = self._entry(model)
        shared = None if entry is None else entry.store(program.prepacked)
        kernels.store()
        if entry is None or shared is None:
            return program
        try:
            return _link(entry, model, shared) or program
        except MemoryError:  # not enough for both copies at the same time: use the private one
            return program

    def load_cached(self, model: Model) -> PreparedProgram | None:
        """Link the program from the driver's cache, if there is one."""
        entry = self._entry(model)
        packed = None if entry is None else entry.load()
        return None if entry is None or packed is None else _link(entry, model, packed)

    def _entry(self, model: Model) -> programs.CacheEntry | None:
        """Return the entry of the driver's cache; a deterministic program has another one."""
        identity = self.identity
        if jobs.current_prepare_context().is_deterministic:
            identity = replace(identity, version=f"{identity.version} {DETERMINISTIC}")
        return programs.entry_for(identity, model)

    def compile_baseline(self, model: Model) -> PreparedProgram | None:
        """Prepare the model for the interpreter; None if bits must not change later."""
        return None if jobs.current_prepare_context().is_deterministic else interpreter.prepare(model)

    def restore(self, contents: CacheContents) -> tuple[Model, PreparedProgram]:
        """Link the saved code, without validating, packing or generating anything."""
        from nnfmq.engines.compiled.artifact import prepare_cached

        return files.decode_program(contents, prepare_cached)


def _link(entry: programs.CacheEntry, model: Model, packed: PackedConstants) -> PreparedProgram | None:
    """Return the program whose code and constants are `packed`.

    If it cannot be linked, remove the entry (otherwise the model could never be prepared again) and return None.
    """
    from nnfmq.engines.compiled.artifact import prepare_cached  # not all the lowering rules and kernels

    try:
        return prepare_cached(model, packed)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  the linker's errors too: the model is compiled again
        _log.error("an entry of the cache is removed: it cannot be linked\n%s", traceback.format_exc())
        entry.remove()
        return None
