"""LiteRT's Interpreter over a burst: the same methods, values, errors and points in time.

    constructor: read and import the file ── allocate_tensors: prepare, burst ── set_tensor ── invoke ── get_tensor

The input and output tensors are the memory that the driver reads and writes. If the driver dies during `invoke`, the
interpreter prepares the model in another one, where tensors and states are as before, and repeats the execution once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import numpy as np

from nnfmq.compat.litert.litert_allocation import TensorAllocation
from nnfmq.compat.litert.litert_delegates import OpResolverType, warn_of_delegates
from nnfmq.compat.litert.litert_description import DescribedModel, as_index
from nnfmq.compat.litert.litert_signatures import SignatureRunner
from nnfmq.compat.litert.litert_tensors import (
    Array,
    as_tensor_value,
    constant_value,
    stored_dtype,
)
from nnfmq.compat.shared_client import DriverShare
from nnfmq.hal.errors import DeadObject, NnfmqError, UnsupportedModel

if TYPE_CHECKING:
    from nnfmq.importers.file_format import ModelSource
    from nnfmq.importers.tflite import TracedModel
    from nnfmq.importers.tflite_interface import FileTensor

__all__ = ["InterpreterWithCustomOps", "LiteRtInterpreter"]

_UNALLOCATED = "the tensor has no memory yet: call allocate_tensors() first"
_HELD = (
    "an array of tensor(), or a slice of one, still refers to the interpreter's memory: delete it, and keep only the "
    "function that tensor() returned"
)
_PRESERVING = (
    "experimental_preserve_all_tensors makes every intermediate result an output of the model, which takes time and "
    "memory: use it for debugging only"
)


class _View:
    """What an array of `tensor()` refers to as its base: slices of it keep this alive, and this the interpreter."""

    __slots__ = ("__array_interface__", "__weakref__", "_owners")

    def __init__(self, array: Array, interpreter: LiteRtInterpreter) -> None:
        self.__array_interface__ = array.__array_interface__
        self._owners = (array, interpreter)


class LiteRtInterpreter(DescribedModel):
    """A .tflite model that the driver runs. Use it in one thread at a time.

    Its part of the driver is released when it is collected.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str] | None = None,
        model_content: bytes | None = None,
        experimental_delegates: Sequence[Any] | None = None,
        num_threads: int | None = None,
        experimental_op_resolver_type: OpResolverType = OpResolverType.AUTO,
        experimental_preserve_all_tensors: bool = False,
        experimental_disable_delegate_clustering: bool = False,
        experimental_default_delegate_latest_features: bool = False,
        experimental_compress_quantization_zero_points: bool = False,
        experimental_disable_delegate_node_fusion: bool = False,
        experimental_force_delegate_node_profiling: bool = False,
    ) -> None:
        """Read and import a model, from a file or from the bytes of one.

        `experimental_preserve_all_tensors` keeps the intermediate results for `get_tensor`. All other options are
        checked and have no effect; delegates are ignored with a warning.

        Raises:
            ValueError: If there is no model, the file cannot be read, is corrupt or not supported (`UnsupportedModel`
                has all operators), or an option is invalid.
            TypeError: If `model_content` is not bytes, or `model_path` no path.
        """
        _check_options(experimental_op_resolver_type, num_threads)
        if experimental_preserve_all_tensors and experimental_op_resolver_type in (
            OpResolverType.AUTO,
            OpResolverType.BUILTIN,
        ):
            warnings.warn(_PRESERVING, UserWarning, stacklevel=2)
        self._experimental_compress_quantization_zero_points = experimental_compress_quantization_zero_points
        self._share = DriverShare(self)
        self._share.connect_early(model_path or model_content)
        self._open(_read(model_path, model_content), 0, keep_results=bool(experimental_preserve_all_tensors))
        self._delegates = list(experimental_delegates or ())
        warn_of_delegates(self._delegates)

    def _open(self, source: ModelSource, subgraph: int, *, keep_results: bool) -> None:
        """Read and import a subgraph, which is then the only one. Raises ValueError."""
        self._keeps_results = keep_results
        self._source = source
        self._subgraph_index = subgraph
        self._others: dict[int, LiteRtInterpreter] = {}  # of other subgraphs, which signatures name
        super().__init__(source.data, subgraph)
        self._traced: TracedModel | None = None  # for the shapes in the file, until tensors are allocated
        self._import_in_advance()
        self._resized: dict[int, tuple[int, ...]] = {}  # new shapes of inputs
        self._allocation: TensorAllocation | None = None
        self._is_ready = False
        self._views: WeakSet[_View] = WeakSet()

    def _import_in_advance(self) -> None:
        """Import the model with the file's shapes, to tell what is not supported, unless inputs are to be resized."""
        try:
            self._traced = self._imported({})
        except UnsupportedModel:
            tensors = (self._subgraph.tensors[index] for index in self._subgraph.inputs)
            if not any(-1 in tensor.shape_signature for tensor in tensors):
                raise

    def _imported(self, shapes: Mapping[int, tuple[int, ...]]) -> TracedModel:
        from msgspec.structs import replace

        from nnfmq.importers.tflite import import_traced  # while an embedded driver starts

        places: dict[str | int, Sequence[int]] = {
            self._subgraph.inputs.index(index): shape for index, shape in shapes.items()
        }
        source = replace(self._source, shapes=places)
        return import_traced(source, keep_results=self._keeps_results, subgraph=self._subgraph_index)

    # ------------------------------------------------------------------------------------------------ running

    def allocate_tensors(self) -> None:
        """Prepare the model for the shapes of its inputs; blocks. Does nothing if they have not changed.

        Raises:
            RuntimeError: If the model does not accept the shapes, arrays of `tensor()` are still referenced, or no
                driver can be reached.
        """
        self._ensure_safe()
        if self._is_ready:
            return
        with _runtime_errors():
            old, self._allocation = self._allocation, None
            if old is not None:
                old.close()
            traced = self._imported(self._resized) if self._resized or self._traced is None else self._traced
            self._allocation = TensorAllocation(self._share, self._subgraph, traced)
        self._traced = None if self._resized else traced
        self._is_ready = True

    def invoke(self) -> None:
        """Run the model on its input tensors; blocks, without the GIL.

        Raises:
            RuntimeError: If tensors are not allocated, arrays of `tensor()` are still referenced, or the driver fails.
        """
        self._ensure_safe()
        allocation = self._allocation
        if allocation is None or not self._is_ready:
            raise RuntimeError("the tensors are not allocated for the inputs' shapes: call allocate_tensors() first")
        try:
            allocation.invoke()
        except DeadObject:
            with _runtime_errors():
                self._allocation = allocation.renewed()
                self._allocation.invoke()
        except NnfmqError as error:
            raise RuntimeError(str(error)) from error

    def reset_all_variables(self) -> None:
        """Begin the next execution with the initial states."""
        if self._allocation is not None:
            self._allocation.reset_variables()

    def resize_tensor_input(self, input_index: int, tensor_size: Sequence[int], strict: bool = False) -> None:
        """Give an input another shape; call `allocate_tensors` before the next use.

        With `strict`, only dimensions that are -1 in the input's `shape_signature` may change.

        Raises:
            ValueError: If `tensor_size` is no list of integers, or the tensor is no input of the model.
            RuntimeError: If the index or a dimension is invalid, or arrays of `tensor()` are still referenced.
        """
        self._ensure_safe()
        size = np.array(tensor_size, dtype=np.int32)
        if size.ndim != 1:
            raise ValueError(f"tensor_size has {size.ndim} dimensions: it must be a list of integers")
        shape = tuple(size.tolist())
        if not 0 <= as_index(input_index) < len(self._subgraph.tensors):
            raise RuntimeError(f"there is no tensor {input_index}")
        if input_index not in self._subgraph.inputs:
            raise ValueError(f"tensor {input_index} is no input of the model: only inputs can be resized")
        if any(extent < 0 for extent in shape):
            raise RuntimeError(f"shape {list(shape)} has a negative dimension")
        if strict:
            self._check_strictly(input_index, shape)
        if shape != self._shape(input_index):
            self._resized[input_index] = shape
            self._is_ready = False

    def _check_strictly(self, index: int, shape: tuple[int, ...]) -> None:
        now = self._shape(index)
        signature = self._subgraph.tensors[index].shape_signature or now
        if len(shape) != len(now):
            raise RuntimeError(f"tensor {index} has {len(now)} dimensions, the new shape {len(shape)}")
        for axis, (old, new) in enumerate(zip(now, shape, strict=True)):
            if old != new and signature[axis] != -1:
                raise RuntimeError(
                    f"dimension {axis} of tensor {index} is {old} and cannot become {new}: with strict=True only those "
                    "may change that are -1 in shape_signature"
                )

    # ------------------------------------------------------------------------------------------------ tensors

    def set_tensor(self, tensor_index: int, value: Any) -> None:
        """Copy a value into an input tensor.

        Raises:
            ValueError: If the tensor is none that can be set, is not allocated, or has another type or shape.
        """
        if type(tensor_index) is not int:
            tensor_index = as_index(tensor_index)
        allocation = self._allocation
        target = allocation.arrays.get(tensor_index) if allocation is not None and self._is_ready else None
        if target is None:
            self._set_other(tensor_index, value)
        elif type(value) is np.ndarray and value.dtype == target.dtype and value.shape == target.shape:
            target[...] = value
        else:
            name = self._subgraph.tensors[tensor_index].name
            target[...] = as_tensor_value(value, tensor_index, name, target.dtype, target.shape)

    def _set_other(self, index: int, value: Any) -> None:
        tensor = self._tensor(index, 0)
        if self._allocation is None or not self._is_ready:
            raise ValueError("the tensor cannot be set before allocate_tensors() has been called")
        if index not in self._allocation.variables:
            raise ValueError(f"Cannot set tensor: {self._reason(index, tensor)}")
        array = as_tensor_value(value, index, tensor.name, stored_dtype(tensor), self._shape(index))
        self._allocation.set_variable(index, array)

    def get_tensor(self, tensor_index: int, subgraph_index: int = 0) -> Array:
        """Return a copy of a tensor's value: an input, an output, a constant or a variable.

        Raises:
            ValueError: If there is no such tensor, it is not allocated, or it is an intermediate result that is not
                kept (see `experimental_preserve_all_tensors`).
        """
        if type(tensor_index) is not int:
            tensor_index = as_index(tensor_index)
        if self._is_ready and subgraph_index == 0:
            array = self._allocation.arrays.get(tensor_index) if self._allocation is not None else None
            if array is not None:
                return array.copy()
        if subgraph_index in self._others:
            return self._others[subgraph_index].get_tensor(tensor_index)
        return np.array(self._value(tensor_index, subgraph_index))

    def tensor(self, tensor_index: int) -> Callable[[], Array]:
        """Return a function that returns an array over the tensor's memory itself.

        Do not keep that array: as long as it, or a slice of it, exists, `invoke`, `allocate_tensors` and
        `resize_tensor_input` raise RuntimeError. The function raises as `get_tensor`. The array of a constant cannot be
        written.
        """
        return lambda: self._view(tensor_index)

    def _view(self, index: int) -> Array:
        array = self._value(index, 0)
        view = _View(array, self)
        self._views.add(view)
        return np.asarray(view)

    def _value(self, index: int, subgraph_index: int) -> Array:
        """Return the memory of a tensor; of a variable, a copy."""
        tensor = self._tensor(index, subgraph_index)
        allocation = self._allocation if subgraph_index == 0 else None
        if allocation is not None and (self._is_ready or index not in self._resized):
            if index in allocation.arrays:
                return allocation.arrays[index]
            if index in allocation.variables:
                return allocation.variable(index)
        constant = constant_value(tensor)
        if constant is not None:
            return constant
        if not self._is_ready:
            raise ValueError(_UNALLOCATED)
        raise ValueError(self._reason(index, tensor))

    def _reason(self, index: int, tensor: FileTensor) -> str:
        """Say why a tensor cannot be used."""
        what = f"tensor {index} ({tensor.name[:80]!r})"
        if tensor.data is not None:
            return f"{what} is a constant"
        if self._keeps_results:
            return f"{what} has no value: the operators that compute the outputs do not write it"
        return f"{what} is an intermediate result: it is kept only with experimental_preserve_all_tensors=True"

    def _safe_to_run(self) -> bool:
        """Return True if no array of `tensor()` exists."""
        return not self._views

    def _ensure_safe(self) -> None:
        if self._views:
            raise RuntimeError(_HELD)

    # ------------------------------------------------------------------------------------------------ the rest

    @property
    def experimental_compress_quantization_zero_points(self) -> bool:
        """The option of the constructor, which has no effect."""
        return self._experimental_compress_quantization_zero_points

    def _shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a tensor of the first subgraph: that of the last allocation, or an input's new one."""
        allocated = self._allocation.shape(index) if self._allocation is not None else None
        shape = allocated if allocated is not None else self._subgraph.tensors[index].shape
        return self._resized.get(index, shape)

    def _native_handle(self) -> NoReturn:
        raise NotImplementedError("nnfmq has no native interpreter: the model runs in the driver")

    def get_signature_runner(self, signature_key: str | None = None) -> SignatureRunner:
        """Return a callable that runs a signature; without a key, the only one.

        Raises:
            ValueError: If there is no such signature, or there are several and no key is given.
        """
        if signature_key is None:
            if len(self._signature_defs) != 1:
                raise ValueError(
                    f"the model has {len(self._signature_defs)} signatures, {list(self._signature_defs)[:16]}: "
                    "signature_key must name one"
                )
            signature_key = next(iter(self._signature_defs))
        return SignatureRunner(self, signature_key)

    def _run_subgraph(
        self,
        subgraph_index: int,
        shapes: Mapping[int, tuple[int, ...]],
        values: Mapping[int, Any],
        outputs: Sequence[int],
    ) -> list[Array]:
        """Resize the inputs, allocate, set them, invoke, and return copies of the outputs."""
        if subgraph_index:
            return self._other(subgraph_index)._run_subgraph(0, shapes, values, outputs)
        for index, shape in shapes.items():
            self.resize_tensor_input(index, shape)
        self.allocate_tensors()
        for index, value in values.items():
            self.set_tensor(index, value)
        self.invoke()
        return [self.get_tensor(index) for index in outputs]

    def _other(self, subgraph_index: int) -> LiteRtInterpreter:
        """Return the interpreter of another subgraph, imported by the first call. Raises RuntimeError."""
        if subgraph_index not in self._others:
            found = object.__new__(LiteRtInterpreter)
            found._share = DriverShare(found)
            with _runtime_errors():
                found._open(self._source, subgraph_index, keep_results=self._keeps_results)
            if found._traced is None or found._traced.states:
                raise RuntimeError(f"subgraph {subgraph_index} has variables: only those of the first one are kept")
            self._others[subgraph_index] = found
        return self._others[subgraph_index]


class InterpreterWithCustomOps(LiteRtInterpreter):
    """The interpreter of a model without custom operators of the caller, which cannot be registered."""

    def __init__(self, custom_op_registerers: Sequence[Any] | None = None, **kwargs: Any) -> None:
        """Make an interpreter.

        Raises:
            ValueError: If there are registerers: they run in LiteRT's own interpreter only. Otherwise as Interpreter.
        """
        if custom_op_registerers:
            raise ValueError(
                f"custom_op_registerers {list(custom_op_registerers)!r} cannot be called: operators of your own are "
                "extensions of the driver, see nnfmq's documentation, 'Write an operation'"
            )
        super().__init__(**kwargs)


def _check_options(resolver: Any, num_threads: Any) -> None:
    if not isinstance(resolver, OpResolverType):
        raise ValueError(f"{resolver!r} is no OpResolverType")
    if num_threads is not None:
        if not isinstance(num_threads, int):
            raise ValueError(f"num_threads is {num_threads!r}: it must be an int")
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}: it must be at least 1")


def _read(model_path: Any, model_content: Any) -> ModelSource:
    from msgspec.structs import replace

    from nnfmq.importers.file_format import read_source  # while an embedded driver starts

    if not model_content and not model_path:
        raise ValueError("neither model_path nor model_content is given")
    if model_content and model_path:
        raise ValueError("model_path and model_content are both given: only one is allowed")
    if model_content:
        if not isinstance(model_content, bytes):
            raise TypeError(f"model_content is the bytes of a model, not {type(model_content).__name__}")
        return replace(read_source(model_content), follows_tflite=True)
    path = os.fsdecode(os.fspath(model_path))
    try:
        return replace(read_source(path), follows_tflite=True)
    except OSError as error:
        raise ValueError(f"{path!r} cannot be opened: {error.strerror}") from error


@contextmanager
def _runtime_errors() -> Iterator[None]:
    """Raise nnfmq's errors as RuntimeError."""
    try:
        yield
    except NnfmqError as error:
        raise RuntimeError(str(error)) from error
