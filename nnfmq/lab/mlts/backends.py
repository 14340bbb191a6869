"""Runtimes that the benchmark compares: the interface, and a device of the driver over a burst.

Copying inputs is not measured, as in MLTS. Compilation without and with cache files is measured with the preference
SUSTAINED_SPEED, so that machine code is complete when a preparation returns; the start of a model uses the default, as
an application does.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connect import connect
from nnfmq.client.connection.device import Device
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.preparation import require_machine_code
from nnfmq.hal.types import DeviceStatus, ExecutionPreference
from nnfmq.importers import load
from nnfmq.lab.mlts.models import Array

__all__ = [
    "Backend",
    "CompilationSteps",
    "DriverBackend",
    "LiteRtBackend",
    "ModelRunner",
    "available_devices",
    "chosen_devices",
    "missing_reason",
]

TIMEOUT_S = 300.0
WITHOUT_CACHE, SAVING, FROM_CACHE = "without cache", "saving to cache", "from cache"
_SUSTAINED = ExecutionPreference.SUSTAINED_SPEED


class ModelRunner(Protocol):
    """A model that is ready to be executed."""

    def reset(self) -> None:
        """Set all states to their initial values."""
        ...

    def set_input(self, array: Array) -> None:
        """Copy the only input."""
        ...

    def run(self) -> None:
        """Execute once; this is what is measured."""
        ...

    def output(self) -> Array:
        """Return a copy of the first output."""
        ...


@dataclass(frozen=True, slots=True)
class CompilationSteps:
    """Functions to measure: a compilation of each kind. The first element of a pair prepares it and is not measured."""

    kinds: Mapping[str, tuple[Callable[[], None], Callable[[], None]]]
    cache_bytes: Callable[[], int] = field(default=lambda: 0)


class Backend(Protocol):
    """A runtime."""

    @property
    def name(self) -> str:
        """The name in reports."""
        ...

    def runner(self, path: Path) -> AbstractContextManager[ModelRunner]:
        """Load and compile a model until the block ends. Raises the errors of the runtime."""
        ...

    def compilations(self, path: Path) -> AbstractContextManager[CompilationSteps]:
        """Return the compilation steps of a model, until the block ends."""
        ...

    def start(self, path: Path, array: Array) -> None:
        """Load a model and execute it once, from nothing."""
        ...


@dataclass(slots=True)
class _BurstRunner:
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    execute: Callable[[], object]
    reset_state: Callable[[], object]

    def reset(self) -> None:
        self.reset_state()

    def set_input(self, array: Array) -> None:
        self.inputs[0][...] = array

    def run(self) -> None:
        self.execute()

    def output(self) -> Array:
        return self.outputs[0].copy()


class DriverBackend:
    """A device of a driver. `connect_to` is as in --connect: a socket, "embedded", or None for any driver."""

    def __init__(self, device: str, connect_to: str | None) -> None:
        self._device_name = device
        self._connect_to = connect_to

    @property
    def name(self) -> str:
        """The device's name."""
        return self._device_name

    def _connect(self) -> Client:
        return _connect(self._connect_to)

    @contextmanager
    def _device(self) -> Iterator[Device]:
        with self._connect() as client:
            yield client.device(self._device_name)

    @contextmanager
    def runner(self, path: Path) -> Iterator[ModelRunner]:
        """Prepare a model and configure a burst. Raises NnfmqError."""
        loaded = load(path)
        with (
            self._device() as device,
            device.prepare(loaded, preference=_SUSTAINED, timeout=TIMEOUT_S) as prepared,
            prepared.burst() as burst,
        ):
            require_machine_code(prepared.device, prepared.program, prepared.compiled_operations)
            outputs = burst.outputs
            execute = partial(burst.execute, out=outputs, timeout=TIMEOUT_S)
            yield _BurstRunner(burst.inputs, outputs, execute, burst.reset_state)

    @contextmanager
    def compilations(self, path: Path) -> Iterator[CompilationSteps]:
        """Return the three kinds of a compilation, or the first only if the device has no cache files."""
        loaded = load(path)
        with self._device() as device, ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nnfmq-mlts-")))

            def compile_model(cache_dir: Path | None = None) -> None:
                device.prepare(loaded, preference=_SUSTAINED, cache_dir=cache_dir, timeout=TIMEOUT_S).close()

            def empty() -> None:
                shutil.rmtree(folder)
                folder.mkdir()

            def fill() -> None:
                if not any(folder.iterdir()):
                    compile_model(folder)

            kinds: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {WITHOUT_CACHE: (_nothing, compile_model)}
            if device.info.model_cache_files or device.info.data_cache_files:
                kinds[SAVING] = (empty, lambda: compile_model(folder))
                kinds[FROM_CACHE] = (fill, lambda: compile_model(folder))
            yield CompilationSteps(kinds, lambda: sum(file.stat().st_size for file in folder.iterdir()))

    def start(self, path: Path, array: Array) -> None:
        """Connect, load, prepare, configure a burst and execute once; an embedded driver is started, too."""
        with (
            self._device() as device,
            device.prepare(path, timeout=TIMEOUT_S) as prepared,
            prepared.burst() as burst,
        ):
            burst.execute(np.ascontiguousarray(array), timeout=TIMEOUT_S)


def _nothing() -> None:
    """Prepare nothing."""


def _connect(connect_to: str | None) -> Client:
    """Return a client whose calls fail if the driver dies: a measurement is of one driver."""
    is_embedded = connect_to == "embedded"
    return connect(None if is_embedded else connect_to, embedded=is_embedded or None, recover=False)


def available_devices(connect_to: str | None) -> list[str]:
    """Return the names of the devices that are AVAILABLE. Blocks. Raises the errors of `connect`."""
    with _connect(connect_to) as client:
        return [info.name for info in client.devices() if info.status is DeviceStatus.AVAILABLE]


def chosen_devices(wanted: Sequence[str], connect_to: str | None) -> list[str]:
    """Return the devices to measure: the wanted ones, or `compiled`, or else `reference`.

    Raises:
        InvalidArgument: If a wanted device is missing or not available; the message lists those that are.
    """
    there = available_devices(connect_to)
    if unknown := [name for name in wanted if name not in there]:
        raise InvalidArgument(f"device {unknown[0]!r} is not available; available are: {', '.join(there)}")
    return list(wanted) or ["compiled" if "compiled" in there else "reference"]


# ----------------------------------------------------------------------------------------------------------------------
# LiteRT as the benchmark's baseline, in this process. It needs `ai-edge-litert`, of the extra `bench`.
#
# LiteRT prints its own messages to stderr; nothing else of it is used than the interpreter.


NAME = "LiteRT"


def missing_reason() -> str:
    """Return why LiteRT cannot be measured; "" if it can."""
    try:
        _module()
    except ImportError as error:
        return f"LiteRT is not installed ({error}): pip install 'nnfmq[bench]'"
    return ""


def _module() -> Any:
    return importlib.import_module("ai_edge_litert.interpreter")


class _LiteRtRunner:
    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self._input = interpreter.get_input_details()[0]["index"]
        self._output = interpreter.get_output_details()[0]["index"]

    def reset(self) -> None:
        self._interpreter.reset_all_variables()

    def set_input(self, array: Array) -> None:
        self._interpreter.set_tensor(self._input, array)

    def run(self) -> None:
        self._interpreter.invoke()

    def output(self) -> Array:
        found: Array = self._interpreter.get_tensor(self._output)  # a copy
        return found


class LiteRtBackend:
    """LiteRT on the CPU with its default kernels, or with its reference kernels, and a number of threads."""

    def __init__(self, threads: int, *, reference_kernels: bool = False) -> None:
        self._threads = threads
        self._reference_kernels = reference_kernels

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{NAME}, reference kernels" if self._reference_kernels else NAME

    def _interpreter(self, content: bytes) -> Any:
        litert = _module()
        resolvers = litert.OpResolverType
        resolver = resolvers.BUILTIN_REF if self._reference_kernels else resolvers.AUTO
        made = litert.Interpreter(
            model_content=content, num_threads=self._threads, experimental_op_resolver_type=resolver
        )
        made.allocate_tensors()
        return made

    @contextmanager
    def runner(self, path: Path) -> Iterator[ModelRunner]:
        """Load a model. Raises ValueError or RuntimeError, as LiteRT does."""
        yield _LiteRtRunner(self._interpreter(path.read_bytes()))

    @contextmanager
    def compilations(self, path: Path) -> Iterator[CompilationSteps]:
        """Return the only kind: creating an interpreter and allocating its tensors."""
        content = path.read_bytes()
        yield CompilationSteps({WITHOUT_CACHE: (lambda: None, lambda: self._discard(content))})

    def _discard(self, content: bytes) -> None:
        self._interpreter(content)

    def start(self, path: Path, array: Array) -> None:
        """Read a file, create an interpreter and execute it once."""
        runner = _LiteRtRunner(self._interpreter(path.read_bytes()))
        runner.set_input(array)
        runner.run()
        runner.output()
