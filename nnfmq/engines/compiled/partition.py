"""Preparation for the compiling engine: the interpreter's preparation, with kernels for the operations that have them.

Operations whose shapes and attributes are known at preparation, and for which `LOWERING_RULES` has a kernel, form
partitions; all others stay steps of the interpreter. Arguments are checked by the interpreter's code either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from msgspec.structs import replace

from nnfmq.base import settings
from nnfmq.engines.compiled.artifact import CompiledArtifact, load_partitions, prepare_cached
from nnfmq.engines.compiled.attention import fuse_attention
from nnfmq.engines.compiled.deterministic import require_deterministic
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.fusion import fuse
from nnfmq.engines.compiled.guard_pages import guarded_layout
from nnfmq.engines.compiled.kernel_compilation import Compile, compile_in_process
from nnfmq.engines.compiled.kernels.movement import StridedCopy
from nnfmq.engines.compiled.layouts import changes_order, keep_nhwc
from nnfmq.engines.compiled.lowering import (
    Constant,
    KernelLaunch,
    KernelSequence,
    LoweredOp,
    LoweringRule,
    RuleCall,
    ViewOp,
    blockwise,
    dynamic,
    elementwise,
    indexing,
    movement,
    products,
    recurrent,
    reduction,
    spectrum,
)
from nnfmq.engines.compiled.memory_plan import (
    ALIGNMENT,
    ArraySpec,
    PartitionLaunch,
    PartitionPlan,
    Views,
    align,
    plan_partition,
    storage_of,
)
from nnfmq.engines.compiled.target import Target, host_target
from nnfmq.engines.interpreter import SubgraphPreparation, prepare_with
from nnfmq.engines.program import Program, StepFunction
from nnfmq.engines.steps import ResolvedOp
from nnfmq.hal.errors import GeneralFailure
from nnfmq.hal.types import LifeTime, Model, Operation, OperationType, Subgraph
from nnfmq.operations.declaration import NUMPY_TYPES, Array, Role, Shape, Tensor
from nnfmq.operations.preparation import (
    TO_NCHW,
    TO_NHWC,
    ShapedOp,
    checks_only,
    no_prepack_recording,
    permute_shape,
    split_arguments,
    tensor_of,
)
from nnfmq.operations.shapes import DATA_DEPENDENT

__all__ = ["LOWERING_RULES", "prepare"]

_NO_NUMBER = -1  # until the operation is in a partition


def _view(input: Tensor, *_: Tensor | None, output: Tensor, target: Target, **attributes: Any) -> ViewOp | None:
    """Lower an operation that only changes the shape."""
    return None if 0 in input.shape else ViewOp()


LOWERING_RULES: Mapping[OperationType, LoweringRule] = {
    OperationType.EXPAND_DIMS: _view,
    OperationType.RESHAPE: _view,
    OperationType.SQUEEZE: _view,
    **elementwise.RULES,
    **movement.RULES,
    **indexing.RULES,
    **reduction.RULES,
    **products.RULES,
    **blockwise.RULES,
    **dynamic.RULES,
    **recurrent.RULES,
    **spectrum.RULES,
    **dict.fromkeys(elementwise.VIEWS, _view),
}


def prepare(
    model: Model,
    prepacked: Sequence[tuple[Array, ...]] | None = None,
    compile: Compile = compile_in_process,
    is_deterministic: bool = False,
) -> Program:
    """Return a Program that executes the main subgraph of `model`, as `interpreter.prepare` does.

    `prepacked` is `Program.prepacked` of an earlier Program of the same model, build and target, which `prepare_cached`
    links. Otherwise `compile` compiles the kernels; an exception that it raises ends the preparation. If it
    `is_deterministic`, the program computes the same bits on every machine.

    Raises:
        GeneralFailure: As `interpreter.prepare`, or if it cannot be deterministic.
    """
    if prepacked is not None:
        return prepare_cached(model, prepacked)
    preparation = partial(CompiledPreparation, compile=compile, is_deterministic=is_deterministic, artifacts=[])
    return prepare_with(preparation, model)


@dataclass(slots=True)
class _ConstantData:
    """The constants of a program, one after the other, each at a cache line.

    Equal constants are stored once. The steps of an unrolled recurrent operation read the same weights, which then stay
    in the caches. With `guard_side` each has guard pages, see `guard_pages`.
    """

    guard_side: str | None
    offsets: dict[bytes, int] = field(default_factory=dict)
    size: int = 0
    guards: tuple[int, ...] = ()

    def add(self, constant: Constant) -> int:
        """Store a constant and return its offset."""
        data = constant if isinstance(constant, bytes) else constant()
        if data not in self.offsets:
            self.offsets[data] = self._place(len(data))
        return self.offsets[data]

    def _place(self, size: int) -> int:
        if self.guard_side is None:
            offset, self.size = self.size, self.size + align(size)
            return offset
        place = guarded_layout([size], self.guard_side, ALIGNMENT)
        begin = self.guards[-1] if self.guards else 0  # the guard behind one constant is that before the next
        self.guards = (*self.guards[:-1], *(begin + offset for offset in place.guards))
        self.size = begin + place.size
        return begin + place.offsets[0]

    def array(self) -> Array:
        """Return all constants in one array whose address is aligned to cache lines."""
        memory = np.zeros(self.size + ALIGNMENT, np.uint8)
        skip = -memory.ctypes.data % ALIGNMENT
        constants = memory[skip : skip + self.size]
        for data, offset in self.offsets.items():
            constants[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return constants


def _consecutive(
    steps: Sequence[Any], joinable: AbstractSet[int]
) -> tuple[list[tuple[list[int], StepFunction | None]], set[int]]:
    """Return the operations of each partition as `CompiledPreparation._runs`, and the views of memory outside of them.

    A view of memory outside of the arena is in a partition if `joinable` has its number.
    """
    runs: list[tuple[list[int], StepFunction | None]] = []
    outside_views: set[int] = set()
    produced: set[int] = set()  # in the arena of the last partition
    for number, step in enumerate(steps):
        partition = runs[-1][0] if runs and runs[-1][1] is None else None
        if not isinstance(step, LoweredOp):
            runs.append(([number], step))
            continue
        is_outside = step.is_view and not (partition and step.inputs[0] in produced)
        if is_outside and number not in joinable:
            runs.append(([number], step.reference))
            continue
        if partition is None:
            partition, produced = [], set()
            runs.append((partition, None))
        partition.append(number)
        if is_outside:
            outside_views.add(number)
        else:
            produced.update(step.outputs)
    return runs, outside_views


_Launch: TypeAlias = tuple[PartitionLaunch, tuple[Constant, ...]]
"""A launch without its constants, and these."""


class _PartitionSource(NamedTuple):
    """The source of a partition's plan: its launches, whose constants are not packed yet; see `plan_partition`."""

    launches: Sequence[_Launch]
    specs: Mapping[int, ArraySpec]
    views: Views
    inputs: Sequence[int]
    outputs: Sequence[int]
    results: AbstractSet[int]


_MAX_VIEWED_BYTES = 1 << 20  # of an array that stays in the arena as long as a part of it is read


def _parts_as_views(
    launches: Sequence[_Launch], specs: Mapping[int, ArraySpec], views: Views, outputs: Iterable[int]
) -> list[_Launch]:
    """Return the launches without those that copy adjacent bytes, whose outputs become `views`.

    They are of arrays that a launch writes, and begin at a cache line, as arrays do. Outputs and what they are views of
    stay copies, which are written where the caller wants them.
    """
    written = {index for launch, _ in launches for index in launch.outputs}
    kept = {storage_of(index, views)[0] for index in outputs}
    remaining = []
    for launch, constants in launches:
        parts = _copied_parts(launch)
        sources = {storage_of(index, views)[0] for index in launch.inputs}
        is_kept = not parts or not kept.isdisjoint(launch.outputs) or not sources <= written
        if not is_kept and all(specs[index].bytes <= _MAX_VIEWED_BYTES for index in launch.inputs):
            views.update(zip(launch.outputs, parts, strict=True))
        else:
            remaining.append((launch, constants))
    return remaining


def _copied_parts(launch: PartitionLaunch) -> list[tuple[int, int]]:
    """Return of which input and which byte on each output is a copy; empty if one is anything else."""
    regions = launch.kernel.regions if isinstance(launch.kernel, StridedCopy) else ()
    arguments, parts = (*launch.inputs, *launch.outputs), {}
    for region in regions:
        source = len(arguments) if region.source_arg is None else region.source_arg
        is_copy = source < len(launch.inputs) and region.lut_arg is None and region.padding_arg is None
        if region.axes or not is_copy or region.target_offset or region.source_offset % ALIGNMENT:
            return []
        parts[arguments[region.target_arg]] = arguments[source], region.source_offset
    is_whole = len(parts) == len(regions) == len(launch.outputs)
    return [parts[index] for index in launch.outputs] if is_whole else []


class CompiledPreparation(SubgraphPreparation):
    """Lowers the operations of a subgraph, forms partitions, and compiles their kernels.

    `artifacts` gets the arrays of each subgraph, in the order in which their preparation begins.
    """

    target: Target

    def __init__(
        self,
        model: Model,
        subgraph: Subgraph,
        programs: dict[int, Program],
        compile: Compile,
        is_deterministic: bool,
        artifacts: list[tuple[Array, ...]],
    ) -> None:
        super().__init__(model, subgraph, programs)
        self._compile, self._is_deterministic, self._artifacts = compile, is_deterministic, artifacts

    def preparation_of(self, subgraph: Subgraph) -> CompiledPreparation:
        """Return the preparation of a subgraph that IF or WHILE call."""
        shared = self._compile, self._is_deterministic, self._artifacts
        return CompiledPreparation(self._model, subgraph, self._programs, *shared)

    def program(self) -> Program:
        """Return the Program."""
        position = len(self._artifacts)
        self._artifacts.append(())
        self.target = host_target().deterministic if self._is_deterministic else host_target()
        self._guard_side = settings.GUARD_PAGES.value()
        self._constants = _ConstantData(self._guard_side)
        self._unchecked: list[Callable[[], object]] = []
        self._intermediate_indexes = count(len(self.subgraph.operands))
        self._artifact = CompiledArtifact((), np.empty(0, np.uint8), ())
        program = super().program()
        ranges = (range(first, last + 1) for first, last, _ in self._artifact.partitions)
        program.compiled_ops = frozenset(chain.from_iterable(ranges))
        required = sorted(self._required.intersection(self.subgraph.input_indexes))
        self._artifacts[position] = self._artifact.to_arrays(required, self._shapes)
        program.prepacked = tuple(self._artifacts)
        return program

    # -- lowering ------------------------------------------------------------------------------------------------------

    def prepare_step(self, number: int, operation: Operation) -> Any:
        """Return the lowered operation or the interpreter's step."""
        step = super().prepare_step(number, operation)
        if self._is_deterministic:
            require_deterministic(number, operation, self.subgraph.operands, isinstance(step, LoweredOp))
        return step

    def static_step(self, resolved: ResolvedOp, arguments: Sequence[Tensor | None], shaped: ShapedOp) -> Any:
        """Return the lowered operation, or the interpreter's step if no rule lowers it."""
        rule = LOWERING_RULES.get(resolved.match.declaration.code)
        found = None if rule is None else self._lower(rule, resolved, arguments, shaped.shapes)
        if found is None:
            return super().static_step(resolved, arguments, shaped)
        if found.is_view:
            with no_prepack_recording():
                return replace(found, reference=super().static_step(resolved, arguments, shaped))
        self._unchecked.append(partial(resolved.bind, shaped))
        return found

    def dynamic_step(self, resolved: ResolvedOp) -> Any:
        """Return the lowered operation if nothing but indices comes with the request, else the interpreter's step."""
        return self._lower_with_indices(resolved) or super().dynamic_step(resolved)

    def _lower_with_indices(self, resolved: ResolvedOp) -> LoweredOp | None:
        """Return an operation with indices as data; None if anything else is not known or not allowed.

        Zeros, which are in any dimension, stand for the indices where the interpreter's code infers the shapes.
        """
        found, operands = indexing.INDEX_ATTRIBUTES.get(resolved.match.declaration.code), self.subgraph.operands
        if found is None:
            return None
        parameters = [
            replace(parameter, role=Role.DATA) if parameter.name == found.name else parameter
            for parameter in resolved.match.parameters
        ]
        with_data = replace(resolved, match=replace(resolved.match, parameters=tuple(parameters)))
        if not self._is_static(with_data):
            return None
        arguments = [self._argument(index) for index in resolved.operation.inputs]
        zeros = [
            tensor_of(operands[index], tensor.shape, np.zeros(tensor.shape, tensor.dtype))
            if tensor is not None and parameter.name == found.name
            else tensor
            for (parameter, index), tensor in zip(resolved.arguments(), arguments, strict=True)
        ]
        try:
            shapes = resolved.infer_shapes(zeros).shapes
        except GeneralFailure:  # each execution raises it
            return None
        lowered = self._lower(found.rule, with_data, arguments, shapes)
        if lowered is not None:
            self._set_known(resolved, with_data.data_indexes(), shapes)
        return lowered

    def _lower(
        self, rule: LoweringRule, resolved: ResolvedOp, arguments: Sequence[Tensor | None], shapes: Sequence[Shape]
    ) -> LoweredOp | None:
        tensors, attributes, is_nchw = split_arguments(resolved.match, arguments)
        declaration = resolved.match.declaration
        outputs_nchw = is_nchw and declaration.image_outputs
        shapes = [permute_shape(shape, TO_NHWC) if outputs_nchw else shape for shape in shapes]
        outputs = tuple(tensor_of(o, shape) for o, shape in zip(resolved.outputs, shapes, strict=True))
        if any(0 in output.shape or DATA_DEPENDENT in output.shape for output in outputs):
            return None
        call = RuleCall(declaration.code, rule, tuple(tensors), outputs, attributes, self.target)
        lowered = call.lower()
        if lowered is None:
            return None
        data = [
            (parameter, index)
            for parameter, index in resolved.arguments()
            if parameter.role is Role.DATA and self.subgraph.operands[index].lifetime != LifeTime.NO_VALUE
        ]
        images = declaration.images if is_nchw else ()
        return LoweredOp(
            _NO_NUMBER,
            call,
            lowered,
            inputs=tuple(index for _, index in data),
            outputs=resolved.operation.outputs,
            reference=None,
            inputs_nchw=tuple(parameter.name in images for parameter, _ in data),
            outputs_nchw=outputs_nchw,
        )

    # -- partitioning --------------------------------------------------------------------------------------------------

    def group_steps(self, steps: Sequence[Any]) -> list[tuple[int, StepFunction]]:
        """Merge consecutive lowered operations into partitions; return each step with its last operation's number."""
        self._reader_counts = Counter(index for o in self.subgraph.operations for index in set(o.inputs))
        runs = self._runs(steps)
        sources = [(numbers[0], numbers[-1], self._source(numbers, steps)) for numbers, step in runs if step is None]
        for first, last, _ in sources:
            for number in range(first, last + 1):
                del self._step_bytes[number]  # an arena is charged as a whole
        partitions = iter(self._compiled(sources))
        return [(numbers[-1], next(partitions) if step is None else step) for numbers, step in runs]

    def _runs(self, steps: Sequence[Any]) -> list[tuple[list[int], StepFunction | None]]:
        """Return the operations of each partition, with None; and single operations with the interpreter's step.

        A view of memory outside of a partition's arena belongs to the partition if nothing else reads it; launches then
        read that memory. Otherwise it is a step of the interpreter.
        """
        joinable = {n for n, step in enumerate(steps) if isinstance(step, LoweredOp) and step.is_view}
        while True:
            runs, outside_views = _consecutive(steps, joinable)
            partitions = [numbers for numbers, step in runs if step is None]
            read_outside = set[int]().union(*map(self._read_outside, partitions))
            unsuitable = {n for n in outside_views if self._needs_value(steps[n].outputs[0], read_outside)}
            if not unsuitable:
                return runs
            joinable -= unsuitable

    def _needs_value(self, view: int, read_outside: AbstractSet[int]) -> bool:
        """Return whether a view's operand must have a value in the frame. One that nothing reads also gets it."""
        return view in read_outside or self._reader_counts[view] == 0

    def _source(self, numbers: Sequence[int], steps: Sequence[Any]) -> _PartitionSource:
        read_later = self._read_outside(numbers)
        self._made: dict[tuple[Any, ...], int] = {}  # intermediates by kernel, constants and inputs
        fused = fuse(keep_nhwc(replace(steps[number], number=number) for number in numbers), read_later)
        ops = fuse_attention(fused, read_later)
        produced = {index for op in ops for index in op.outputs}
        inputs = list(dict.fromkeys(index for op in ops for index in op.inputs if index not in produced))
        outputs = [index for op in ops for index in op.outputs if index in read_later]
        views = {op.outputs[0]: (op.inputs[0], 0) for op in ops if op.is_view}
        specs = {index: self._spec(index) for op in ops for index in (*op.inputs, *op.outputs)}
        nchw_readers = read_later.union(*(op.inputs_as_in_model() for op in ops))
        launches = [
            (self._of_operation(launch, op), constants)
            for op in ops
            for launch, constants in self._launches_of(op, specs, views, nchw_readers)
        ]
        if self._guard_side is None:
            launches = _parts_as_views(launches, specs, views, outputs)
        model_outputs = self.subgraph.output_indexes
        results = {i for i in outputs if self._reader_counts[i] == 0 and model_outputs.count(i) == 1}
        return _PartitionSource(launches, specs, views, inputs, outputs, results)

    def _of_operation(self, launch: PartitionLaunch, op: LoweredOp) -> PartitionLaunch:
        """Return a launch with the operation's number, and with its label in the errors."""
        label = f"operation {op.number} ({self.subgraph.operations[op.number].type.name})"
        errors = tuple(f"{label}: {text}" for text in launch.errors)
        return replace(launch, operation=op.number, fused=op.fused, errors=errors)

    def _plan(self, source: _PartitionSource) -> PartitionPlan:
        """Pack the constants, and plan the memory."""
        launches = [
            replace(launch, constants=tuple(map(self._constants.add, constants)))
            for launch, constants in source.launches
        ]
        return plan_partition(
            launches, source.specs, source.views, source.inputs, source.outputs, self.target, source.results,
            self._guard_side,
        )  # fmt: skip

    def _read_outside(self, numbers: Sequence[int]) -> set[int]:
        """Return the outputs of these operations that other operations or the caller read."""
        operations = [self.subgraph.operations[number] for number in numbers]
        inside = Counter(index for operation in operations for index in set(operation.inputs))
        produced = {index for operation in operations for index in operation.outputs}
        return {index for index in produced if self._reader_counts[index] > inside[index]}.union(
            self.subgraph.output_indexes
        )

    def _spec(self, index: int) -> ArraySpec:
        shape = self._shapes[index]
        assert shape is not None, "only static operations are lowered"
        return ArraySpec(NUMPY_TYPES[self.subgraph.operands[index].type], shape)

    # -- launches ------------------------------------------------------------------------------------------------------

    def _launches_of(
        self, op: LoweredOp, specs: dict[int, ArraySpec], views: Views, nchw_readers: AbstractSet[int]
    ) -> list[_Launch]:
        """Return the launches of one operation, with NCHW/NHWC conversions around them.

        ~i is the NHWC copy of operand i: converted once, and back only if `nchw_readers` has operand i. If both have
        the same elements in the same order, one becomes a view of the other.
        """
        if isinstance(op.lowered, ViewOp):
            return []
        launches: list[_Launch] = []
        inputs = [~i if nchw else i for i, nchw in zip(op.inputs, op.inputs_nchw, strict=True)]
        for nhwc in inputs:
            if nhwc not in specs:
                specs[nhwc] = specs[~nhwc].permuted(TO_NHWC)
                launches += self._conversion(~nhwc, nhwc, TO_NHWC, specs, views)
        if not op.outputs_nchw:
            return [*launches, *self._kernel_launches(op.lowered, inputs, op.outputs, specs)]
        specs.update({~index: specs[index].permuted(TO_NHWC) for index in op.outputs})
        launches += self._kernel_launches(op.lowered, inputs, [~index for index in op.outputs], specs)
        conversions = [self._conversion(~i, i, TO_NCHW, specs, views) for i in op.outputs if i in nchw_readers]
        return [*launches, *chain.from_iterable(conversions)]

    def _conversion(
        self, source: int, target: int, permutation: tuple[int, ...], specs: Mapping[int, ArraySpec], views: Views
    ) -> list[_Launch]:
        """Return the launch that permutes `source` to `target`, none if `target` becomes a view."""
        shape = specs[source].shape
        if not changes_order(shape, permutation):
            views[target] = source, 0
            return []
        launch = movement.permute_axes(shape, permutation, specs[source].dtype, self.target)
        return [self._launch(launch, [source], [target])]

    def _kernel_launches(
        self,
        lowered: KernelLaunch | KernelSequence,
        inputs: Sequence[int],
        outputs: Sequence[int],
        specs: dict[int, ArraySpec],
    ) -> list[_Launch]:
        """Return an operation's launches. Intermediates get indexes after the subgraph's operands.

        One that another operation of the partition has made of the same values is not made again: several products of
        one input quantize it once.
        """
        if isinstance(lowered, KernelLaunch):
            return [self._launch(lowered, inputs, outputs)]
        launches, readable, missing = [], list(inputs), list(outputs)
        for one in lowered.intermediates:
            key = one.launch.kernel, one.launch.constants, tuple(readable[n] for n in one.inputs)
            if not one.outputs and key in self._made:
                readable.append(self._made[key])
                continue
            index = self._made[key] = next(self._intermediate_indexes)
            specs[index] = ArraySpec(one.dtype, one.shape)
            written = [outputs[n] for n in one.outputs]
            launches.append(self._launch(one.launch, [readable[n] for n in one.inputs], [index, *written]))
            readable.append(index)
            missing = [index for index in missing if index not in written]
        return [*launches, self._launch(lowered.last, [readable[n] for n in lowered.inputs], missing)]

    def _launch(self, launch: KernelLaunch, inputs: Iterable[int], outputs: Iterable[int]) -> _Launch:
        errors = [next(self._intermediate_indexes)] if launch.errors else []
        written = (*outputs, *errors)
        made = PartitionLaunch(launch.kernel, tuple(inputs), written, (), launch.estimated_ns, errors=launch.errors)
        return made, launch.constants

    def _compiled(self, sources: Sequence[tuple[int, int, _PartitionSource]]) -> list[CompiledPartition]:
        """Compile all kernels. Meanwhile pack the constants, plan the partitions, and check the lowered operations."""
        if not sources:
            return []
        plans: list[tuple[int, int, PartitionPlan]] = []

        def plan_all() -> None:
            plans.extend((first, last, self._plan(source)) for first, last, source in sources)
            with checks_only():
                for bind in self._unchecked:  # to the interpreter's kernels, for the errors that they raise
                    bind()

        kernels = [launch.kernel for _, _, source in sources for launch, _ in source.launches]
        object_code = self._compile(kernels, self.target, plan_all)
        arrays = [np.frombuffer(code, np.uint8) for code in object_code]
        self._artifact = CompiledArtifact(plans, self._constants.array(), arrays, self._constants.guards)
        self.extra_slots = len(plans)
        return load_partitions(self._artifact, len(self.subgraph.operands))
