"""The report of `nnfmq profile`: a JSON-compatible dict, and the tables and texts that are made from it.

The time of an operation in a run is the sum over its kernels. Its bytes are its inputs, outputs and constants, once
each. Rates are computed from p50.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import prod
from statistics import median_low
from typing import TYPE_CHECKING, Any

from nnfmq.cli.console import microseconds, share_text, short_microseconds, table
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.kernels import symbol_name
from nnfmq.engines.profiling import Profile, Timings
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import LifeTime, Operand, OperandType, Operation, Subgraph, is_scalar
from nnfmq.lab.conditions import machine_text
from nnfmq.lab.roofline import OpCost, compute_op_cost
from nnfmq.operations import REGISTRY
from nnfmq.operations.control_flow import FIRST_OUTER_INPUT
from nnfmq.operations.declaration import NUMPY_TYPES, Shape, match

if TYPE_CHECKING:
    from nnfmq.engines.compiled.memory_plan import Allocation, PartitionLaunch
    from nnfmq.engines.program import Program
    from nnfmq.lab.roofline import Ceiling

__all__ = [
    "arena_table",
    "build",
    "computed_by",
    "kilobytes",
    "operations_table",
    "rate",
    "summary",
    "value_name",
]

_FLOATS = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_FLOAT16)


@dataclass(slots=True)
class _Row:
    """Timings of one operation, and its kernels; `computed_by` is "kernel", "reference", "view" or "fused".

    The kernels of operation `fused_into` compute a fused one.
    """

    samples: Timings
    kernels: list[dict[str, Any]]
    computed_by: str
    threads: int = 1
    fused_into: int | None = None


def build(
    subgraph: Subgraph,
    program: Program,
    times: Profile,
    ceilings: Mapping[str, Ceiling] | None,
    conditions: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the report; it begins with `conditions`. Without `ceilings` there are no shares of the peak."""
    rows = _rows(program, times)
    total_ns = sum(row.samples.p50_ns for row in rows.values())
    shapes = {index: shape for index, shape in enumerate(program.shapes) if shape is not None} | {
        index: shape for index, shape in times.shapes.items() if program.shapes[index] is None
    }
    overheads = [cost for step in times.steps for launch in step for cost in launch.overhead]
    operations = [_operation(number, subgraph, shapes, rows[number], total_ns, ceilings) for number in range(len(rows))]
    return {
        **conditions,
        "run_ns": {"p50": median_low(times.runs), "min": min(times.runs)},
        "steps_ns": _summary(*(row.samples for row in rows.values()), times.output_copy),
        "output_copy_ns": _summary(times.output_copy),
        "overhead_ns": median_low(overheads),
        "ceilings": None
        if ceilings is None
        else {name: asdict(ceiling) | {"unit": _CEILING_UNITS[name]} for name, ceiling in ceilings.items()},
        "operations": operations,
        "types": _types(operations),
        "arenas": list(_arenas(subgraph, program)),
    }


def _summary(*steps: Timings) -> dict[str, int]:
    """Return the sums of the steps' medians and minima; a pause during one step does not affect the others."""
    return {"p50": sum(samples.p50_ns for samples in steps), "min": sum(samples.min_ns for samples in steps)}


# -- timings by operation ---------------------------------------------------------------------------------------------


def _rows(program: Program, times: Profile) -> dict[int, _Row]:
    rows: dict[int, _Row] = {}
    first = 0
    for part, samples in zip(program.steps, times.steps, strict=True):
        if isinstance(part.function, CompiledPartition):
            rows.update(_generated_rows(range(first, part.last_operation + 1), part.function, samples))
        else:
            rows[part.last_operation] = _Row(samples[0], [], "reference")
        first = part.last_operation + 1
    return rows


def _generated_rows(numbers: range, segment: CompiledPartition, samples: Sequence[Timings]) -> dict[int, _Row]:
    """Return the rows of a segment; an operation without a kernel is fused, or only gives its input another shape."""
    calls = list(zip(segment.plan.source_launches, samples, strict=True))
    fused_into = {number: call.operation for call, _ in calls for number in call.fused}
    nothing = Timings(*([0] * len(samples[0].elapsed) for _ in range(2)))
    rows = {}
    for number in numbers:
        own = [(call, times) for call, times in calls if call.operation == number]
        kernels = [_kernel(call, segment.thread_count) | {"p50_ns": times.p50_ns} for call, times in own]
        threads = max((kernel["threads"] for kernel in kernels), default=1)
        computed_by = "kernel" if own else "fused" if number in fused_into else "view"
        total = Timings.sum(times for _, times in own) if own else nothing
        rows[number] = _Row(total, kernels, computed_by, threads, fused_into.get(number))
    return rows


def _kernel(call: PartitionLaunch, threads: int) -> dict[str, Any]:
    tile = getattr(call.kernel, "tile", None)
    return {
        "kind": type(call.kernel).__name__,
        "tile": None if tile is None else list(tile),
        "has_tiles": getattr(call.kernel, "has_tiles", False),
        "name": symbol_name(call.kernel),
        "units": call.kernel.work_items,
        "threads": min(threads, call.kernel.work_items) if call.runs_parallel else 1,
    }


# -- one operation ----------------------------------------------------------------------------------------------------


def _operation(
    number: int,
    subgraph: Subgraph,
    shapes: Mapping[int, Shape],
    row: _Row,
    total_ns: int,
    ceilings: Mapping[str, Ceiling] | None,
) -> dict[str, Any]:
    operation = subgraph.operations[number]
    work = _work(subgraph, operation, shapes)
    moved = 0 if row.computed_by in ("view", "fused") else _moved(subgraph, operation, shapes)
    p50_ns, rate_ns = row.samples.p50_ns, row.samples.rate_ns
    counts = None if work is None else work.arithmetic_operations
    rate = None if counts is None or rate_ns is None else counts / rate_ns
    arithmetic = _arithmetic(subgraph.operands[operation.outputs[0]], row)
    peak = None if ceilings is None else ceilings[arithmetic].all_threads
    return {
        "number": number,
        "operation": operation.type.name,
        "p50_ns": p50_ns,
        "min_ns": row.samples.min_ns,
        "share": p50_ns / total_ns if total_ns else 0.0,
        "arithmetic": arithmetic,
        "multiply_adds": None if work is None else work.multiply_adds,
        "elements": None if work is None else work.elements,
        "giga_operations_per_s": rate,
        "share_of_peak": None if rate is None or peak is None else rate / peak,
        "share_of_bound": _share_of_bound(work, row, arithmetic, ceilings),
        "bytes": moved,
        "gigabytes_per_s": None if moved is None or rate_ns is None else moved / rate_ns,
        "computed_by": row.computed_by,
        "fused_into": row.fused_into,
        "threads": row.threads,
        "kernels": row.kernels,
        "shapes": [list(shapes[index]) if index in shapes else None for index in operation.outputs],
    }


def _share_of_bound(
    work: OpCost | None, row: _Row, arithmetic: str, ceilings: Mapping[str, Ceiling] | None
) -> float | None:
    """Return a quantized product's least time over its p50; None for other operations.

    The least time is that of the multiply-adds at their peak, and of requantizing and storing the outputs at theirs.
    """
    is_product = arithmetic != "float32" and any(kernel["kind"] == "GemmKernel" for kernel in row.kernels)
    rate_ns = row.samples.rate_ns
    if not is_product or rate_ns is None or ceilings is None or work is None or work.multiply_adds is None:
        return None
    bound_ns = 2 * work.multiply_adds / ceilings[arithmetic].all_threads
    bound_ns += work.elements / ceilings["outputs"].all_threads
    return bound_ns / rate_ns


def _arithmetic(output: Operand, row: _Row) -> str:
    """Return the ceiling that holds for an operation."""
    if output.type in _FLOATS:
        return "float32"
    return "tiles" if any(kernel["has_tiles"] for kernel in row.kernels) else "quantized"


def _work(subgraph: Subgraph, operation: Operation, shapes: Mapping[int, Shape]) -> OpCost | None:
    """Return the cost, None if shapes are unknown. Operations in the subgraphs of IF and WHILE are not counted."""
    outputs = [shapes.get(index) for index in operation.outputs]
    known = [shape for shape in outputs if shape is not None]
    if len(known) != len(outputs):
        return None
    declaration = REGISTRY.get(operation.type)
    if declaration is None or operation.type in FIRST_OUTER_INPUT:
        return OpCost(None, sum(map(prod, known)))
    operands = subgraph.operands
    try:
        found = match(declaration, [operands[i] for i in operation.inputs], [operands[i] for i in operation.outputs])
    except InvalidArgument:
        return None
    shapes_in = [None if operands[i].lifetime == LifeTime.NO_VALUE else shapes.get(i) for i in operation.inputs]
    return compute_op_cost(found, shapes_in, known)


def _moved(subgraph: Subgraph, operation: Operation, shapes: Mapping[int, Shape]) -> int | None:
    total = 0
    for index in dict.fromkeys((*operation.inputs, *operation.outputs)):
        operand = subgraph.operands[index]
        if operand.lifetime == LifeTime.NO_VALUE or operand.type not in NUMPY_TYPES or is_scalar(operand.type):
            continue
        if index not in shapes:
            return None
        total += prod(shapes[index]) * NUMPY_TYPES[operand.type].itemsize
    return total


def _types(operations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the totals of each operation type, the longest first."""
    found: dict[str, dict[str, Any]] = {}
    for one in operations:
        entry = found.setdefault(one["operation"], {"operation": one["operation"], "count": 0, "p50_ns": 0, "share": 0})
        entry["count"] += 1
        entry["p50_ns"] += one["p50_ns"]
        entry["share"] += one["share"]
    return sorted(found.values(), key=lambda entry: -entry["p50_ns"])


# -- the arena --------------------------------------------------------------------------------------------------------


def _arenas(subgraph: Subgraph, program: Program) -> Iterator[dict[str, Any]]:
    first = 0
    for part in program.steps:
        if isinstance(part.function, CompiledPartition):
            plan = part.function.plan
            # A fused operation is computed when the last one's inputs are: its kernels may follow later operations'.
            columns = list(accumulate((call.operation for call in plan.source_launches), max))
            values = [_value(subgraph, plan.source_launches, columns, place) for place in plan.allocations]
            yield {
                "first_operation": first,
                "last_operation": part.last_operation,
                "bytes": plan.arena_bytes,
                "values_bytes": sum(value["bytes"] for value in values),
                "kernels": columns,
                "values": values,
            }
        first = part.last_operation + 1


def _value(
    subgraph: Subgraph, calls: Sequence[PartitionLaunch], columns: Sequence[int], place: Allocation
) -> dict[str, Any]:
    producer, last = calls[place.begin].operation, min(place.end, len(calls) - 1)
    return {
        "operand": _operand_of(place.index, len(subgraph.operands)),
        "layout": "nhwc" if place.index < 0 else "operand" if place.index < len(subgraph.operands) else "intermediate",
        "producer": subgraph.operations[producer].type.name,
        "bytes": place.spec.bytes,
        "offset": place.offset,
        "from_operation": columns[place.begin],
        "to_operation": columns[last],
        "from_kernel": place.begin,
        "to_kernel": last,
        "is_read_later": place.end == len(calls),
    }


def _operand_of(index: int, count: int) -> int | None:
    """Return the model's operand; None for an intermediate between kernels of one operation."""
    if index < 0:
        return ~index
    return index if index < count else None


# -- tables, and the texts that tables and page share ------------------------------------------------------------------


_CEILING_UNITS = {
    "float32": "GFLOP/s",
    "quantized": "GOP/s",
    "tiles": "GOP/s",
    "memory": "GB/s",
    "cache": "GB/s",
    "outputs": "G requantized and stored/s",
}


def operations_table(report: Mapping[str, Any], sort: str, *, wide: bool) -> Any:
    """Return the table of operations; `wide` adds columns."""
    more: tuple[str, ...] = (">of bound", ">min µs", ">KB", ">threads") if wide else ()
    listing = table(">", "operation", ">p50 µs", ">share", ">Gop/s", ">of peak", ">GB/s", *more, "computed by")
    listing.columns[1].no_wrap, listing.padding = True, (0, 1, 0, 0)  # so that it fits 80 columns
    rows = report["operations"]
    if sort == "time":
        rows = sorted(rows, key=lambda row: -row["p50_ns"])
    for row in rows:
        bound, minimum = share_text(row["share_of_bound"], 1), short_microseconds(row["min_ns"])
        extra = (bound, minimum, kilobytes(row["bytes"]), str(row["threads"])) if wide else ()
        rates = rate(row["giga_operations_per_s"]), share_text(row["share_of_peak"], 1), rate(row["gigabytes_per_s"])
        times = short_microseconds(row["p50_ns"]), share_text(row["share"], 1)
        listing.add_row(str(row["number"]), row["operation"], *times, *rates, *extra, computed_by(row))
    return listing


def computed_by(row: Mapping[str, Any]) -> str:
    """Return the kernels and tiles of an operation, or the reference, or that it is fused or a view."""
    if row["computed_by"] == "kernel":
        counts = Counter(_kernel_text(kernel) for kernel in row["kernels"])
        return " + ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())
    if row["computed_by"] == "fused":
        return f"with operation {row['fused_into']}"
    return {"reference": "the reference", "view": "none (a view)"}[row["computed_by"]]


def _kernel_text(kernel: Mapping[str, Any]) -> str:
    tile = "" if kernel["tile"] is None else " " + "×".join(map(str, kernel["tile"]))
    return f"{kernel['kind'].removesuffix('Kernel')}{tile}"


def rate(value: float | None) -> str:
    """Return a rate with about three digits; `-` for None."""
    return "-" if value is None else f"{value:.{2 if value < 1 else 1 if value < 99.95 else 0}f}"


def kilobytes(count: int | None) -> str:
    """Return thousands of bytes; `-` for None."""
    return "-" if count is None else f"{count / 1000:,.1f}"


def arena_table(arena: Mapping[str, Any]) -> Any:
    """Return the table of one arena: each value's producer, offset, size and live range."""
    title = f"arena of operations {arena['first_operation']} to {arena['last_operation']}"
    listing = table("value", "producer", ">offset", ">bytes", ">from", ">to", title=title)
    for value in sorted(arena["values"], key=lambda value: (value["from_operation"], value["offset"])):
        last = f"{value['to_operation']}{'+' if value['is_read_later'] else ''}"
        numbers = f"{value['offset']:,}", f"{value['bytes']:,}", str(value["from_operation"]), last
        listing.add_row(value_name(value), value["producer"], *numbers)
    return listing


def value_name(value: Mapping[str, Any]) -> str:
    """Return the name of a value in an arena."""
    if value["operand"] is None:
        return "between kernels"
    return f"operand {value['operand']}{' in NHWC' if value['layout'] == 'nhwc' else ''}"


def summary(report: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table, which the page has, too."""
    lines = [_conditions(report), _comparison(report), *_ceiling_lines(report), *_arena_lines(report)]
    return [*lines, machine_text(report["conditions"])]


def _conditions(report: Mapping[str, Any]) -> str:
    target = f" ({report['target']})" if report["device"] == "compiled" else ""
    inputs = report["inputs"] if isinstance(report["inputs"], str) else ", ".join(report["inputs"])
    threads = "1 thread" if report["threads"] == 1 else f"{report['threads']} threads"
    return f"{report['device']}{target} in this process, {threads}, {report['runs']} runs; inputs: {inputs}."


def _comparison(report: Mapping[str, Any]) -> str:
    run, steps = report["run_ns"], report["steps_ns"]
    share = steps["p50"] / run["p50"]
    return (
        f"Whole model: {microseconds(run['p50'])} µs (min {microseconds(run['min'])}). Sum of its steps: "
        f"{microseconds(steps['p50'])} µs (min {microseconds(steps['min'])}), {share_text(share)} of that, without the "
        f"overhead of timing, {report['overhead_ns'] / 1000:.2f} µs each."
    )


def _ceiling_lines(report: Mapping[str, Any]) -> Iterator[str]:
    ceilings = report["ceilings"]
    if ceilings is None:
        yield "The machine's peaks were not measured: that needs generated code, and so llvmlite."
        return
    values = ", ".join(
        f"{name} {_pair(ceilings[name])} {unit}" for name, unit in _CEILING_UNITS.items() if name in ceilings
    )
    count = report["ceiling_threads"]
    threads = "1 thread" if count == 1 else f"1 / {count} threads"
    yield f"Measured peaks, {threads}: {values}."


def _pair(ceiling: Mapping[str, float]) -> str:
    one, all_threads = f"{ceiling['one_thread']:.0f}", f"{ceiling['all_threads']:.0f}"
    return one if one == all_threads else f"{one} / {all_threads}"


def _arena_lines(report: Mapping[str, Any]) -> Iterator[str]:
    for arena in report["arenas"]:
        if arena["values_bytes"]:
            share = arena["bytes"] / arena["values_bytes"]
            numbers = f"{arena['first_operation']} to {arena['last_operation']}"
            sizes = f"{arena['bytes']:,} bytes for values of {arena['values_bytes']:,} ({share_text(share)})"
            yield f"Arena of operations {numbers}: {sizes}."
