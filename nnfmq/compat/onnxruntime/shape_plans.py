"""Models prepared for the shapes of inputs: each combination that a session meets is imported and prepared once.

If a model cannot be imported because shapes or conditions depend on the values of small inputs, such as a sampling rate
or a scale, these values are constants of each import, too.

A prepared model has bursts, each for one thread at a time. The plans that were used last are kept; the others are
closed when no thread uses them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnfmq.compat.shared_client import DriverShare
from nnfmq.hal.errors import InvalidArgument

if TYPE_CHECKING:
    from nnfmq.client.burst.burst import ModelBurst
    from nnfmq.client.model.compiled_model import CompiledModel
    from nnfmq.importers import LoadedModel

__all__ = ["MAX_PLANS", "Array", "ModelBursts", "OutputForm", "ShapePlan", "ShapePlans", "bindings"]

Array: TypeAlias = npt.NDArray[Any]
PlanKey: TypeAlias = tuple[Any, ...]
"""The shape of each input, in order, and the bytes of those that are bound by value."""
Import: TypeAlias = "Callable[[Sequence[Array], Sequence[int]], LoadedModel]"
"""Imports a model for inputs like these, with the values of those at certain places."""
MAX_PLANS = 8
"""How many combinations of shapes a session keeps prepared."""
_MAX_VALUES = 16  # elements of an input that may be bound by value


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The properties of an output that only the file has, not the HAL's model: int64 elements (None = unknown)."""

    dtype: np.dtype[Any] | None

    def copy(self, found: Array) -> Array:
        """Return a copy of an output, in this form."""
        return found.astype(self.dtype or found.dtype)


class ModelBursts:
    """A prepared model and its bursts that no thread uses. Thread-safe."""

    def __init__(self, share: DriverShare, model: CompiledModel, polling_window_us: float | None) -> None:
        self._share = share
        self._polling_window_us = polling_window_us
        self._model = share.adopt(model)
        self._free: deque[ModelBurst] = deque()
        self.is_retired = False

    def _take(self) -> ModelBurst:
        try:
            return self._free.pop()
        except IndexError:
            return self._share.adopt(self._model.burst(polling_window_us=self._polling_window_us))

    def _release(self, burst: ModelBurst) -> None:
        self._free.append(burst)
        if self.is_retired:
            self._close_free()

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


class ShapePlan(ModelBursts):
    """A model prepared for certain shapes, and its bursts that no thread uses. Thread-safe."""

    def __init__(
        self,
        share: DriverShare,
        loaded: LoadedModel,
        kept: Sequence[int],
        forms: Sequence[OutputForm],
        polling_window_us: float | None,
    ) -> None:
        _require_kinds(loaded, forms)
        super().__init__(share, share.client().prepare(loaded), polling_window_us)
        self._forms = forms
        self._kept = tuple(kept)  # places of the inputs that are not bound by value
        dtypes = [(place, np.dtype(info.dtype)) for place, info in enumerate(loaded.inputs)]
        self._numbers = [(place, dtype) for place, dtype in dtypes if dtype.kind in "iuf"]

    def execute(self, inputs: list[Array], outputs: Sequence[int]) -> list[Array]:
        """Return copies of the outputs with these indexes; blocks.

        Raises:
            InvalidArgument: If an integer exceeds the element type that the driver computes with.
            NnfmqError: As `Burst.execute`.
        """
        if len(inputs) != len(self._kept):
            inputs = [inputs[place] for place in self._kept]
        for place, dtype in self._numbers:
            if inputs[place].dtype != dtype:
                inputs[place] = _narrowed(inputs[place], dtype)
        burst = self._take()
        try:
            found = burst.execute(*inputs, out=burst.outputs)
            return [self._forms[index].copy(found[index]) for index in outputs]
        finally:
            self._release(burst)


def _require_kinds(loaded: LoadedModel, forms: Sequence[OutputForm]) -> None:
    """Require that no output is declared as integers and computed as floats, or the other way round.

    Raises:
        InvalidArgument: If one is: the file is invalid.
    """
    for info, form in zip(loaded.outputs, forms, strict=True):
        kinds = {np.dtype(info.dtype).kind, "V" if form.dtype is None else form.dtype.kind}
        if "f" in kinds and not kinds.isdisjoint("iub"):
            raise InvalidArgument(f"output {info.name!r} is declared as {form.dtype}, and computed as {info.dtype}")


def _narrowed(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return the numbers of `array` in another type. Raises InvalidArgument if an integer exceeds it."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return array.astype(dtype)
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
        import_for: Import,
        forms: Sequence[OutputForm],
        polling_window_us: float | None = None,
    ) -> None:
        self._share = share
        self._polling_window_us = polling_window_us
        self._import_for = import_for
        self._forms = forms
        self._lock = threading.Lock()
        self._bound: tuple[int, ...] = ()  # places of the inputs that are bound by value
        self._plans: OrderedDict[PlanKey, ShapePlan] = OrderedDict()

    def key_of(self, inputs: Sequence[Array]) -> PlanKey:
        """Return the key of the plan for inputs like these."""
        shapes = tuple([array.shape for array in inputs])
        return (*shapes, *(inputs[place].tobytes() for place in self._bound)) if self._bound else shapes

    def get(self, key: PlanKey) -> ShapePlan | None:
        """Return the plan for inputs with this key if there is one."""
        plan = self._plans.get(key)
        if plan is not None and len(self._plans) > 1:
            with self._lock:
                if key in self._plans:
                    self._plans.move_to_end(key)
        return plan

    def make(self, inputs: Sequence[Array], *, may_bind: bool = True) -> ShapePlan:
        """Return the plan for inputs like these, which is made if there is none; blocks.

        Raises:
            InvalidArgument: If the model cannot be imported for them.
            NnfmqError: The error of the preparation.
        """
        with self._lock:
            plan = self._plans.get(self.key_of(inputs))
            if plan is None:
                loaded = self._import(inputs, may_bind)
                kept = [place for place in range(len(inputs)) if place not in self._bound]
                plan = ShapePlan(self._share, loaded, kept, self._forms, self._polling_window_us)
                self._plans[self.key_of(inputs)] = plan
                if len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)[1].retire()
        return plan

    def _import(self, inputs: Sequence[Array], may_bind: bool) -> LoadedModel:
        try:
            return self._import_for(inputs, self._bound)
        except InvalidArgument:
            choices = bindings(inputs)
            if self._bound or not may_bind or not choices:
                raise
            for places in choices[:-1]:
                with suppress(InvalidArgument):
                    return self._bind(inputs, places)
            return self._bind(inputs, choices[-1])

    def _bind(self, inputs: Sequence[Array], places: tuple[int, ...]) -> LoadedModel:
        loaded = self._import_for(inputs, places)
        self._bound = places
        return loaded

    def retire(self) -> None:
        """Retire all plans."""
        with self._lock:
            plans, self._plans = self._plans, OrderedDict()
        for plan in plans.values():
            plan.retire()

    def discard(self, key: PlanKey, plan: ShapePlan) -> None:
        """Retire a plan, for instance because the driver has died."""
        with self._lock:
            if self._plans.get(key) is plan:
                del self._plans[key]
        plan.retire()


def bindings(inputs: Sequence[Array]) -> list[tuple[int, ...]]:
    """Return the places of inputs that may be bound by value, in the order in which imports try them.

    These are small integers and arrays without elements; and these with small floats, but not the first input, which
    is the data.
    """
    small = [place for place, array in enumerate(inputs) if array.ndim <= 1 and array.size <= _MAX_VALUES]
    empty = {place for place, array in enumerate(inputs) if not array.size}
    integers = tuple(sorted(empty.union(place for place in small if inputs[place].dtype.kind in "iub")))
    floats = {place for place in small if place and inputs[place].dtype.kind in "fV"}
    numbers = tuple(sorted({place for place in integers if place}.union(floats)))
    return [places for places in dict.fromkeys((integers, numbers)) if places]
