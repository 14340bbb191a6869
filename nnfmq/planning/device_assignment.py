"""DeviceAssignment: the device for each operation of a model, by what devices support and by their performance info.

The rules are those of Android's NNAPI runtime: the lowest time or power for the type of the first operand decides, a
tie goes to the CPU device, and otherwise to the first of the list. Transfers between devices cost nothing in this
model. IF and WHILE that go to the CPU device are interpreted by the runtime, so that their subgraphs may use several
devices; they stay whole if everything inside them goes to the CPU device too, because that saves a call of the driver
per subgraph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec import Struct

from nnfmq.hal.capabilities import UNKNOWN_PERFORMANCE, Capabilities, PerformanceInfo
from nnfmq.hal.errors import InvalidArgument, NnfmqError, UnsupportedModel
from nnfmq.hal.extensions import is_extension
from nnfmq.hal.summaries import code_name, listed
from nnfmq.hal.types import (
    DEFAULT_PREFERENCE,
    ExecutionPreference,
    Model,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)
from nnfmq.operations.control_flow import FIRST_OUTER_INPUT, callee_indexes, require_nesting
from nnfmq.planning.plan import MAIN, PlanningDevice, subgraph_of
from nnfmq.planning.sub_models import MetaModel, NeededLevels

__all__ = ["INTERPRETED", "Choose", "DeviceAssignment", "PlanOptions"]

INTERPRETED = -1
"""In place of a device's index: the runtime interprets this IF or WHILE."""

Choose: TypeAlias = Callable[[int, int, Sequence[int]], int]
"""Called with a subgraph, an operation, and the indexes of the devices that can execute it; returns one of these."""

_SHOWN_OPERATIONS = 5
_log = logging.getLogger("nnfmq.plan")


class PlanOptions(Struct, frozen=True):
    """The options of planning a model.

    Attributes:
        preference: LOW_POWER compares power consumption, the others execution times.
        is_explicit: The application chose the devices itself. Only messages depend on it.
        strict_slicing: Ask devices only about models that pass the full validation for their interface.
        choose: Replaces the comparison of performance info: for tests of forced partitions.
    """

    preference: ExecutionPreference = DEFAULT_PREFERENCE
    is_explicit: bool = False
    strict_slicing: bool = False
    choose: Choose | None = None


class DeviceAssignment:
    """The choice for one model. Each device is queried once about each subgraph for which that is needed.

    Raises:
        InvalidArgument: If IF and WHILE are nested too deep.
    """

    def __init__(self, model: Model, devices: Sequence[PlanningDevice], options: PlanOptions) -> None:
        require_nesting(model)
        self._model, self._devices, self._options = model, devices, options
        self._levels = NeededLevels(model)
        self._meta_models: dict[int, MetaModel] = {}
        self._supported: dict[tuple[int, int], Sequence[bool]] = {}
        self._taken: dict[tuple[int, int], bool] = {}  # device and referenced subgraph
        self._chosen: dict[int, tuple[int, ...]] = {}
        self._performance = [
            _Performance(device.capabilities, model, options.preference == ExecutionPreference.LOW_POWER)
            for device in devices
        ]
        self._cpu = next((index for index, device in enumerate(devices) if device.is_cpu), None)

    def of(self, subgraph: int) -> tuple[int, ...]:
        """Return a device's index, or INTERPRETED, for each operation of a subgraph; blocks while devices are asked.

        Raises:
            UnsupportedModel: If no device can execute an operation of the subgraph, or of one that it calls.
        """
        if subgraph not in self._chosen:
            graph = subgraph_of(self._model, subgraph)
            candidates = [self._candidates(subgraph, graph, index) for index in range(len(graph.operations))]
            nobody = [index for index, found in enumerate(candidates) if not found]
            if nobody:
                raise UnsupportedModel(self._unsupported(subgraph, graph, nobody))
            self._chosen[subgraph] = tuple(
                self._best(subgraph, graph, index, found) for index, found in enumerate(candidates)
            )
        return self._chosen[subgraph]

    # -- what devices support ------------------------------------------------------------------------------------------

    def _candidates(self, subgraph: int, graph: Subgraph, index: int) -> list[int]:
        operation = graph.operations[index]
        devices = range(len(self._devices))
        if operation.type not in FIRST_OUTER_INPUT:
            return [device for device in devices if self._supports(device, subgraph)[index]]
        # The runtime can interpret it in place of the CPU device. No device was asked about it if a size is unknown.
        return [device for device in devices if device == self._cpu or self._takes_whole(device, subgraph, index)]

    def _takes_whole(self, device: int, subgraph: int, index: int) -> bool:
        """Return whether a device supports an IF or WHILE and everything in the subgraphs that it calls."""
        graph = subgraph_of(self._model, subgraph)
        callees = callee_indexes(graph, graph.operations[index])
        return self._supports(device, subgraph)[index] and all(self._takes_all(device, callee) for callee in callees)

    def _takes_all(self, device: int, callee: int) -> bool:
        """Return whether a device supports all operations of a referenced subgraph, and what these call."""
        found = self._taken.get((device, callee))
        if found is None:
            operations = self._model.referenced[callee].operations
            nested = (index for index, operation in enumerate(operations) if operation.type in FIRST_OUTER_INPUT)
            found = all(self._supports(device, callee + 1)) and all(
                self._takes_whole(device, callee + 1, index) for index in nested
            )
            self._taken[device, callee] = found
        return found

    def _supports(self, device: int, subgraph: int) -> Sequence[bool]:
        """Return which operations of a subgraph the device supports; none if it fails or breaks the rules."""
        found = self._supported.get((device, subgraph))
        if found is None:
            found = self._supported[device, subgraph] = self._query(self._devices[device], subgraph)
        return found

    def _query(self, device: PlanningDevice, subgraph: int) -> Sequence[bool]:
        count = len(subgraph_of(self._model, subgraph).operations)
        part = self._meta_model(subgraph).slice(device.feature_level)
        if part is None:
            return [False] * count
        try:
            supported = device.supported_operations(part.model)
        except NnfmqError as error:
            _log.warning("device %r is not used: asked which operations it supports, it failed: %s", device.name, error)
            return [False] * count
        if len(supported) != len(part.operations):
            counts = len(supported), len(part.operations)
            _log.warning("device %r is not used: it replied for %d operations of %d", device.name, *counts)
            return [False] * count
        return part.supported_in_source(supported, count)

    def _meta_model(self, subgraph: int) -> MetaModel:
        found = self._meta_models.get(subgraph)
        if found is None:
            found = MetaModel(self._model, self._levels, subgraph, self._options.strict_slicing)
            self._meta_models[subgraph] = found
        return found

    # -- the best of them ----------------------------------------------------------------------------------------------

    def _best(self, subgraph: int, graph: Subgraph, index: int, candidates: Sequence[int]) -> int:
        operation = graph.operations[index]
        if self._options.choose is not None:
            best = self._options.choose(subgraph, index, candidates)
            if best not in candidates:
                raise InvalidArgument(f"operation {index} was forced to device {best}; those that can: {candidates}")
        else:
            best = min(candidates, key=lambda device: self._rank(device, graph, operation))
        if best == self._cpu and operation.type in FIRST_OUTER_INPUT and not self._stays_whole(subgraph, graph, index):
            return INTERPRETED
        return best

    def _rank(self, device: int, graph: Subgraph, operation: Operation) -> tuple[float, bool]:
        return self._performance[device].of_operation(graph, operation), device != self._cpu

    def _stays_whole(self, subgraph: int, graph: Subgraph, index: int) -> bool:
        """Return whether the CPU device takes all of an IF or WHILE that was given to it."""
        assert self._cpu is not None, "the operation was given to the CPU device"
        operation = graph.operations[index]
        callees = [self.of(callee + 1) for callee in callee_indexes(graph, operation)]
        if any(device != self._cpu for chosen in callees for device in chosen):
            return False
        return self._takes_whole(self._cpu, subgraph, index)

    # -- when there is none --------------------------------------------------------------------------------------------

    def _unsupported(self, subgraph: int, graph: Subgraph, nobody: Sequence[int]) -> str:
        where = "" if subgraph == MAIN else f" of referenced subgraph {subgraph - 1}"
        operations = listed([_described(graph, index) for index in nobody[:_SHOWN_OPERATIONS]], len(nobody))
        names = ", ".join(device.name for device in self._devices)
        remedy = self._remedy(graph, nobody)
        return f"no device can execute operation{'s' * (len(nobody) > 1)} {operations}{where}; asked: {names}{remedy}"

    def _remedy(self, graph: Subgraph, nobody: Sequence[int]) -> str:
        codes = [graph.operations[index].type for index in nobody]
        if any(is_extension(code) or code == OperationType.OEM_OPERATION for code in codes):
            return ". Operations of extensions need a device of their vendor"
        if self._options.is_explicit and self._cpu is None:
            return ". Add nnapi-reference to the list of devices, or choose no devices"
        return ""


def _described(graph: Subgraph, index: int) -> str:
    operation = graph.operations[index]
    types = [code_name(graph.operands[i].type) for i in operation.inputs[:_SHOWN_OPERATIONS]]
    return f"{index} ({code_name(operation.type)} of {listed(types, len(operation.inputs))})"


class _Performance:
    """The performance info of one device for the operations of one model: lower is better."""

    def __init__(self, capabilities: Capabilities, model: Model, is_low_power: bool) -> None:
        self._capabilities, self._model, self._is_low_power = capabilities, model, is_low_power
        self._by_type = {entry.type: self._value(entry.info) for entry in capabilities.operand_performance}
        if model.relax_computation_float32_to_float16:
            self._by_type[OperandType.FLOAT32] = self._value(capabilities.relaxed_float32_to_float16_scalar)
            self._by_type[OperandType.TENSOR_FLOAT32] = self._value(capabilities.relaxed_float32_to_float16_tensor)
        self._unknown = self._value(UNKNOWN_PERFORMANCE)
        self._sums: dict[int, float] = {}

    def of_operation(self, graph: Subgraph, operation: Operation) -> float:
        """Return the time or power of an operation of a subgraph: of an IF or WHILE with what it calls."""
        if operation.type == OperationType.IF:
            return self._value(self._capabilities.if_performance) + self._sum_of_callees(graph, operation) / 2
        if operation.type == OperationType.WHILE:
            return self._value(self._capabilities.while_performance) + self._sum_of_callees(graph, operation)
        if not operation.inputs:
            return self._unknown
        return self._by_type.get(graph.operands[operation.inputs[0]].type, self._unknown)

    def _sum_of_callees(self, graph: Subgraph, operation: Operation) -> float:
        return sum(self._of_subgraph(callee) for callee in callee_indexes(graph, operation))

    def _of_subgraph(self, callee: int) -> float:
        if callee not in self._sums:
            graph = self._model.referenced[callee]
            self._sums[callee] = sum(self.of_operation(graph, operation) for operation in graph.operations)
        return self._sums[callee]

    def _value(self, info: PerformanceInfo) -> float:
        return info.power_usage if self._is_low_power else info.exec_time
