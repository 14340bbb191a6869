"""PlanHandle: a model on several devices as every execution mode uses it, as ModelHandle is one on a single device."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nnfmq.base.memory import Memory
from nnfmq.base.ownership import Uncopyable
from nnfmq.client import fallback_thread
from nnfmq.client.model.handle import ModelFallback, ModelHandle
from nnfmq.client.observation import ObservedModel
from nnfmq.client.partitioned.memory import ArrayArguments, ExecutionMemory, constant_locations, value_locations
from nnfmq.client.partitioned.plan import BoundCall, BoundIf, BoundPlan, BoundWhile, bind_plan
from nnfmq.hal.errors import BadState, InvalidArgument
from nnfmq.hal.summaries import signature
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.planning.plan import ExecutionPlan

__all__ = ["PlanHandle"]

_CPU = "nnapi-reference"
_log = logging.getLogger("nnfmq.runtime")
_KEPT = 4  # memories that wait for the next execution


class PlanHandle(Uncopyable):
    """A plan with its prepared steps, its fallback, and memory for executions. Thread-safe.

    Owns the steps and the fallback. They are released when the handle is closed and its last user has ended.
    `step_devices` are the steps' devices by the names that the application knows.
    """

    connection = None  # a model on several devices has none of its own

    def __init__(
        self,
        plan: ExecutionPlan,
        steps: Sequence[ModelHandle],
        step_devices: Sequence[str],
        fallback: ModelFallback | None,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        states: tuple[StateInfo, ...],
    ) -> None:
        self.plan, self.steps, self.fallback = plan, tuple(steps), fallback
        self.step_devices = tuple(step_devices)
        self.caller_inputs, self.caller_outputs, self.states = inputs, outputs, states
        tensors = tuple(state.tensor for state in states)
        self.inputs, self.outputs = (*inputs, *tensors), (*outputs, *tensors)
        self.bound: BoundPlan = bind_plan(plan)
        self.step_inputs = _values_read(self.bound)
        self.has_unknown_outputs = any(info.has_unknown_shape for info in self.outputs)
        infos = [(step.inputs, step.outputs) for step in self.steps]
        self._templates = value_locations(self.bound, infos)
        self._constant_memory, self._constants = constant_locations(self.bound, plan.model, self._templates)
        self.has_dynamic_temporaries = any(
            not location.is_known for number, location in enumerate(self._templates)
            if number not in self.bound.inputs and number not in self.bound.outputs
        )  # fmt: skip
        self._free: deque[ArrayArguments] = deque(maxlen=_KEPT)
        # An application may close the client alone, which releases the steps. What executes refers to the handle.
        self._close_memory = weakref.finalize(self, _close_memory, self._free, self._constant_memory)
        self._lock = threading.Lock()
        self._users = 0
        self._is_closed = False
        for step in self.steps:
            step.has_plan_fallback = fallback is not None
        self.observed: ObservedModel | None = None
        """The observers of its executions; None if there are none."""

    @property
    def signature(self) -> str:
        """The names, shapes and dtypes of inputs and outputs in a short line."""
        return signature(self.caller_inputs, self.caller_outputs)

    @property
    def device(self) -> str:
        """The names of the devices that execute steps, in the order of the steps."""
        return ", ".join(dict.fromkeys(self.plan.devices[step.device] for step in self.plan.execution_steps))

    @property
    def model_id(self) -> int:
        """No driver has the whole model. Raises InvalidArgument."""
        raise InvalidArgument("a model on several devices has no buffers of one device; nnfmq.allocate shares memory")

    @property
    def is_open(self) -> bool:
        """True until the model is closed."""
        return not self._is_closed

    @property
    def state(self) -> str:
        """The state for `repr`: "" = the plan's devices execute; "closed"; or which step's driver has died."""
        if self._is_closed:
            return "closed"
        states = (f"step {index}: {step.state}" for index, step in enumerate(self.steps) if step.state)
        return "; ".join(states)

    def require_usable(self) -> None:
        """Raise DeadObject or InvalidArgument if a driver has exited, and there is no fallback."""
        if self.fallback is None:
            for step in self.steps:
                step.require_usable()

    def require_open(self) -> None:
        """Raise InvalidArgument if the model is closed."""
        if self._is_closed:
            raise BadState("this prepared model is closed")

    def is_cpu_step(self, index: int) -> bool:
        """Return whether the plan itself executes a step on the CPU device."""
        return self.plan.devices[self.bound.calls[index].step.device] == _CPU

    # ------------------------------------------------------------------------------------------------ users and memory

    def add_user(self, *, is_used: bool = False) -> None:
        """Keep everything until a call of `remove_user`.

        Raises:
            BadState: If the model is closed, unless the caller is a user already (`is_used`).
        """
        with self._lock:
            if not is_used:
                self.require_open()
            self._users += 1

    def remove_user(self) -> None:
        """End what `add_user` has begun; the last user of a closed model releases it."""
        if self._is_last_user():
            self._release()

    def _is_last_user(self) -> bool:
        with self._lock:
            self._users -= 1
            return self._is_closed and not self._users

    def remove_user_nonblocking(self) -> None:
        """As `remove_user`, for the watcher thread: it does not block."""
        if not self._is_last_user():
            return
        try:
            fallback_thread.submit(self._release)
        except RuntimeError as error:  # no thread: the drivers release the steps when the connections are closed
            _log.warning("a closed model is not released: %s", error)
            self._close_memory()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep everything for the duration of the block. Raises InvalidArgument if the model is closed."""
        self.add_user()
        try:
            yield
        finally:
            self.remove_user()

    def new_memory(self) -> ExecutionMemory:
        """Return memory for one execution at a time, which the caller closes."""
        return ExecutionMemory(self.bound, self._templates, self._constants)

    def take_arguments(self) -> ArrayArguments:
        """Return memory for one execution and its arguments. Return it after a success; otherwise close it.

        A driver may still write to the memory of an execution that has failed or was interrupted.
        """
        try:
            return self._free.pop()
        except IndexError:
            return ArrayArguments(self.new_memory(), self.inputs, self.outputs)

    def return_arguments(self, arguments: ArrayArguments) -> None:
        """Keep memory for the next execution."""
        arguments.memory.unbind()  # the application's request may have memory that it closes
        if len(self._free) < _KEPT and not self._is_closed:
            self._free.append(arguments)
        else:
            arguments.close()

    def close(self) -> None:
        """Release steps, fallback and memory, after the last user. Idempotent. Blocks up to 1 s for each step."""
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
            is_unused = not self._users
        if was_open and is_unused:
            self._release()

    def _release(self) -> None:
        self._close_memory()
        for step in self.steps:
            step.release()
        if self.fallback is not None:
            self.fallback.close()


def _close_memory(free: deque[ArrayArguments], constants: Memory | None) -> None:
    """Close the memory that no execution uses, and the constants."""
    while free:
        free.pop().close()
    if constants is not None:
        constants.close()


def _values_read(plan: BoundPlan) -> frozenset[int]:
    """Return the values that a step, an IF or a WHILE reads."""
    found: set[int] = set()
    for step in plan.steps:
        if isinstance(step, BoundCall):
            found.update(step.inputs)
        elif isinstance(step, BoundIf):
            found.add(step.condition)
        elif isinstance(step, BoundWhile):
            found.update((step.condition, *step.initial, *step.next))
    return frozenset(found)
