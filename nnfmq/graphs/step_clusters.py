"""StepClusters: the step of an execution plan in which an operation is executed, and how a graph shows that."""

from __future__ import annotations

from typing import NamedTuple

from nnfmq.execution_plan.plan import ExecutionPlan, ExecutionStep, IfStep, WhileStep

__all__ = ["COLOURS", "INTERPRETED", "NO_CLUSTER", "StepCluster", "StepClusters"]

COLOURS = ("#6ba3e8", "#f0a35e", "#7cc07c", "#c99be0", "#e88585", "#62c2c8", "#d6bf57", "#a9a9a9")
"""The colours of devices, in the order of the plan; the last one is that of all further devices."""

INTERPRETED = "the runtime"


class StepCluster(NamedTuple):
    """Where an operation is executed. `step` is a name for Graphviz, empty without a plan; `device` its number.

    `device` is -1 if the runtime interprets the operation, IF or WHILE, itself.
    """

    step: str
    label: str
    device: int

    @property
    def fill(self) -> str:
        """The attributes that fill the operation's box with the device's colour; each begins with a space."""
        if not self.step or self.device < 0:
            return ""
        return f' style=filled fillcolor="{COLOURS[min(self.device, len(COLOURS) - 1)]}"'


NO_CLUSTER = StepCluster("", "", -1)


class StepClusters:
    """The clusters of the operations of a model. Without a plan, or for an operation that it lacks, there are none."""

    def __init__(self, plan: ExecutionPlan | None) -> None:
        self._clusters: dict[tuple[int, int], StepCluster] = {}
        for number, step in enumerate(() if plan is None else plan.steps):
            if isinstance(step, ExecutionStep):
                assert plan is not None
                cluster = StepCluster(
                    f"step{number}", f"step {number}: {_escaped(plan.devices[step.device])}", step.device
                )
                self._clusters |= {(step.subgraph, operation): cluster for operation in step.operations}
            elif isinstance(step, IfStep | WhileStep):
                self._clusters[step.subgraph, step.operation] = StepCluster(
                    f"step{number}", f"step {number}: {INTERPRETED}", -1
                )

    def of(self, subgraph: int, operation: int) -> StepCluster:
        """Return the cluster of an operation of a subgraph; MAIN = 0."""
        return self._clusters.get((subgraph, operation), NO_CLUSTER)


def _escaped(text: str) -> str:
    """Return text for a label in quotation marks: a driver has chosen the device's name."""
    return text.replace("\\", "\\\\").replace('"', '\\"')
