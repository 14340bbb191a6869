"""LiteRT's Interpreter over a burst: the same methods, values, errors and points in time.

    constructor: read and import the file ── allocate_tensors: prepare, burst ── set_tensor ── invoke ── get_tensor

The input and output tensors are the memory that the driver reads and writes. If the driver dies during `invoke`, the
interpreter prepares the model in another one, where tensors and states are as before, and repeats the execution once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, unique
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import numpy as np

from nnfmq.compat.litert.allocations import AllocatedModel, TensorAllocation
from nnfmq.compat.litert.tensors import Array, DescribedModel, as_index, as_tensor_value, constant_value, stored_dtype
from nnfmq.compat.shared_client import DriverShare
from nnfmq.hal.errors import DeadObject, GeneralFailure, InvalidArgument, NnfmqError, UnsupportedModel

if TYPE_CHECKING:
    from nnfmq.compat.litert.hosting import HostedAllocation, HostedSubgraph
    from nnfmq.importers.file_format import ModelSource
    from nnfmq.importers.tflite.interface import FileTensor
    from nnfmq.importers.tflite.model import TracedModel

__all__ = [
    "Delegate",
    "InterpreterWithCustomOps",
    "LiteRtInterpreter",
    "OpResolverType",
    "SignatureRunner",
    "load_delegate",
    "warn_of_delegates",
]


# ----------------------------------------------------------------------------------------------------------------------
# SignatureRunner: a model's signature as a function from named arrays to named arrays.


class SignatureRunner:
    """Runs one signature; made by `Interpreter.get_signature_runner`. It shares tensors and states with that."""

    def __init__(self, interpreter: LiteRtInterpreter | None = None, signature_key: str | None = None) -> None:
        """Find the signature.

        Raises:
            ValueError: If an argument is missing, or the model has no such signature.
        """
        if not interpreter:
            raise ValueError("None interpreter provided.")
        if not signature_key:
            raise ValueError("None signature_key provided.")
        signatures = interpreter._get_full_signature_list()
        if signature_key not in signatures:
            raise ValueError(f'Invalid signature_key provided: "{signature_key}"; the model has {list(signatures)}.')
        self._interpreter = interpreter
        self._signature_key = signature_key
        self._signature_def = signatures[signature_key]
        self._inputs: dict[str, int] = self._signature_def["inputs"]
        self._outputs = self._signature_def["outputs"].items()
        self._subgraph_index = interpreter._subgraph_of(signature_key)

    def __call__(self, **kwargs: Any) -> dict[str, Any]:
        """Return the outputs by name, as new arrays; blocks. Inputs are resized to the shapes of the arguments.

        Raises:
            ValueError: If an argument is missing, has an unknown name or the wrong type.
            RuntimeError: If the model does not accept the shapes, or as `Interpreter.invoke`.
        """
        if len(kwargs) != len(self._inputs):
            raise ValueError(
                f"the signature has the inputs {list(self._inputs)}, {len(kwargs)} are given: {list(kwargs)}"
            )
        for name in kwargs:
            if name not in self._inputs:
                raise ValueError(f"the signature has no input {name!r}")
        shapes = {self._inputs[name]: value.shape for name, value in kwargs.items()}
        values = {self._inputs[name]: value for name, value in kwargs.items()}
        run = self._interpreter._run_subgraph
        outputs = run(self._subgraph_index, shapes, values, [index for _, index in self._outputs])
        return {name: output for (name, _), output in zip(self._outputs, outputs, strict=True)}

    def get_input_details(self) -> dict[str, dict[str, Any]]:
        """Return the details of each input by its name in the signature."""
        return {name: self._details(index) for name, index in self._inputs.items()}

    def get_output_details(self) -> dict[str, dict[str, Any]]:
        """Return the details of each output by its name in the signature."""
        return {name: self._details(index) for name, index in self._outputs}

    def _details(self, tensor_index: int) -> dict[str, Any]:
        return self._interpreter._get_tensor_details(tensor_index, self._subgraph_index)


# ----------------------------------------------------------------------------------------------------------------------
# LiteRT's delegates and operator resolvers: scripts name them, the driver does not use them.


@unique
class OpResolverType(Enum):
    """The kernels of LiteRT. Without effect: the driver's device decides."""

    AUTO = 0
    BUILTIN = 1
    BUILTIN_REF = 2
    BUILTIN_WITHOUT_DEFAULT_DELEGATES = 3


class Delegate:
    """A delegate by the name of its library, which is not loaded."""

    def __init__(self, library: str, options: Mapping[Any, Any] | None = None) -> None:
        """Keep the name and the options; warns that the delegate is ignored."""
        self._library = library
        self._options = dict(options or {})
        _warn(f"delegate {library} is ignored: the driver of nnfmq runs the model")

    def _get_native_delegate_pointer(self) -> NoReturn:
        raise NotImplementedError(f"delegate {self._library} is not loaded: nnfmq has no delegates")


def load_delegate(library: str, options: Mapping[Any, Any] | None = None) -> Delegate:
    """Return a delegate that is ignored, with a warning; the library is not loaded and need not exist."""
    return Delegate(library, options)


def warn_of_delegates(delegates: Iterable[Any]) -> None:
    """Warn once for each delegate that was not made here.

    Raises:
        AttributeError: If one of them is no delegate.
    """
    for delegate in delegates:
        delegate._get_native_delegate_pointer  # noqa: B018  LiteRT reads it, and so tells a delegate
        if not isinstance(delegate, Delegate):
            _warn(f"{delegate!r} is ignored: the driver of nnfmq runs the model")


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=4)


# ----------------------------------------------------------------------------------------------------------------------
# LiteRT's Interpreter over a burst: the same methods, values, errors and points in time.


_UNALLOCATED = "the tensor has no memory yet: call allocate_tensors() first"
_HELD = (
    "an array of tensor(), or a slice of one, still refers to the interpreter's memory: delete it, and keep only the "
    "function that tensor() returned"
)
_NOT_COMPUTED = "has no value before invoke(), because its shape follows from the data"
_PRESERVING = (
    "experimental_preserve_all_tensors makes every intermediate result an output of the model, which takes time and "
    "memory: use it for debugging only"
)


class _View:
    """The base of an array of `tensor()`: slices of the array keep this alive, and this the interpreter."""

    __slots__ = ("__array_interface__", "__weakref__", "_owners")

    def __init__(self, array: Array, interpreter: LiteRtInterpreter) -> None:
        self.__array_interface__ = array.__array_interface__
        self._owners = (array, interpreter)


class _ResourceVariables:
    """The resource variables of a file, which all its subgraphs share: the model that was executed last has them."""

    def __init__(self) -> None:
        self.owner: AllocatedModel | None = None

    def move_to(self, model: AllocatedModel) -> None:
        """Give the values to the model that is to be executed."""
        if self.owner is not None:
            model.resources = self.owner.resources
        self.owner = model


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

        `experimental_preserve_all_tensors` keeps the intermediate results for `get_tensor`. The other options are
        checked, and are for models that LiteRT runs in the driver; delegates are ignored with a warning.

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
        options = _hosted_options(
            num_threads,
            experimental_op_resolver_type,
            experimental_preserve_all_tensors=experimental_preserve_all_tensors,
            experimental_disable_delegate_clustering=experimental_disable_delegate_clustering,
            experimental_default_delegate_latest_features=experimental_default_delegate_latest_features,
            experimental_compress_quantization_zero_points=experimental_compress_quantization_zero_points,
            experimental_disable_delegate_node_fusion=experimental_disable_delegate_node_fusion,
        )
        self._open(_read(model_path, model_content), 0, options, _ResourceVariables())
        self._delegates = list(experimental_delegates or ())
        warn_of_delegates(self._delegates)

    def _open(
        self, source: ModelSource, subgraph: int, options: Mapping[str, Any], resources: _ResourceVariables
    ) -> None:
        """Read and import a subgraph, which is then the only one. Raises ValueError."""
        self._options, self._resources = options, resources
        self._keeps_results = "experimental_preserve_all_tensors" in options
        self._source = source
        self._subgraph_index = subgraph
        self._others: dict[int, LiteRtInterpreter] = {}  # of other subgraphs, which signatures name
        super().__init__(source.data, subgraph)
        self._traced: TracedModel | None = None  # for the shapes in the file, until tensors are allocated
        self._refusal: InvalidArgument | GeneralFailure | None = None  # why LiteRT runs the model in the driver
        self._resized: dict[int, tuple[int, ...]] = {}  # new shapes of inputs
        self._allocation: AllocatedModel | None = None
        self._early: HostedAllocation | None = None  # what the constructor has prepared
        self._is_ready = False
        self._views: WeakSet[_View] = WeakSet()
        self._import_in_advance()

    def _import_in_advance(self) -> None:
        """Import the model with the file's shapes, to tell what is not supported, unless inputs are to be resized."""
        try:
            self._traced = self._imported({})
        except UnsupportedModel as error:
            tensors = (self._subgraph.tensors[index] for index in self._subgraph.inputs)
            if not any(-1 in tensor.shape_signature for tensor in tensors):
                self._early = self._hosted(error)

    def _hosted(self, refusal: InvalidArgument | GeneralFailure) -> HostedAllocation:
        """Prepare the model on LiteRT in the driver; blocks. Raises NnfmqError with the text of `refusal`."""
        from nnfmq.compat.litert.hosting import HostedAllocation  # most models need no hosted runtime

        refusal.__context__, self._refusal = None, refusal.with_traceback(None)  # they refer to the importer's frames
        shapes = {index: self._shape(index) for index in self._subgraph.inputs}
        return HostedAllocation(self._share, self._hosted_subgraph(), refusal, shapes)

    def _hosted_subgraph(self) -> HostedSubgraph:
        from nnfmq.compat.litert.hosting import HostedSubgraph

        graph = self._subgraph_index
        keys = (item for item in self._file.signatures.items() if graph and item[1].subgraph == graph)
        return HostedSubgraph(self._source, self._subgraph, next(keys, None), self._options)

    def _imported(self, shapes: Mapping[int, tuple[int, ...]]) -> TracedModel:
        from msgspec.structs import replace

        from nnfmq.importers.tflite.model import import_traced  # while an embedded driver starts

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
            old, early, self._allocation, self._early = self._allocation, self._early, None, None
            if early is not None and not self._resized:
                self._allocation = early
            else:
                for replaced in (old, early):
                    if replaced is not None:
                        replaced.close()
                self._allocation = self._allocated()
        self._is_ready = True

    def _allocated(self) -> AllocatedModel:
        if self._refusal is not None:
            return self._hosted(self._refusal)
        try:
            traced = self._imported(self._resized) if self._resized or self._traced is None else self._traced
            _require_known_shapes(traced)
            found = TensorAllocation(self._share, self._subgraph, traced)
        except (UnsupportedModel, GeneralFailure) as error:
            return self._hosted(error)
        self._traced = None if self._resized else traced
        return found

    def invoke(self) -> None:
        """Run the model on its input tensors; blocks, without the GIL.

        Raises:
            RuntimeError: If tensors are not allocated, arrays of `tensor()` are still referenced, or the driver fails.
        """
        self._ensure_safe()
        allocation = self._allocation
        if allocation is None or not self._is_ready:
            raise RuntimeError("the tensors are not allocated for the inputs' shapes: call allocate_tensors() first")
        if allocation is not self._resources.owner:
            self._resources.move_to(allocation)
        try:
            allocation.invoke()
        except DeadObject:
            with _runtime_errors():
                self._allocation = self._resources.owner = allocation.renewed()
                self._allocation.invoke()
        except NnfmqError as error:
            raise RuntimeError(str(error)) from error

    def reset_all_variables(self) -> None:
        """Give the variable tensors of all subgraphs their first values. Resource variables keep their values."""
        for interpreter in (self, *self._others.values()):
            if interpreter._allocation is not None:
                interpreter._allocation.reset_variables()

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
        """Return a copy of a tensor's value: an input, an output, a constant or a variable; of rank 0 NumPy's scalar.

        Raises:
            ValueError: If there is no such tensor, it is not allocated, or it is an intermediate result that is not
                kept (see `experimental_preserve_all_tensors`).
        """
        if type(tensor_index) is not int:
            tensor_index = as_index(tensor_index)
        if self._is_ready and subgraph_index == 0:
            array = self._allocation.arrays.get(tensor_index) if self._allocation is not None else None
            if array is not None:
                return array.copy() if array.ndim else array[()]
        if subgraph_index in self._others:
            return self._others[subgraph_index].get_tensor(tensor_index)
        return np.array(self._value(tensor_index, subgraph_index))[()]

    def tensor(self, tensor_index: int) -> Callable[[], Array]:
        """Return a function that returns an array over the tensor's memory itself.

        Do not keep that array: as long as it, or a slice of it, exists, `invoke`, `allocate_tensors` and
        `resize_tensor_input` raise RuntimeError. The function raises as `get_tensor`. The array of a constant cannot be
        written; that of a tensor of rank 0 is a copy, NumPy's scalar.
        """
        return lambda: self._view(tensor_index)

    def _view(self, index: int) -> Array:
        array = self._value(index, 0)
        if not array.ndim:
            return array[()]
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
        if index in self._subgraph.outputs:
            return f"{what} {_NOT_COMPUTED}"
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

    def _get_tensor_details(self, tensor_index: int, subgraph_index: int) -> dict[str, Any]:
        other = self._others.get(int(subgraph_index))
        if other is None:
            return super()._get_tensor_details(tensor_index, subgraph_index)
        return other._get_tensor_details(tensor_index, 0)

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
                found._open(self._source, subgraph_index, self._options, self._resources)
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


def _require_known_shapes(traced: TracedModel) -> None:
    """Check that memory can be allocated for all outputs. Raises GeneralFailure."""
    for info in traced.loaded.outputs:
        if info.has_unknown_shape:
            raise GeneralFailure(f"output {info.name!r} has a shape that follows from the data")


def _hosted_options(threads: int | None, resolver: OpResolverType, **flags: bool) -> dict[str, Any]:
    """Return the options of the device `litert` that stand for arguments: those that are not the defaults."""
    found: dict[str, Any] = {name: True for name, value in flags.items() if value}
    if threads is not None:
        found["threads"] = int(threads)  # which may be True
    if resolver is not OpResolverType.AUTO:
        found["experimental_op_resolver_type"] = resolver.name
    return found


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
