"""ModelHandle: a prepared model as every execution mode uses it."""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import ArrayLike

from nnfmq.base.memory import Memory
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.garbage import ClosedWhenDropped
from nnfmq.client.connection.open_connections import DriverEnding
from nnfmq.client.model.arrays import Array, checked_arrays
from nnfmq.client.waiting import SingleAttempt
from nnfmq.hal.errors import BadState, DeadObject, DeviceUnavailable, ErrorStatus, InvalidArgument, NnfmqError
from nnfmq.hal.preparation import ProgramKind
from nnfmq.hal.summaries import counted, signature
from nnfmq.hal.tensor_info import StateInfo, TensorInfo
from nnfmq.hal.types import RequestArgument
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.client.observation import ObservedModel
    from nnfmq.observe.recorder_core import Calls

__all__ = [
    "BurstAhead",
    "CompiledHandle",
    "DeviceOf",
    "HasState",
    "MappedState",
    "ModelFallback",
    "ModelHandle",
    "ModelLocation",
    "PrepareAgain",
    "StateValues",
    "initial_values",
    "mapped_state",
    "release_in_driver",
    "require_no_state",
]

ResultT = TypeVar("ResultT")
Place: TypeAlias = tuple[Memory, Sequence[RequestArgument]]
"""The arguments of states, and the memory in which they are."""
_RELEASE_TIMEOUT_NS = 1_000_000_000


class ModelFallback(Protocol):
    """The CPU device for a model whose own device fails, as `CpuFallback`, which needs a device and so this module."""

    @property
    def is_used(self) -> bool:
        """Whether something of the model is prepared on the CPU device."""
        ...

    @property
    def executions(self) -> int:
        """The number of executions of the model or of a step by the CPU."""
        ...

    def applies_to(self, error: NnfmqError, deadline_ns: int | None = None) -> bool:
        """Return whether the CPU is tried after `error`."""
        ...

    def whole_model(self, deadline_ns: int | None) -> ModelHandle:
        """Return the whole model on the CPU device; blocks while it is prepared."""
        ...

    def step_model(self, index: int, deadline_ns: int | None) -> ModelHandle:
        """Return the sub-model of execution step `index` of a plan on the CPU device; blocks while it is prepared."""
        ...

    def close(self) -> None:
        """Release the model on the CPU device. Idempotent."""
        ...


class ModelLocation(Struct, frozen=True, eq=False, weakref=True):
    """The place of a prepared model: a connection, and the model's id there; None if it is not prepared, or released.

    Read together, because they change if the model is prepared again. `version` is that of a model of the model
    repository, 0 for all others. `calls` counts the executions there. A call keeps the location that it has read until
    the driver has replied, because a version that was replaced is released when nothing refers to its location.
    """

    connection: Connection
    model_id: int | None
    version: int = 0
    calls: Calls | None = None

    def without_id(self) -> ModelLocation:
        """Return a location that keeps no version prepared, for what is bound to the model in the driver."""
        return replace(self, model_id=None)

    def require_id(self) -> int:
        """Return the id. Raises InvalidArgument if there is none."""
        if self.model_id is None:
            raise BadState("this prepared model is closed")
        return self.model_id


class BurstAhead(Protocol):
    """A burst of a model, which moves to another driver with it."""

    def configure_ahead(self, location: ModelLocation, deadline_ns: int | None) -> None:
        """Configure the burst where the model will be, for a later call; blocks. On any thread."""
        ...


DeviceOf: TypeAlias = "Callable[[str], Any]"
"""Returns the `Device` of this name in a driver; blocks. Raises DeviceUnavailable if it is not the same as before."""


class PrepareAgain(ABC):
    """Prepares a model in a driver that has replaced the one before.

    If that one still serves the client, the model is prepared ahead of the call that finds it in the next one.
    """

    def __init__(self) -> None:
        self._ahead: ModelHandle | None = None

    def __call__(self, deadline_ns: int | None, wait: bool) -> ModelHandle:
        """Return the model in the driver that the client is connected to now; blocks. Waits for a driver if `wait`."""
        connection, device_of = self._reach(deadline_ns, wait)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.connection is connection and ahead.is_open:
            return ahead
        return self._prepare(device_of, deadline_ns)

    def prepare_ahead(self, device_of: DeviceOf, deadline_ns: int | None) -> ModelLocation:
        """Prepare the model in the driver that the client connects to next, and that has these devices; blocks.

        Returns the location that a call finds there.
        """
        self._ahead = ahead = self._prepare(device_of, deadline_ns)
        return ahead.location

    @abstractmethod
    def _reach(self, deadline_ns: int | None, wait: bool) -> tuple[Connection, DeviceOf]:
        """Return the client's connection, to the next driver if its own has died, and the devices there; blocks."""

    @abstractmethod
    def _prepare(self, device_of: DeviceOf, deadline_ns: int | None) -> ModelHandle:
        """Return the model, prepared on one of these devices; blocks."""


class CompiledHandle(Protocol):
    """A model as every execution mode uses it, on one device or several: a ModelHandle or a PlanHandle.

    `inputs` and `outputs` are those of HAL requests: the caller's, followed by the states.
    """

    caller_inputs: tuple[TensorInfo, ...]
    caller_outputs: tuple[TensorInfo, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[StateInfo, ...]

    @property
    def device(self) -> str:
        """The name of the device in its driver; of several devices all names."""
        ...

    @property
    def connection(self) -> Connection | None:
        """The connection to the driver that has the model; None if several have parts of it."""
        ...

    @property
    def fallback(self) -> ModelFallback | None:
        """The CPU device, for what another device fails to; None if nothing executes that."""
        ...

    @property
    def model_id(self) -> int:
        """The model's id in that driver. Raises InvalidArgument if there is none."""
        ...

    @property
    def state(self) -> str:
        """The executor of now, for `repr`; "" = the devices that were chosen."""
        ...

    @property
    def is_open(self) -> bool:
        """True until the model is closed."""
        ...

    @property
    def signature(self) -> str:
        """The names, shapes and dtypes of inputs and outputs in a short line."""
        ...

    def require_open(self) -> None:
        """Raise InvalidArgument if the model is closed."""
        ...

    def require_usable(self) -> None:
        """Raise DeadObject or InvalidArgument if nothing can execute the model any more."""
        ...


class ModelHandle(ClosedWhenDropped):
    """A prepared model's id in the driver, its signature, and the device that prepared it. Thread-safe.

    `device` is the device's name, and `extensions` has the names of the extensions that it supports. `inputs` and
    `outputs` are those of HAL requests: the caller's, `caller_inputs` and `caller_outputs`, followed by the states.

    `observed` has the observers of its executions, None if there are none. `fallback` executes what the device fails
    to; None = nothing does. `fallback_warning` is a lock that the first execution on the CPU acquires, to log a
    warning. `prepare_again` is what `recover` calls; None = a model whose driver has died remains dead.
    `recover_later` has the client's thread prepare the model again; None = the client has no such thread.

    `program` and `compiled_operations` are what the driver says of the program that it prepared.

    `model_id` is None until the driver has replied to the prepare call, which is followed by `on_prepared`.
    """

    def __init__(
        self,
        connection: Connection,
        model_id: int | None,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        device: str,
        extensions: frozenset[str] = frozenset(),
        states: tuple[StateInfo, ...] = (),
    ) -> None:
        self.location = ModelLocation(connection, model_id)
        self.caller_inputs = inputs
        self.caller_outputs = outputs
        self.states = states
        tensors = tuple(state.tensor for state in states)
        self.inputs = (*inputs, *tensors)
        self.outputs = (*outputs, *tensors)
        self.device = device
        self.extensions = extensions
        self.program = ProgramKind.OTHER
        self.compiled_operations = 0
        self.observed: ObservedModel | None = None
        self.fallback: ModelFallback | None = None
        self.fallback_warning = threading.Lock()
        self.prepare_again: PrepareAgain | None = None
        self.recover_later: Callable[[ModelHandle], None] | None = None
        self.has_plan_fallback = False
        self.is_of_fallback, self.is_owner = False, True
        self.recovery_at_ns = self.recovery_delay_ns = 0  # of the next attempt in the background
        self._recovery: SingleAttempt[None] = SingleAttempt()
        self._bursts: weakref.WeakSet[BurstAhead] = weakref.WeakSet()  # never changed, only replaced
        self._lock = threading.Lock()  # held for an assignment, never while blocking
        self._is_released = False

    def add_burst(self, burst: BurstAhead) -> None:
        """Configure a burst ahead of a move to another driver. Keeps only a weak reference."""
        with self._lock:
            self._bursts = weakref.WeakSet([*self._bursts, burst])

    def on_prepared(self, reply: messages.PreparedModelReady) -> None:
        """Store the id that the driver returned."""
        if reply.status is ErrorStatus.NONE:
            known = reply.program in ProgramKind.__members__.values()  # a driver is not trusted
            self.program = ProgramKind(reply.program) if known else ProgramKind.OTHER
            self.compiled_operations = reply.compiled
            calls = self.connection.page.calls_of(reply.calls_row)
            self.location = replace(self.location, model_id=reply.model_id, calls=calls)

    @property
    def connection(self) -> Connection:
        """The connection to the driver that has the model; another one after `recover`."""
        return self.location.connection

    @property
    def model_id(self) -> int:
        """The model's id in the driver. Raises InvalidArgument once it is released."""
        return self.location.require_id()

    @property
    def signature(self) -> str:
        """The names, shapes and dtypes of inputs and outputs in a short line."""
        return signature(self.caller_inputs, self.caller_outputs)

    @property
    def is_open(self) -> bool:
        """True until the model or its connection is closed, or the driver has exited."""
        location = self.location
        return location.model_id is not None and location.connection.is_open

    def require_open(self) -> None:
        """Raise InvalidArgument if the model is released."""
        _ = self.model_id

    def require_usable(self) -> None:
        """Raise DeadObject if the driver has exited, and nothing else can execute the model."""
        try:
            self.connection.raise_if_closed()
        except DeadObject as error:
            if not self.can_execute_again(error, None):
                raise

    def can_execute_again(self, error: NnfmqError, deadline_ns: int | None) -> bool:
        """Return whether anything may execute what the device has failed to with `error`. Does not block."""
        if self.can_recover(error):
            return True
        fallback = self.fallback
        return fallback is not None and not self.connection.is_abandoned and fallback.applies_to(error, deadline_ns)

    def can_recover(self, error: NnfmqError) -> bool:
        """Return whether `recover` may help after `error`: the driver has died, and the model is not closed."""
        if self.prepare_again is None or self._is_released:
            return False
        return isinstance(error, DeadObject) and not self.connection.is_abandoned

    @property
    def recovers_in_background(self) -> bool:
        """Whether the CPU executes while the model is prepared again, so that no call waits for that."""
        return self.recover_later is not None and (self.has_plan_fallback or self.fallback is not None)

    @property
    def state(self) -> str:
        """The state for `repr`: "" = the device executes; "closed"; or that the driver has died, and what follows."""
        location = self.location
        if location.model_id is None or location.connection.is_abandoned:
            return "closed"
        if location.connection.is_open:
            return "fallback of another device" if self.is_of_fallback else ""
        if self.recovers_in_background:
            return "driver has died, the CPU executes until the next one has the model"
        if self.prepare_again is not None:
            return "driver has died, prepared again at the next execution"
        fallback = self.fallback
        is_on_cpu = fallback is not None and fallback.applies_to(DeadObject("the driver has died"))
        return "driver has died, the CPU executes" if is_on_cpu else "driver has died"

    def has_moved_from(self, connection: Connection) -> bool:
        """Return whether the model was prepared again in another driver than that of `connection`, which has died."""
        return self.connection is not connection and not connection.is_open

    def recover(self, error: NnfmqError, deadline_ns: int | None) -> None:
        """Prepare the model again after its driver has died with `error`; blocks. Does nothing if that is done.

        If the CPU executes meanwhile, the model is prepared in the background instead, and `error` is raised: the
        caller has the CPU execute. If the driver has only asked to leave and its successor listens, that executes.

        Raises:
            NnfmqError: `error`, or as `recover_now`.
        """
        if not self.recovers_in_background:
            self.recover_now(deadline_ns, wait=True)
            return
        if self.connection.has_left:
            with suppress(DeviceUnavailable):  # no driver listens yet
                self.recover_now(deadline_ns, wait=False)
        if not self.connection.is_open:
            self.request_recovery(error)
            try:
                raise error
            finally:
                del error  # this frame, to which it refers, would keep it

    def execute_again(self, error: NnfmqError, deadline_ns: int | None, execute: Callable[[], ResultT]) -> ResultT:
        """Prepare the model again after its driver has died with `error`, and return `execute()`; blocks.

        If the next driver ends before it has executed, the one after it does.

        Raises:
            NnfmqError: As `recover`, or as `execute`.
        """
        try:
            while True:
                try:
                    self.recover(error, deadline_ns)
                    return execute()
                except DriverEnding as again:
                    if again is error:  # there is no next driver, and the CPU executes
                        raise
                    error = again
        finally:
            del error  # this frame, to which it refers, would keep it

    def request_recovery(self, error: NnfmqError) -> None:
        """Have the model prepared again in the background, if that may help after `error`. Does not block."""
        if self.recover_later is not None and self.recovers_in_background and self.can_recover(error):
            self.recover_later(self)

    def prepare_ahead(self, device_of: DeviceOf, deadline_ns: int | None) -> None:
        """Prepare the model in another driver, which `recover_now` finds there, and configure its bursts; blocks.

        Nothing if it is closed.
        """
        prepare_again = self.prepare_again
        if prepare_again is not None and self.is_open:
            location = prepare_again.prepare_ahead(device_of, deadline_ns)
            for burst in list(self._bursts):
                burst.configure_ahead(location, deadline_ns)

    def recover_now(self, deadline_ns: int | None, *, wait: bool) -> None:
        """Prepare the model again in the driver that has replaced a dead one; blocks. Does nothing while it lives.

        Of several threads one prepares it. Waits for a driver to listen if `wait`.

        Raises:
            InvalidArgument: If the model is released.
            DeviceUnavailable: If no driver can be reached, or the device is not the same as before.
            MissedDeadline: If the deadline passes.
            NnfmqError: The error that the driver replied.
        """
        self._recovery.run(lambda: self._recover(deadline_ns, wait), deadline_ns, waits=wait)

    def _recover(self, deadline_ns: int | None, wait: bool) -> None:
        prepare_again = self.prepare_again
        if self.connection.is_open or (prepare_again is None and not self._is_released):
            return
        self.require_open()
        assert prepare_again is not None  # `release` drops it after the id
        prepared = prepare_again(deadline_ns, wait).give_up()
        with self._lock:
            has_moved = self.location.connection.is_open and self.location.version > prepared.version
            if not has_moved:
                self.location = prepared
        if has_moved:  # to a newer version, meanwhile
            release_in_driver(prepared)
        if self._is_released:  # by another thread meanwhile
            self.release()
            self.require_open()

    def move_to(self, other: ModelHandle) -> ModelLocation:
        """Execute `other` from now on, a newer version of this model; the caller drops `other`. Does not block long.

        Returns the location that is to be released when nothing refers to it any more: the one before, or that of
        `other`, if this model is at that version already.
        """
        with self._lock:
            location = self.location
            if other.location.version > location.version:
                self.device, self.extensions, self.observed = other.device, other.extensions, other.observed
                self.location = other.location
            else:
                location = other.location
        other.give_up()
        if self._is_released:
            self.release()
        return location

    def give_up(self) -> ModelLocation:
        """Return the location, which the caller owns from now on: this handle does not release it."""
        return self._set_location(replace(self.location, model_id=None, calls=None))

    def _set_location(self, location: ModelLocation) -> ModelLocation:
        """Set the location, and return the one before."""
        with self._lock:
            before, self.location = self.location, location
        return before

    def release(self) -> None:
        """Release the model in the driver. Idempotent. Blocks up to 1 s. Does nothing if the driver has exited."""
        self._is_released = True
        release_in_driver(self.give_up())
        self.prepare_again = None  # with it goes the model, which may have a file in memory

    def _is_left_open(self) -> bool:
        location = self.location
        return self.is_owner and location.model_id is not None and location.connection.is_open

    def _close_dropped(self) -> None:
        location, fallback = self.give_up(), self.fallback
        if location.model_id is not None and location.connection.is_open:
            connection = location.connection
            connection.post(messages.ReleaseModel(connection.next_call_id(), location.model_id))
        if fallback is not None:
            fallback.close()


def release_in_driver(location: ModelLocation) -> None:
    """Release a model in the driver, if it is prepared there. Blocks up to 1 s. Nothing if the driver has exited."""
    connection, model_id = location.connection, location.model_id
    if model_id is None or not connection.is_open:
        return
    try:
        message = messages.ReleaseModel(connection.next_call_id(), model_id)
        connection.exchange(message, messages.Reply, (), time.monotonic_ns() + _RELEASE_TIMEOUT_NS)
    except NnfmqError:
        pass  # the driver has exited, which released the model


# ----------------------------------------------------------------------------------------------------------------------
# The states of a model between its executions: kept by the client, for each burst, execution and prepared model.
#
# For the driver a model is a function. A model with states has an input and an output more for each of them, and the
# client makes what an execution returned the input of the next one. So an execution that fails, or whose deadline
# passes, changes no state; the death of the driver loses none; and two clients, or two bursts of one model, share none.


def initial_values(states: Sequence[StateInfo]) -> tuple[Array, ...]:
    """Return new arrays with the values that a model's states have at first."""
    return tuple(_initial(state) for state in states)


def _initial(state: StateInfo) -> Array:
    info = state.tensor
    if state.initial:
        return np.frombuffer(state.initial, info.dtype).reshape(info.shape).copy()
    return np.full(info.shape, info.zero_point, info.dtype)


class StateValues:
    """States that are arrays of the client."""

    def __init__(self, states: Sequence[StateInfo]) -> None:
        self.states = tuple(states)
        self._values = initial_values(self.states)

    def get(self) -> tuple[Array, ...]:
        """Return copies of the values that the next execution begins with."""
        return tuple(value.copy() for value in self._values)

    def set(self, values: Sequence[Array]) -> None:
        """Set the values that the next execution begins with. Keeps the arrays."""
        self._values = tuple(values)

    def detach(self) -> StateValues:
        """Return itself: it uses no memory of an execution object."""
        return self


class MappedState:
    """States in the memories of a burst or an execution.

    The states' arrays follow each other in both memories at the same distances, so one copy takes all of them from the
    outputs to the inputs: a signal handler that raises cannot leave states of two executions.

    Args:
        states: The states.
        inputs: Their arrays in the inputs' memory.
        before: The bytes in the inputs' memory from the first state to the last.
        after: The same bytes in the outputs' memory.
    """

    def __init__(self, states: Sequence[StateInfo], inputs: Sequence[Array], before: Array, after: Array) -> None:
        self.states = tuple(states)
        self._inputs = tuple(inputs)
        self._before = before
        self._after = after
        self._pending: tuple[Array, ...] | None = initial_values(self.states)

    def get(self) -> tuple[Array, ...]:
        """Return copies of the values that the next execution begins with."""
        values = self._inputs if self._pending is None else self._pending
        return tuple(value.copy() for value in values)

    def set(self, values: Sequence[Array]) -> None:
        """Set the values that the next execution begins with. Keeps the arrays, and writes no memory yet."""
        self._pending = tuple(values)

    def begin(self) -> None:
        """Write values that were set. Call it before an execution, when none is in progress."""
        if self._pending is None:
            return
        for target, value in zip(self._inputs, self._pending, strict=True):
            np.copyto(target, value)
        self._pending = None

    def advance(self) -> None:
        """Make what an execution has returned the values of the next one. Call it when an execution has succeeded."""
        self._before[...] = self._after

    def detach(self) -> StateValues:
        """Return these values without the memories."""
        values = StateValues(self.states)
        values.set(self.get())
        return values


def mapped_state(states: Sequence[StateInfo], inputs: Sequence[Array], before: Place, after: Place) -> MappedState:
    """Return the states whose arguments `before` in the inputs' memory and `after` in the outputs' are given."""
    return MappedState(states, inputs, _bytes(*before), _bytes(*after))


def _bytes(memory: Memory, args: Sequence[RequestArgument]) -> Array:
    """Return the bytes from the first argument's begin to the last one's end."""
    first, last = args[0].location, args[-1].location
    return np.frombuffer(memory.view[first.offset : last.offset + last.length], np.uint8)


def require_no_state(states: Sequence[StateInfo], method: str) -> None:
    """Raise InvalidArgument, which names the method to call instead, if a model has states."""
    if states:
        raise InvalidArgument(
            f"the model has {counted(len(states), 'state')}; only synchronous calls carry states on: call {method}()"
        )


class HasState:
    """The methods of an object that executes a model for its states; `_state` is None if the model has none."""

    __slots__ = ("_state",)
    _state: StateValues | MappedState | None

    @property
    def states(self) -> tuple[StateInfo, ...]:
        """Descriptions of the model's states; empty if it has none."""
        return () if self._state is None else self._state.states

    @property
    def state(self) -> tuple[Array, ...]:
        """Copies of the states with which the next execution begins, in the order of `states`.

        They may be set, too, also in one mapping by name: to what was read here or from another execution object of the
        model, for instance after the driver has exited. Do not set them while another thread executes.

        Raises:
            InvalidArgument: If the number of arrays, a name, a shape or a dtype is wrong.
        """
        return () if self._state is None else self._state.get()

    @state.setter
    def state(self, values: Sequence[ArrayLike] | Mapping[str, ArrayLike]) -> None:
        if self._state is None:
            if len(values):
                raise InvalidArgument(f"the model has no states; {len(values)} were given")
            return
        infos = [state.tensor for state in self._state.states]
        given = (values,) if isinstance(values, Mapping) else values
        arrays = checked_arrays(infos, given, "state")
        self._state.set([np.array(array, info.dtype) for array, info in zip(arrays, infos, strict=True)])

    def _detach_state(self) -> None:
        """Keep the states' values when the object's memory is closed. Idempotent."""
        if self._state is not None:
            self._state = self._state.detach()

    def reset_state(self) -> None:
        """Begin the next execution with the initial states. Does nothing if the model has none."""
        if self._state is not None:
            self._state.set(initial_values(self._state.states))
