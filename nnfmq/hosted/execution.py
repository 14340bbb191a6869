"""HostedProgram: an opened file as the program of a prepared model, and its executions over the client's memory.

An execution views the client's memory as the tensors that the file declares, copies integers, which must not change
while a runtime uses them as indices or sizes, and ends at its deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from nnfmq.base.deadlines import acquire
from nnfmq.driver.execution.watchdog import WATCHDOG
from nnfmq.engines.execution import DEFAULT_RUN_OPTIONS, InputSpec, RunOptions, check_inputs, copy_outputs
from nnfmq.hal.errors import GeneralFailure, NnfmqError
from nnfmq.hal.hosted import HostedCall, HostedTensor, fits_declaration, is_known
from nnfmq.hal.types import Model, OutputShape
from nnfmq.hosted.adapter import HostedModel
from nnfmq.hosted.open_files import OpenFile, runtime_error
from nnfmq.operations.declaration import Array

__all__ = ["HostedExecution", "HostedProgram"]

_COPIED_KINDS = "iub"  # dtype.kind of what may be an index or a size


class HostedProgram:
    """A prepared hosted model. Thread-safe."""

    def __init__(self, device: str, model: Model, file: OpenFile[HostedModel], call: HostedCall) -> None:
        main = model.main
        self.device, self.file, self.opened, self.call = device, file, file.model, call
        self.threads = file.threads
        self.inputs = [InputSpec.of(main, index, is_optional=False) for index in main.input_indexes]
        self.output_dtypes = [InputSpec.of(main, index, is_optional=True).dtype for index in main.output_indexes]
        self.lock = None if self.opened.is_thread_safe else threading.Lock()

    def bind(self, inputs: Sequence[Array | None], outputs: Sequence[Any]) -> HostedExecution:
        """See `PreparedProgram.bind`."""
        check_inputs(self.inputs, inputs)
        return HostedExecution(self, [array for array in inputs if array is not None], outputs)  # none is optional


class HostedExecution:
    """A program that is bound to the buffers of one request. One thread runs it at a time."""

    __slots__ = ("_copies", "_outputs", "_program", "_run", "_shapes", "_targets", "_views")

    def __init__(self, program: HostedProgram, inputs: Sequence[Array], outputs: Sequence[Any]) -> None:
        self._program, self._outputs = program, outputs
        call = program.call
        self._copies: list[tuple[Array, Array]] = []
        self._views = [
            self._private(_declared(array, tensor)) for array, tensor in zip(inputs, call.inputs, strict=True)
        ]
        self._targets = [_target(out, tensor) for out, tensor in zip(outputs, call.outputs, strict=True)]
        is_direct = all(target is not None for target in self._targets)
        self._shapes = tuple(OutputShape(tensor.dimensions) for tensor in call.outputs) if is_direct else None
        # None until the first run: if the runtime takes one thread at a time, another one may have it now.
        self._run = program.opened.bind(self._views, self._targets) if program.lock is None else None

    def _private(self, array: Array) -> Array:
        """Return the array that the runtime reads; of integers, which may be indices or sizes, a copy."""
        is_copied = array.dtype.kind in _COPIED_KINDS or self._program.opened.copies_floats
        if not is_copied or not array.size:
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
        return self._shapes if self._shapes is not None and not results else self._copied(results or ())

    def _results(self, options: RunOptions) -> Sequence[Array | None] | None:
        program, deadline_ns, token = self._program, options.deadline_ns, None
        lock, file = program.lock, program.file
        if lock is not None:
            acquire(lock, deadline_ns, "the deadline passed while another execution of the model ran")
        try:
            if self._run is None:
                self._run = program.opened.bind(self._views, self._targets)
            if deadline_ns is not None:
                token = WATCHDOG.begin(deadline_ns, self._run.abort)
            return self._run() if file.is_charged else file.run_first(self._run)
        except NnfmqError:
            raise
        except Exception as error:
            options.check()  # the runtime was told to stop at the deadline
            raise runtime_error(program.device, error, GeneralFailure) from error
        finally:
            if token is not None and WATCHDOG.end(token) and self._run is not None:
                self._run.resume()
            if lock is not None:
                lock.release()

    def _copied(self, results: Sequence[Array | None]) -> tuple[OutputShape, ...]:
        """Copy what the runtime returned to the buffers. Raises OutputInsufficientSize."""
        program = self._program
        declared = program.call.outputs
        if len(results) != len(declared):
            raise GeneralFailure(f"{program.device} returned {len(results)} results for {len(declared)} outputs")
        arrays = [
            out if result is None else _crossing(program.device, result, tensor, dtype)  # None: filled in place
            for result, out, tensor, dtype in zip(results, self._outputs, declared, program.output_dtypes, strict=True)
        ]
        return copy_outputs(arrays, self._outputs)


def _declared(array: Array, tensor: HostedTensor) -> Array:
    """Return an input as the file declares it: of rank 0, without elements, of bools."""
    if tensor.dtype == "bool":
        array = array.view(np.bool_)
    if tensor.is_empty:
        array = array[:0]
    return array.reshape(tensor.shape) if is_known(tensor.shape) else array


def _target(out: Any, tensor: HostedTensor) -> Array | None:
    """Return the client's memory as the output that the file declares; None if the runtime returns an array."""
    if not isinstance(out, np.ndarray) or not is_known(tensor.shape) or not out.flags.c_contiguous:
        return None
    return None if tensor.is_empty else _declared(out, tensor)


def _crossing(device: str, result: Array, tensor: HostedTensor, dtype: np.dtype[Any]) -> Array:
    """Return a result in the form of its operand: one element for rank 0, and for no elements if that is declared.

    Raises:
        GeneralFailure: If it is not what the file declares.
    """
    expected = "uint16" if tensor.dtype == "bfloat16" else tensor.dtype
    has_type = isinstance(result, np.ndarray) and (result.dtype == expected or result.dtype.name == tensor.dtype)
    if not has_type or not fits_declaration(result.shape, tensor.shape):
        found = f"{result.dtype} {result.shape}" if isinstance(result, np.ndarray) else type(result).__name__
        text = f"{device} returned {found} for output {tensor.name!r}, which is {expected} {tensor.shape} in its file"
        raise GeneralFailure(text)
    if tensor.is_empty:
        return np.zeros(1, dtype)
    return (result.reshape(1) if tensor.shape == () else result).view(dtype)
