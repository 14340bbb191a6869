"""validate_request: what one execution asks for, against the model it was prepared from.

Ids: N-REQ-1/2 argument counts, N-RQX-1 ... N-RQX-10 one argument, N-RQX-13 overlapping ranges. What a buffer of the
driver's holds and was allocated for, only the driver knows.
All sums are Python ints: no offset or length of a hostile request wraps around. Answer: the least feature level whose
interface can say what the request says, whatever level its model needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.feature_levels import FeatureLevel
from nnfmq.hal.types import BufferToken, DataLocation, Model, Operand, Request, RequestArgument, is_scalar
from nnfmq.validation.model import operand_size

__all__ = ["validate_request"]


def validate_request(model: Model, request: Request, *, allow_unspecified_output: bool = True) -> FeatureLevel:
    """Return the feature level that `request` needs. Raises InvalidArgument, naming the argument and the rule.

    `model` has passed `validate_model`. `allow_unspecified_output` is False for fenced executions and for interfaces
    up to HAL 1.1, which know no output that the model and the request together leave open.
    """
    main = model.main
    _validate_list(main.operands, main.input_indexes, request.inputs, request, "input", False)
    is_closed = _validate_list(
        main.operands, main.output_indexes, request.outputs, request, "output", allow_unspecified_output
    )
    _require_apart(request)
    pads = any(argument.location.padding for argument in (*request.inputs, *request.outputs))
    return FeatureLevel.AIDL_V1 if pads else FeatureLevel.V1_0 if is_closed else FeatureLevel.V1_2


def _require(condition: bool, rule: str, message: str) -> None:
    if not condition:
        raise InvalidArgument(f"{rule}: {message}")


def _validate_list(
    operands: Sequence[Operand],
    indexes: Sequence[int],
    arguments: Sequence[RequestArgument],
    request: Request,
    kind: str,
    may_be_unspecified: bool,
) -> bool:
    """Check all arguments of one kind; return whether they are fully specified."""
    rule = "N-REQ-1" if kind == "input" else "N-REQ-2"
    _require(len(arguments) == len(indexes), rule, f"{len(arguments)} {kind}s given, the model has {len(indexes)}")
    known = [
        _validate_argument(operands[index], argument, request, f"{kind} {number}", may_be_unspecified)
        for number, (index, argument) in enumerate(zip(indexes, arguments, strict=True))
    ]
    return all(known)


def _validate_argument(
    operand: Operand, argument: RequestArgument, request: Request, where: str, may_be_unspecified: bool
) -> bool:
    """Check one argument; return whether model and request together say all of its dimensions."""
    if argument.has_no_value:
        empty = argument.location == DataLocation() and not argument.dimensions
        _require(empty, "N-RQX-1", f"{where} has no value, but location {argument.location} {argument.dimensions}")
        return True
    is_token = _validate_location(argument.location, request, where)
    dimensions = _combined(operand, argument, where)
    known = is_scalar(operand.type) or (bool(dimensions) and 0 not in dimensions)
    rule = "N-RQX-7" if where.startswith("input") else "N-RQX-8"
    knows_its_shape = is_token and rule == "N-RQX-7"  # a buffer has that of what was written into it
    _require(known or may_be_unspecified or knows_its_shape, rule, f"{where} is not fully specified: {dimensions}")
    needed = operand_size(operand.type, dimensions, where)
    if known and not is_token:
        _require(
            argument.location.length == needed, "N-RQX-5", f"{where} has {argument.location.length} bytes, not {needed}"
        )
    return known


def _validate_location(place: DataLocation, request: Request, where: str) -> bool:
    """Check where an argument lies; return whether that is a buffer of the driver's."""
    count = len(request.pools)
    _require(0 <= place.pool_index < count, "N-RQX-2", f"{where}: pool {place.pool_index} of {count}")
    pool = request.pools[place.pool_index]
    if isinstance(pool, BufferToken):
        _require(pool.token > 0, "N-RQX-9", f"{where}: token {pool.token}, tokens are above 0")
        whole = place == DataLocation(place.pool_index)
        _require(whole, "N-RQX-10", f"{where}: {place} in a buffer, of which an argument is always all")
        return True
    _require(place.length > 0, "N-RQX-4", f"{where}: length {place.length}")
    size = pool.size_bytes
    inside = place.offset >= 0 and place.padding >= 0 and place.offset + place.length + place.padding <= size
    _require(inside, "N-RQX-3", f"{where}: {place.length} bytes at {place.offset} of {size}")
    return False


def _combined(operand: Operand, argument: RequestArgument, where: str) -> tuple[int, ...]:
    """Return the request's dimensions joined with the model's; 0 stays unknown."""
    model, given = operand.dimensions, argument.dimensions
    if not given:
        return model
    _require(all(0 <= extent < 1 << 32 for extent in given), "N-RQX-6", f"{where}: dimensions {given}")
    same_rank = not is_scalar(operand.type) and len(model) in (0, len(given))
    _require(same_rank, "N-RQX-6", f"{where}: dimensions {given}, the model has {model}")
    if not model:
        return given
    agree = all(m == g or 0 in (m, g) for m, g in zip(model, given, strict=True))
    _require(agree, "N-RQX-6", f"{where}: dimensions {given}, the model has {model}")
    return tuple(m or g for m, g in zip(model, given, strict=True))


def _require_apart(request: Request) -> None:
    """An output may overlap neither another output nor an input: what is read must not change under the reader."""
    ranges = sorted([*_ranges(request.inputs, False), *_ranges(request.outputs, True)])
    ends: dict[tuple[int, bool], int] = {}  # (pool, is an output) -> how far the ranges so far reach
    for pool, start, end, is_output in ranges:
        reached = max(ends.get((pool, True), 0), ends.get((pool, False), 0) if is_output else 0)
        _require(start >= reached, "N-RQX-13", f"an output overlaps another argument at byte {start} of pool {pool}")
        ends[pool, is_output] = max(ends.get((pool, is_output), 0), end)


def _ranges(arguments: Sequence[RequestArgument], is_output: bool) -> Iterator[tuple[int, int, int, bool]]:
    places = (argument.location for argument in arguments if not argument.has_no_value)
    return ((place.pool_index, place.offset, place.offset + place.length, is_output) for place in places)
