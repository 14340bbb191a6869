"""Validation of a request against the model that it executes.

Rules: N-REQ-1, N-REQ-2 (argument counts), N-RQX-1 to N-RQX-10 (one argument), N-RQX-13 (overlapping arguments). Only
the driver knows a managed buffer's contents and roles, so it checks them itself.

All sums are Python ints: no offset or length of a hostile request wraps around.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import BufferToken, DataLocation, Model, Operand, Request, RequestArgument, is_scalar
from nnfmq.validation.models import operand_size
from nnfmq.validation.values import require

__all__ = ["validate_request"]


def validate_request(model: Model, request: Request, *, allow_unspecified_output: bool = True) -> FeatureLevel:
    """Return the lowest feature level whose interface can express `request`, whatever level the model needs.

    Args:
        model: A model that `validate_model` accepted.
        allow_unspecified_output: Accept outputs whose dimensions neither model nor request specify. False for fenced
            executions and for interfaces up to HAL 1.1.

    Raises:
        InvalidArgument: If an argument is invalid; the message names the argument and the rule.
    """
    main = model.main
    _validate_list(main.operands, main.input_indexes, request.inputs, request, "input", False)
    is_specified = _validate_list(
        main.operands, main.output_indexes, request.outputs, request, "output", allow_unspecified_output
    )
    _require_no_overlap(request)
    has_padding = any(argument.location.padding for argument in (*request.inputs, *request.outputs))
    return FeatureLevel.AIDL_V1 if has_padding else FeatureLevel.V1_0 if is_specified else FeatureLevel.V1_2


def _validate_list(
    operands: Sequence[Operand],
    indexes: Sequence[int],
    arguments: Sequence[RequestArgument],
    request: Request,
    kind: str,
    may_be_unspecified: bool,
) -> bool:
    """Validate all inputs or all outputs; return True if all of them are fully specified."""
    rule = "N-REQ-1" if kind == "input" else "N-REQ-2"
    require(len(arguments) == len(indexes), rule, f"{len(arguments)} {kind}s given, the model has {len(indexes)}")
    specified = [
        _validate_argument(operands[index], argument, request, f"{kind} {position}", may_be_unspecified)
        for position, (index, argument) in enumerate(zip(indexes, arguments, strict=True))
    ]
    return all(specified)


def _validate_argument(
    operand: Operand, argument: RequestArgument, request: Request, where: str, may_be_unspecified: bool
) -> bool:
    """Validate one argument; return True if model and request together specify all of its dimensions."""
    if argument.has_no_value:
        empty = argument.location == DataLocation() and not argument.dimensions
        message = f"{where}: an omitted argument has location {argument.location} and dimensions {argument.dimensions}"
        require(empty, "N-RQX-1", message)
        return True
    is_token = _validate_location(argument.location, request, where)
    dimensions = _merged_dimensions(operand, argument, where)
    specified = is_scalar(operand.type) or (bool(dimensions) and 0 not in dimensions)
    rule = "N-RQX-7" if where.startswith("input") else "N-RQX-8"
    has_stored_shape = is_token and rule == "N-RQX-7"  # an input buffer has the shape of what was written into it
    allowed = specified or may_be_unspecified or has_stored_shape
    require(allowed, rule, f"{where}: dimensions {dimensions} are not fully specified")
    required = operand_size(operand.type, dimensions, where)
    if specified and not is_token:
        length = argument.location.length
        require(length == required, "N-RQX-5", f"{where}: {length} bytes given, {required} are required")
    return specified


def _validate_location(location: DataLocation, request: Request, where: str) -> bool:
    """Validate where an argument is; return True if it is in a managed buffer."""
    count = len(request.pools)
    require(
        0 <= location.pool_index < count, "N-RQX-2", f"{where}: pool {location.pool_index}, the request has {count}"
    )
    pool = request.pools[location.pool_index]
    if isinstance(pool, BufferToken):
        require(pool.token > 0, "N-RQX-9", f"{where}: buffer token {pool.token}, a token is greater than 0")
        whole = location == DataLocation(location.pool_index)
        require(whole, "N-RQX-10", f"{where}: {location} in a managed buffer, an argument must be the whole buffer")
        return True
    require(location.length > 0, "N-RQX-4", f"{where}: length {location.length}, it must be greater than 0")
    size, end = pool.size_bytes, location.offset + location.length + location.padding
    inside = location.offset >= 0 and location.padding >= 0 and end <= size
    message = f"{where}: {location.length} bytes at offset {location.offset}, the pool has {size} bytes"
    require(inside, "N-RQX-3", message)
    return False


def _merged_dimensions(operand: Operand, argument: RequestArgument, where: str) -> tuple[int, ...]:
    """Return the model's dimensions, with unknown ones (0) filled in from the request."""
    model, requested = operand.dimensions, argument.dimensions
    if not requested:
        return model
    in_range = all(0 <= dimension < 1 << 32 for dimension in requested)
    require(in_range, "N-RQX-6", f"{where}: dimensions {requested}, each must be 0 to 2^32 - 1")
    message = f"{where}: dimensions {requested}, the model has {model}"
    same_rank = not is_scalar(operand.type) and len(model) in (0, len(requested))
    require(same_rank, "N-RQX-6", message)
    if not model:
        return requested
    agree = all(m == g or 0 in (m, g) for m, g in zip(model, requested, strict=True))
    require(agree, "N-RQX-6", message)
    return tuple(m or g for m, g in zip(model, requested, strict=True))


def _require_no_overlap(request: Request) -> None:
    """Require that no output overlaps another argument: an engine may read inputs while it writes outputs.

    Arguments are visited in order of their start. For each pool, `ends` has the highest end of the inputs and of the
    outputs so far; an output must start at or after both, an input at or after the outputs' end.
    """
    ranges = sorted([*_ranges(request.inputs, is_output=False), *_ranges(request.outputs, is_output=True)])
    ends: dict[tuple[int, bool], int] = {}  # (pool, is an output) -> end
    for pool, start, end, is_output in ranges:
        occupied = max(ends.get((pool, True), 0), ends.get((pool, False), 0) if is_output else 0)
        require(start >= occupied, "N-RQX-13", f"an output overlaps another argument at byte {start} of pool {pool}")
        ends[pool, is_output] = max(ends.get((pool, is_output), 0), end)


def _ranges(arguments: Sequence[RequestArgument], *, is_output: bool) -> Iterator[tuple[int, int, int, bool]]:
    locations = (argument.location for argument in arguments if not argument.has_no_value)
    return ((loc.pool_index, loc.offset, loc.offset + loc.length, is_output) for loc in locations)
