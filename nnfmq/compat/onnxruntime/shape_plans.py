"""Models prepared for the shapes of inputs: each combination that a session meets is imported and prepared once.

A prepared model has bursts, each for one thread at a time. The plans that were used last are kept; the others are
closed when no thread uses them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.compat.shared_client import DriverShare
from nnfmq.hal.errors import InvalidArgument
from nnfmq.importers import LoadedModel
from nnfmq.runtime.burst_controller import Burst

__all__ = ["Array", "OutputForm", "ShapePlan", "ShapePlans", "Shapes"]

Array: TypeAlias = npt.NDArray[Any]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""The shape of each input, in order."""
MAX_PLANS = 8
"""How many combinations of shapes a session keeps prepared."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What the file says of an output and the HAL's model does not: int64 elements (None = unknown), and rank 0."""

    dtype: np.dtype[Any] | None
    is_scalar: bool

    def copy(self, found: Array) -> Array:
        """Return a copy of an output, in this form."""
        array = found.astype(self.dtype or found.dtype)
        return array.reshape(()) if self.is_scalar and array.size == 1 else array


class ShapePlan:
    """A model prepared for certain shapes, and its bursts that no thread uses. Thread-safe."""

    def __init__(
        self, share: DriverShare, loaded: LoadedModel, forms: Sequence[OutputForm], polling_window_us: float | None
    ) -> None:
        self._share = share
        self._polling_window_us = polling_window_us
        self._model = share.adopt(share.client().prepare(loaded))
        self._forms = forms
        dtypes = [(place, np.dtype(info.dtype)) for place, info in enumerate(loaded.inputs)]
        self._integers = [(place, dtype) for place, dtype in dtypes if dtype.kind in "iu"]
        self._free: deque[Burst] = deque()
        self.is_retired = False

    def execute(self, inputs: list[Array], outputs: Sequence[int]) -> list[Array]:
        """Return copies of the outputs with these indexes; blocks.

        Raises:
            InvalidArgument: If an integer exceeds the element type that the driver computes with.
            NnfmqError: As `Burst.execute`.
        """
        for place, dtype in self._integers:
            if inputs[place].dtype != dtype:
                inputs[place] = _narrowed(inputs[place], dtype)
        burst = self._take()
        try:
            found = burst.execute(*inputs, out=burst.outputs)
            return [self._forms[index].copy(found[index]) for index in outputs]
        finally:
            self._free.append(burst)
            if self.is_retired:
                self._close_free()

    def _take(self) -> Burst:
        try:
            return self._free.pop()
        except IndexError:
            return self._share.adopt(self._model.burst(polling_window_us=self._polling_window_us))

    def retire(self) -> None:
        """Close the model and its bursts, those in use as soon as they are not."""
        self.is_retired = True
        self._share.discard(self._model)
        self._close_free()

    def _close_free(self) -> None:
        while self._free:
            try:
                burst = self._free.pop()
            except IndexError:  # another thread has taken the last one
                return
            self._share.discard(burst)


def _narrowed(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return the integers of `array` in another type. Raises InvalidArgument if one of them exceeds it."""
    limits = np.iinfo(dtype)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise InvalidArgument(
            f"an input of type {array.dtype} has values beyond {dtype}, with which the driver computes"
        )
    return array.astype(dtype)


class ShapePlans:
    """The plans of a session by the shapes of its inputs. Thread-safe; one thread makes plans at a time."""

    def __init__(
        self,
        share: DriverShare,
        import_for: Callable[[Shapes], LoadedModel],
        forms: Sequence[OutputForm],
        polling_window_us: float | None = None,
    ) -> None:
        self._share = share
        self._polling_window_us = polling_window_us
        self._import_for = import_for
        self._forms = forms
        self._lock = threading.Lock()
        self._plans: OrderedDict[Shapes, ShapePlan] = OrderedDict()

    def get(self, shapes: Shapes) -> ShapePlan | None:
        """Return the plan for inputs of these shapes if there is one."""
        plan = self._plans.get(shapes)
        if plan is not None and len(self._plans) > 1:
            with self._lock:
                if shapes in self._plans:
                    self._plans.move_to_end(shapes)
        return plan

    def make(self, shapes: Shapes) -> ShapePlan:
        """Return the plan for inputs of these shapes, which is made if there is none; blocks.

        Raises:
            InvalidArgument: If the model cannot be imported for them.
            NnfmqError: The error of the preparation.
        """
        with self._lock:
            plan = self._plans.get(shapes)
            if plan is None:
                loaded = self._import_for(shapes)
                plan = ShapePlan(self._share, loaded, self._forms, self._polling_window_us)
                self._plans[shapes] = plan
                if len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)[1].retire()
        return plan

    def discard(self, shapes: Shapes, plan: ShapePlan) -> None:
        """Retire a plan, for instance because the driver has died."""
        with self._lock:
            if self._plans.get(shapes) is plan:
                del self._plans[shapes]
        plan.retire()
