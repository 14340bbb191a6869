"""From a matched operation and what is known of its arguments to output shapes and a function that runs it.

This is the one place that reads declarations on behalf of an engine: it sorts arguments by role, turns controls
into named Python values, hides NCHW from shape rules and kernels (transpose in, compute, transpose out), and checks
what holds for every operation:

    R2 the output's size fits 32 bits
    R3 no input has an extent of 0, unless the declaration allows it
    R4 the declared output dimensions are those computed, where known
    Q7 scale and zero point pass through, where the declaration says so
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import Operand, is_scalar
from nnfmq.operations.shapes import DATA_DEPENDENT, require, require_rank, require_size
from nnfmq.operations.signature import NUMPY_TYPES, Array, Match, Parameter, Role, Run, Shape, Tensor

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


@dataclass(frozen=True, slots=True)
class ShapedOp:
    """An operation whose shapes fit; `bind` makes its run, which is what may take long, and may refuse as well."""

    shapes: tuple[Shape, ...]
    bind: Callable[[], Run]


@dataclass(frozen=True, slots=True)
class PreparedOp:
    """An operation bound to shapes, weights and controls: `run` takes the DATA arrays in order."""

    shapes: tuple[Shape, ...]
    run: Run


def tensor_of(operand: Operand, shape: Shape, value: Array | None = None) -> Tensor:
    """Describe an operand that has `shape`, and `value` if that is known."""
    dtype, data = NUMPY_TYPES[operand.type], operand.extension_data
    return Tensor(shape, dtype, operand.scale, operand.zero_point, operand.channel_quant, value, data)


def prepare(match: Match, arguments: Sequence[Tensor | None], outputs: Sequence[Operand]) -> PreparedOp:
    """Bind `match` to its arguments (None where omitted; WEIGHT and CONTROL ones carry values).

    Raises GeneralFailure with the number of the constraint that the arguments violate.
    """
    fitted = infer_shapes(match, arguments, outputs)
    return PreparedOp(fitted.shapes, fitted.bind())


def infer_shapes(match: Match, arguments: Sequence[Tensor | None], outputs: Sequence[Operand]) -> ShapedOp:
    """Do the first half of `prepare`: all but what the operation's plan does and checks."""
    assert match.variant.plan is not None, "the engine asks `is_computed` first"
    tensors, attributes, nchw = split_arguments(match, arguments)
    _check_extents(match, tensors)
    if match.declaration.is_variadic:
        attributes["output_count"] = len(outputs)
    shapes = _output_shapes(match, tensors, attributes)
    turned = nchw and match.declaration.image_outputs
    final = tuple(permuted(shape, TO_NCHW) for shape in shapes) if turned else shapes
    _check_outputs(final, outputs)  # before the plan, whose tables may be as long as a row of the output
    described = tuple(tensor_of(operand, shape) for operand, shape in zip(outputs, shapes, strict=True))
    if match.declaration.same_quantization:
        _check_same_quantization(tensors, described)
    plan = partial(match.variant.plan, *tensors, output=described[0] if _is_single(match) else described, **attributes)

    def bind() -> Run:
        run = plan()
        if match.declaration.is_variadic and len(outputs) == 1:
            return _first_of(run)
        run = _transposed(match, run) if nchw else run
        return _checked(run, outputs) if any(DATA_DEPENDENT in shape for shape in final) else run

    return ShapedOp(final, bind)


def split_arguments(
    match: Match, arguments: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], dict[str, Any], bool]:
    """Return DATA and WEIGHT tensors in order, the controls by name, all as for NHWC, and whether it is NCHW."""
    attributes = _attributes(match, arguments)
    nchw = bool(attributes.pop("nchw", False))
    if nchw:
        attributes = _shapes_as_nhwc(match, attributes)
    return _tensors(match, arguments, nchw), attributes, nchw


def _is_single(match: Match) -> bool:
    return len(match.declaration.outputs) == 1 and not match.declaration.is_variadic


def _first_of(run: Run) -> Run:
    return lambda *arrays: run(*arrays)[0]


def _attributes(match: Match, arguments: Sequence[Tensor | None]) -> dict[str, Any]:
    pairs = zip(match.parameters, arguments, strict=True)
    return {p.name: _python_value(argument, _is_tensor(match, p)) for p, argument in pairs if p.role is Role.ATTRIBUTE}


def _is_tensor(match: Match, parameter: Parameter) -> bool:
    """Return True if the type says tensor: a request may give a tensor of unknown rank a shape of ()."""
    kind = match.variant.types[parameter.type] if isinstance(parameter.type, str) else parameter.type
    return kind is not None and not is_scalar(kind)


def _python_value(argument: Tensor | None, is_tensor: bool) -> Any:
    """Return a scalar as a Python number, a tensor as a private array, and None for an omitted argument."""
    if argument is None:
        return None
    return argument.array if is_tensor or argument.shape else argument.array.item()


def _shapes_as_nhwc(match: Match, attributes: Mapping[str, Any]) -> dict[str, Any]:
    turned = {name for name in attributes if name in match.declaration.images and np.shape(attributes[name]) == (4,)}
    return {name: value[list(TO_NHWC)] if name in turned else value for name, value in attributes.items()}


def _tensors(match: Match, arguments: Sequence[Tensor | None], nchw: bool) -> list[Tensor | None]:
    pairs = zip(match.parameters, arguments, strict=True)
    images = match.declaration.images if nchw else ()
    return [_as_nhwc(a) if p.name in images else a for p, a in pairs if p.role is not Role.ATTRIBUTE]


def _as_nhwc(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else replace(tensor, shape=permuted(tensor.shape, TO_NHWC))


def permuted(shape: Shape, order: tuple[int, ...]) -> Shape:
    """Return the shape of an image (R1) with its axes in another order."""
    require_rank(shape, (4,), "image")
    return tuple(shape[axis] for axis in order)


def _check_extents(match: Match, tensors: Sequence[Tensor | None]) -> None:
    for tensor in tensors:
        empty = tensor is not None and 0 in tensor.shape
        require(match.declaration.zero_sized or not empty, "R3", "an input has an extent of 0")


def _output_shapes(match: Match, tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    result = match.declaration.shape(*(None if t is None else t.shape for t in tensors), **attributes)
    return (result,) if _is_single(match) else tuple(result)


def _check_same_quantization(tensors: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> None:
    first = tensors[0]
    assert first is not None
    for tensor in (*tensors[1:], *outputs):
        same = tensor is None or (tensor.scale, tensor.zero_point) == (first.scale, first.zero_point)
        require(same, "Q7", f"scale and zero point are not the input's ({first.scale}, {first.zero_point})")


def _check_outputs(shapes: Sequence[Shape], outputs: Sequence[Operand]) -> None:
    for shape, operand in zip(shapes, outputs, strict=True):
        require_size(shape, NUMPY_TYPES[operand.type].itemsize)
        declared = operand.dimensions
        fits = not declared or (
            len(declared) == len(shape) and all(_fits(d, e) for d, e in zip(declared, shape, strict=True))
        )
        if not fits and not is_scalar(operand.type):
            raise GeneralFailure(f"the output has shape {shape}, declared is {declared} (R4)")


def _fits(declared: int, extent: int) -> bool:
    return extent == DATA_DEPENDENT or declared in (0, extent)


def _checked(run: Run, outputs: Sequence[Operand]) -> Run:
    """Check the shapes that came with the data, too."""

    def checked(*arrays: Array) -> Any:
        results = run(*arrays)
        _check_outputs([result.shape for result in (results if len(outputs) > 1 else (results,))], outputs)
        return results

    return checked


def _transposed(match: Match, run: Run) -> Run:
    names = [p.name for p in match.parameters if p.role is Role.DATA]
    images = [name in match.declaration.images for name in names]
    single, back = len(match.declaration.outputs) == 1, match.declaration.image_outputs

    def transposed(*arrays: Array) -> Any:
        turned = (a.transpose(TO_NHWC) if image else a for a, image in zip(arrays, images, strict=True))
        result = run(*map(np.ascontiguousarray, turned))
        if not back:
            return result
        if single:
            return np.ascontiguousarray(result.transpose(TO_NCHW))
        return tuple(np.ascontiguousarray(r.transpose(TO_NCHW)) for r in result)

    return transposed
