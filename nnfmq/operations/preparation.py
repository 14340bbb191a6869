"""Preparation of a matched operation: output shapes, and the function that runs it.

Engines use declarations through this module. It separates arguments by role, converts attributes to Python values,
converts NCHW images to NHWC for shape rules and kernels and back, and checks the constraints that hold for every
operation:

    R2 the output's size fits 32 bits
    R3 no input has a dimension of 0, unless the declaration allows it
    R4 the declared output dimensions are equal to the computed ones, as far as they are known
    Q7 outputs have the input's scale and zero point, if the declaration requires it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Operand, is_scalar
from nnfmq.operations.declaration import NUMPY_TYPES, Array, Match, Parameter, Role, Run, Shape, Tensor
from nnfmq.operations.shapes import DATA_DEPENDENT, require, require_rank, require_size

__all__ = [
    "PrepackedWeights",
    "PreparedOp",
    "ShapedOp",
    "cached_prepack",
    "checks_only",
    "infer_shapes",
    "is_only_checked",
    "no_prepack_recording",
    "permute_shape",
    "prepare",
    "split_arguments",
    "tensor_of",
]

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


class ShapedOp(Struct, frozen=True):
    """An operation with valid shapes. `bind()` returns its Run; that may take long, and may raise GeneralFailure."""

    shapes: tuple[Shape, ...]
    bind: Callable[[], Run]


class PreparedOp(Struct, frozen=True):
    """An operation bound to shapes, weights and attributes; `run` takes the DATA arrays in order."""

    shapes: tuple[Shape, ...]
    run: Run


def tensor_of(operand: Operand, shape: Shape, value: Array | None = None) -> Tensor:
    """Return the description of an operand of `shape`, with its `value` if known."""
    dtype, data = NUMPY_TYPES[operand.type], operand.extension_data
    return Tensor(shape, dtype, operand.scale, operand.zero_point, operand.channel_quant, value, data)


def prepare(match: Match, arguments: Sequence[Tensor | None], outputs: Sequence[Operand]) -> PreparedOp:
    """Bind `match` to its arguments (None if omitted; those of WEIGHT and ATTRIBUTE parameters have values).

    Raises:
        GeneralFailure: If the arguments violate a constraint; the message ends with its id.
    """
    shaped = infer_shapes(match, arguments, outputs)
    return PreparedOp(shaped.shapes, shaped.bind())


def infer_shapes(match: Match, arguments: Sequence[Tensor | None], outputs: Sequence[Operand]) -> ShapedOp:
    """Infer and check the output shapes: `prepare` without calling the operation's plan.

    Raises:
        GeneralFailure: If the arguments violate a constraint of the shape rule.
    """
    assert match.variant.plan is not None, "engines check that the variant has a plan"
    declaration = match.declaration
    tensors, attributes, nchw = split_arguments(match, arguments)
    for tensor in tensors:
        empty = tensor is not None and 0 in tensor.shape
        require(declaration.zero_sized or not empty, "R3", "an input has a dimension of 0")
    if declaration.is_variadic:
        attributes["output_count"] = len(outputs)
    is_single = len(declaration.outputs) == 1 and not declaration.is_variadic
    result = declaration.shape(*(None if t is None else t.shape for t in tensors), **attributes)
    shapes: tuple[Shape, ...] = (result,) if is_single else tuple(result)
    to_nchw = nchw and declaration.image_outputs
    final = tuple(permute_shape(shape, TO_NCHW) for shape in shapes) if to_nchw else shapes
    _check_outputs(final, outputs)  # before the plan, which may allocate in proportion to the output
    output_tensors = tuple(tensor_of(operand, shape) for operand, shape in zip(outputs, shapes, strict=True))
    if declaration.same_quantization:
        _check_same_quantization(tensors, output_tensors)
    output = output_tensors[0] if is_single else output_tensors
    plan = partial(match.variant.plan, *tensors, output=output, **attributes)

    def bind() -> Run:
        run = plan()
        if declaration.is_variadic and len(outputs) == 1:
            return lambda *arrays: run(*arrays)[0]
        run = _run_as_nhwc(match, run) if nchw else run
        return _check_results(run, outputs) if any(DATA_DEPENDENT in shape for shape in final) else run

    return ShapedOp(final, bind)


def split_arguments(
    match: Match, arguments: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], dict[str, Any], bool]:
    """Return the DATA and WEIGHT tensors in order, the attributes by name, and whether images are NCHW.

    Shapes of images, among tensors and attributes, are converted to NHWC.
    """
    pairs = list(zip(match.parameters, arguments, strict=True))
    attributes = {p.name: _python_value(match, p, a) for p, a in pairs if p.role is Role.ATTRIBUTE}
    nchw = bool(attributes.pop("nchw", False))
    images = match.declaration.images if nchw else ()
    for name, value in attributes.items():
        if name in images and np.shape(value) == (4,):
            attributes[name] = value[list(TO_NHWC)]
    tensors = []
    for parameter, argument in pairs:
        if parameter.role is not Role.ATTRIBUTE:
            if argument is not None and parameter.name in images:
                argument = replace(argument, shape=permute_shape(argument.shape, TO_NHWC))
            tensors.append(argument)
    return tensors, attributes, nchw


def _python_value(match: Match, parameter: Parameter, argument: Tensor | None) -> Any:
    """Return a scalar as a Python number, a tensor as an array, None for an omitted argument.

    The parameter's type decides, not the shape: a request may give shape () to a tensor of unknown rank.
    """
    if argument is None:
        return None
    type = match.variant.types[parameter.type] if isinstance(parameter.type, str) else parameter.type
    is_tensor = type is not None and not is_scalar(type)
    return argument.array if is_tensor or argument.shape else argument.array.item()


def permute_shape(shape: Shape, permutation: tuple[int, ...]) -> Shape:
    """Return the shape of an image (R1) with its axes permuted."""
    require_rank(shape, (4,), "image")
    return tuple(shape[axis] for axis in permutation)


def _check_same_quantization(tensors: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> None:
    first = tensors[0]
    assert first is not None
    expected = (first.scale, first.zero_point)
    for tensor in (*tensors[1:], *outputs):
        same = tensor is None or (tensor.scale, tensor.zero_point) == expected
        require(same, "Q7", f"scale and zero point differ from the input's {expected}")


def _check_outputs(shapes: Sequence[Shape], outputs: Sequence[Operand]) -> None:
    for shape, operand in zip(shapes, outputs, strict=True):
        require_size(shape, NUMPY_TYPES[operand.type].itemsize)
        declared = operand.dimensions
        fits = not declared or (
            len(declared) == len(shape)
            and all(c == DATA_DEPENDENT or d in (0, c) for d, c in zip(declared, shape, strict=True))
        )
        if not fits and not is_scalar(operand.type):
            raise GeneralFailure(f"the output has shape {shape}, declared is {declared} (R4)")


def _check_results(run: Run, outputs: Sequence[Operand]) -> Run:
    """Return a Run that also checks shapes which depend on the data."""

    def checked(*arrays: Array) -> Any:
        results = run(*arrays)
        _check_outputs([result.shape for result in (results if len(outputs) > 1 else (results,))], outputs)
        return results

    return checked


def _run_as_nhwc(match: Match, run: Run) -> Run:
    """Return a Run for NCHW images: transposes them to NHWC, runs, and transposes the outputs back."""
    declaration = match.declaration
    is_image = [p.name in declaration.images for p in match.parameters if p.role is Role.DATA]

    def transposed(*arrays: Array) -> Any:
        nhwc = (a.transpose(TO_NHWC) if image else a for a, image in zip(arrays, is_image, strict=True))
        result = run(*map(np.ascontiguousarray, nhwc))
        if not declaration.image_outputs:
            return result
        if len(declaration.outputs) == 1:
            return np.ascontiguousarray(result.transpose(TO_NCHW))
        return tuple(np.ascontiguousarray(r.transpose(TO_NCHW)) for r in result)

    return transposed


# ----------------------------------------------------------------------------------------------------------------------
# Prepacked weights: arrays that plans derive from constants, which a compilation cache can save and restore.
#
# A plan wraps the expensive part of its preparation in `cached_prepack(compute)`, which returns what `compute()`
# returns. Within `PrepackedWeights.in_use()`, the arrays of each call are recorded in order. If the `PrepackedWeights`
# was made with the arrays of an earlier preparation, they are returned in the same order and nothing is computed:
# preparing the same model with the same code makes the same calls.
#
# Wrap only what is slow to compute and read-only afterwards. The caller that saves the arrays is responsible for their
# integrity: restored arrays are not checked here.


class PrepackedWeights:
    """The prepacked arrays of one model, a group for each call of `cached_prepack`.

    Args:
        restored: The groups of an earlier preparation of the same model; None to compute and record them.
    """

    def __init__(self, restored: Sequence[tuple[Array, ...]] | None = None) -> None:
        self.groups: list[tuple[Array, ...]] = []
        self._restored = restored

    def in_use(self) -> AbstractContextManager[None]:
        """Make `cached_prepack` record or restore here during the block, on the calling thread."""
        return _using(self)

    def next_group(self, compute: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
        """Return the next group, restored or computed.

        Raises:
            GeneralFailure: If fewer groups were restored than the model needs.
        """
        index = len(self.groups)
        if self._restored is not None and index >= len(self._restored):
            raise GeneralFailure(f"the cache has {index} groups of prepacked weights, the model needs more")
        group = compute() if self._restored is None else self._restored[index]
        self.groups.append(group)
        return group


def no_prepack_recording() -> AbstractContextManager[None]:
    """Make `cached_prepack` compute without recording during the block, on the calling thread."""
    return _using(None)


def checks_only() -> AbstractContextManager[None]:
    """Make plans check their arguments and pack no weights during the block, on the calling thread.

    What they return must not be called.
    """
    return _using(_CHECKS_ONLY)


@contextmanager
def _using(current: PrepackedWeights | None) -> Iterator[None]:
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)


def is_only_checked() -> bool:
    """Return whether this thread is within `checks_only`."""
    return _current.get() is _CHECKS_ONLY


_CHECKS_ONLY = PrepackedWeights(())
_current: ContextVar[PrepackedWeights | None] = ContextVar("prepacked_weights", default=None)


def cached_prepack(compute: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
    """Return the arrays of `compute()`, restored if the `PrepackedWeights` in use has them."""
    current = _current.get()
    return compute() if current is None else current.next_group(compute)
