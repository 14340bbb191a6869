"""Preparation for the compiling engine: the interpreter's way through a model, with kernels where there are some.

Operations whose shapes and controls are known at preparation, and for which `lowering` has a kernel, are gathered into
segments; all others stay the interpreter's steps. So every rule of the reference holds here as well: the same
arguments are checked by the same code, and what no kernel computes is computed as there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from nnfmq.engines.compiled.compiled_artifact import CachedPreparation, CompiledArtifact, load_partitions
from nnfmq.engines.compiled.executor import Call, CompiledPartition, PartitionPlan, Value, plan_partition
from nnfmq.engines.compiled.jit import Compile, Kernel, compile_in_process, host_target
from nnfmq.engines.compiled.lowering import RULES, Alias, Chain, Constant, Lowered
from nnfmq.engines.compiled.lowering.data_movement_rules import turned
from nnfmq.engines.compiled.memory_plan import ALIGNMENT, aligned
from nnfmq.engines.compiled.target import Target
from nnfmq.engines.compiled.thread_pool import default_thread_pool
from nnfmq.engines.execution import StepFunction
from nnfmq.engines.interpreter import Program, ResolvedOp, SubgraphPreparation, prepare_with
from nnfmq.hal.types import LifeTime, Model, Subgraph
from nnfmq.operations.prepacked import no_prepack_recording
from nnfmq.operations.prepare import TO_NCHW, TO_NHWC, ShapedOp, permuted, split_arguments, tensor_of
from nnfmq.operations.shapes import DATA_DEPENDENT
from nnfmq.operations.signature import NUMPY_TYPES, Array, Role, Tensor

__all__ = ["prepare"]


def prepare(
    model: Model, prepacked: Sequence[tuple[Array, ...]] | None = None, compile: Compile = compile_in_process
) -> Program:
    """Return a Program that executes `model`'s main subgraph, as `interpreter.prepare`.

    `packed` has the machine code, too: nothing is generated then. It is of this build, and of this target. Otherwise
    `compile` makes it, and what that raises ends the preparation.
    """
    if prepacked is None:
        return prepare_with(partial(CompiledPreparation, compile=compile), model)
    restoring = partial(CachedPreparation, arrays=prepacked[0], target=host_target(), team=default_thread_pool())
    return prepare_with(restoring, model, prepacked[1:])


@dataclass(frozen=True, slots=True)
class _Generated:
    """An operation that a kernel computes, in the place of its step.

    Kernels only know NHWC: `turned_inputs` and `turned_outputs` say which operands the model has in NCHW.
    """

    lowered: Lowered | Chain | Alias
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    reference: StepFunction | None  # of what only renames: elsewhere than in an arena the interpreter does that
    turned_inputs: tuple[bool, ...]
    turned_outputs: bool

    def plain_inputs(self) -> list[int]:
        """Return the inputs that are read as the model has them."""
        return [index for index, turned in zip(self.inputs, self.turned_inputs, strict=True) if not turned]


@dataclass(slots=True)
class _Constants:
    """All constants of a program, one after the other."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, data: bytes) -> int:
        """Return the offset of `data`."""
        offset = self.size
        padding = aligned(len(data)) - len(data)
        self.parts += [data, bytes(padding)]
        self.size += len(data) + padding
        return offset

    def array(self) -> Array:
        """Return them at a cache line."""
        memory = np.zeros(self.size + ALIGNMENT, np.uint8)
        skip = -memory.ctypes.data % ALIGNMENT
        joined = np.frombuffer(b"".join(self.parts), np.uint8)
        memory[skip : skip + self.size] = joined
        return memory[skip : skip + self.size]


def _bytes_of(constant: Constant) -> bytes:
    return constant if isinstance(constant, bytes) else constant()


class CompiledPreparation(SubgraphPreparation):
    """The way from a subgraph to its Program."""

    target: Target

    def __init__(self, model: Model, subgraph: Subgraph, programs: dict[int, Program], compile: Compile) -> None:
        super().__init__(model, subgraph, programs)
        self._compile = compile

    def program(self) -> Program:
        """Bind all operations."""
        self.target = host_target()
        self._constants = _Constants()
        self._kernels: list[Kernel] = []
        self._between = count(len(self.subgraph.operands))
        self._parts = CompiledArtifact((), np.empty(0, np.uint8), ())
        program = super().program()
        program.compiled_ops = frozenset(n for first, last, _ in self._parts.groups for n in range(first, last + 1))
        required = sorted(self._required.intersection(self.subgraph.input_indexes))
        program.prepacked = (self._parts.to_arrays(required, self._shapes),)
        return program

    def static_step(self, bound: ResolvedOp, arguments: Sequence[Tensor | None], fitted: ShapedOp) -> Any:
        """Return the operation's kernel, if there is one."""
        rule = RULES.get(bound.match.declaration.code)
        if rule is not None:
            found = self._lowered(rule, bound, arguments, fitted)
            if found is not None:
                return found
        return super().static_step(bound, arguments, fitted)

    def _lowered(
        self, rule: Any, bound: ResolvedOp, arguments: Sequence[Tensor | None], fitted: ShapedOp
    ) -> _Generated | None:
        tensors, attributes, nchw = split_arguments(bound.match, arguments)
        declaration = bound.match.declaration
        given = [(p, i) for p, i in bound.arguments() if p.role is Role.DATA and not self._is_omitted(i)]
        turns = nchw and declaration.image_outputs
        shapes = [permuted(shape, TO_NHWC) if turns else shape for shape in fitted.shapes]
        outputs = tuple(tensor_of(o, shape) for o, shape in zip(bound.outputs, shapes, strict=True))
        if any(0 in output.shape or DATA_DEPENDENT in output.shape for output in outputs):
            return None
        lowered = rule(*tensors, output=outputs[0] if len(outputs) == 1 else outputs, target=self.target, **attributes)
        if lowered is None:
            return None
        with no_prepack_recording():
            step = super().static_step(bound, arguments, fitted)  # also for what it refuses
        reference = step if isinstance(lowered, Alias) else None
        images = declaration.images if nchw else ()
        data, turned = tuple(index for _, index in given), tuple(p.name in images for p, _ in given)
        return _Generated(lowered, data, bound.operation.outputs, reference, turned, turns)

    def _is_omitted(self, index: int) -> bool:
        return self.subgraph.operands[index].lifetime == LifeTime.NO_VALUE

    def group_steps(self, steps: Sequence[Any]) -> list[tuple[int, StepFunction]]:
        """Gather neighbours that kernels compute; return each step with the number of its last operation."""
        gathered: list[
            tuple[list[int], StepFunction | None]
        ] = []  # operations, and their step where it is the interpreter's
        made: set[int] = set()  # by the group that is last
        for number, step in enumerate(steps):
            group = gathered[-1][0] if gathered and gathered[-1][1] is None else None
            if not isinstance(step, _Generated):
                gathered.append(([number], step))
                continue
            if isinstance(step.lowered, Alias) and not (group and step.inputs[0] in made):
                gathered.append(([number], step.reference))  # what it renames is not in an arena
                continue
            if group is None:
                group, made = [], set()
                gathered.append((group, None))
            group.append(number)
            made.update(step.outputs)
        groups = [numbers for numbers, step in gathered if step is None]
        self._readers = Counter(index for o in self.subgraph.operations for index in set(o.inputs))
        plans = [(numbers[0], numbers[-1], self._plan(numbers, steps)) for numbers in groups]
        segments = iter(self._linked(plans))
        return [(numbers[-1], next(segments) if step is None else step) for numbers, step in gathered]

    def _plan(self, numbers: Sequence[int], steps: Sequence[Any]) -> PartitionPlan:
        compiled_ops = [steps[number] for number in numbers]
        made = {index for one in compiled_ops for index in one.outputs}
        read_later = self._read_outside(numbers)
        inputs = list(dict.fromkeys(index for one in compiled_ops for index in one.inputs if index not in made))
        outputs = [index for one in compiled_ops for index in one.outputs if index in read_later]
        aliases = {one.outputs[0]: one.inputs[0] for one in compiled_ops if isinstance(one.lowered, Alias)}
        values = {index: self._value(index) for one in compiled_ops for index in (*one.inputs, *one.outputs)}
        plain = read_later.union(*(one.plain_inputs() for one in compiled_ops))
        calls = self._calls(numbers, compiled_ops, values, plain)
        return plan_partition(calls, values, aliases, inputs, outputs, self.target)

    def _calls(
        self,
        numbers: Sequence[int],
        compiled_ops: Sequence[_Generated],
        values: dict[int, Value],
        plain: AbstractSet[int],
    ) -> list[Call]:
        """Return the kernels of all operations, each with its operation's number."""
        pairs = zip(numbers, compiled_ops, strict=True)
        return [replace(call, operation=n) for n, one in pairs for call in self._calls_of(one, values, plain)]

    def _calls_of(self, one: _Generated, values: dict[int, Value], plain: AbstractSet[int]) -> list[Call]:
        """Return the kernels of one operation, around them those that turn images.

        The NHWC twin of operand i is ~i. It is made once, and what nobody reads in NCHW (is not in `plain`) stays NHWC.
        """
        if isinstance(one.lowered, Alias):
            return []
        calls: list[Call] = []
        inputs = [~i if turned else i for i, turned in zip(one.inputs, one.turned_inputs, strict=True)]
        for twin in inputs:
            if twin not in values:
                values[twin] = values[~twin].permuted(TO_NHWC)
                calls.append(self._turning(~twin, twin, TO_NHWC, values))
        if not one.turned_outputs:
            return [*calls, *self._stages(one.lowered, inputs, one.outputs, values)]
        values.update({~index: values[index].permuted(TO_NHWC) for index in one.outputs})
        calls += self._stages(one.lowered, inputs, [~index for index in one.outputs], values)
        return [*calls, *(self._turning(~i, i, TO_NCHW, values) for i in one.outputs if i in plain)]

    def _stages(
        self, lowered: Lowered | Chain, inputs: Sequence[int], outputs: Sequence[int], values: dict[int, Value]
    ) -> list[Call]:
        """Return an operation's kernels; what they make for each other are operands behind the subgraph's."""
        if isinstance(lowered, Lowered):
            return [self._call(lowered, inputs, outputs)]
        calls, known, missing = [], list(inputs), list(outputs)
        for stage in lowered.stages:
            made = next(self._between)
            values[made] = Value(stage.dtype, stage.shape)
            also = [outputs[n] for n in stage.outputs]
            calls.append(self._call(stage.lowered, [known[n] for n in stage.inputs], [made, *also]))
            known.append(made)
            missing = [index for index in missing if index not in also]
        return [*calls, self._call(lowered.last, [known[n] for n in lowered.inputs], missing)]

    def _turning(self, source: int, made: int, order: tuple[int, ...], values: Mapping[int, Value]) -> Call:
        lowered = turned(values[source].shape, order, values[source].dtype, self.target)
        return self._call(lowered, [source], [made])

    def _read_outside(self, numbers: Sequence[int]) -> set[int]:
        """Return what these operations make that others, or the model's client, read."""
        operations = [self.subgraph.operations[number] for number in numbers]
        within = Counter(index for operation in operations for index in set(operation.inputs))
        made = {index for operation in operations for index in operation.outputs}
        return {index for index in made if self._readers[index] > within[index]}.union(self.subgraph.output_indexes)

    def _value(self, index: int) -> Value:
        shape = self._shapes[index]
        assert shape is not None, "only static operations are generated"
        return Value(NUMPY_TYPES[self.subgraph.operands[index].type], shape)

    def _call(self, lowered: Lowered, inputs: Sequence[int], outputs: Sequence[int]) -> Call:
        places = tuple(self._constants.add(_bytes_of(constant)) for constant in lowered.constants)
        self._kernels.append(lowered.kernel)
        return Call(lowered.kernel, tuple(inputs), tuple(outputs), places, lowered.work)

    def _linked(self, plans: Sequence[tuple[int, int, PartitionPlan]]) -> list[CompiledPartition]:
        if not plans:
            return []
        codes = self._compile(self._kernels, self.target)
        self._parts = CompiledArtifact(
            plans, self._constants.array(), [np.frombuffer(code, np.uint8) for code in codes]
        )
        self.extra_slots = len(plans)
        return load_partitions(self._parts, self.target, default_thread_pool(), len(self.subgraph.operands))
