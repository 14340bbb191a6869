"""A model that the driver holds ready, as the application sees it, and its ordinary execution.

`execute` is the HAL's executeSynchronously over the control channel: any shapes, deadlines, any number of threads at
once, some hundred microseconds. `burst` makes what is fast.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast, overload

import numpy as np
from numpy.typing import ArrayLike

from nnfmq.hal.errors import ErrorStatus, InvalidArgument, NnfmqError, OutputInsufficientSize, error_for
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import (
    BufferToken,
    DataLocation,
    ExecutionConfig,
    MeasureTiming,
    OutputShape,
    Pool,
    Request,
    RequestArgument,
    SharedPool,
    Timing,
)
from nnfmq.memory import Memory
from nnfmq.queue.waiting import deadline_after
from nnfmq.runtime import arguments
from nnfmq.runtime.arguments import Array
from nnfmq.runtime.buffers import Buffer, note_outputs
from nnfmq.runtime.connection import Connection
from nnfmq.runtime.results import check_result
from nnfmq.serialize import messages

if TYPE_CHECKING:
    from nnfmq.runtime.aidl_burst import AidlBurst
    from nnfmq.runtime.burst import Burst

_NO_LIMIT = -1


def lent_fds(pools: Sequence[Pool | BufferToken]) -> list[int]:
    """Return the descriptors of the memories among pools, judged by `memory_to_data`; they stay their owners'."""
    return [cast(SharedPool, pool).fileno() for pool in pools if not isinstance(pool, BufferToken)]


class Outcome(NamedTuple):
    """What an execution over the control channel answered."""

    shapes: tuple[OutputShape, ...]
    timing: Timing


def execute_once(
    connection: Connection,
    model_id: int,
    described: Sequence[TensorInfo],
    request: Request,
    config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
    deadline_ns: int | None = None,
) -> Outcome:
    """Execute a request, whose pools stay the caller's; blocks. `described` are the model's outputs.

    Raises the error that the status stands for, ProtocolError for an answer that no honest driver gives.
    """
    message = messages.Execute(
        connection.new_call(),
        model_id,
        messages.request_to_data(request),
        messages.config_to_data(config),
        deadline_on_wire(connection, deadline_ns),
    )
    return ask_execution(connection, message, described, request, config, deadline_ns)


def deadline_on_wire(connection: Connection, deadline_ns: int | None) -> int:
    """Return a deadline as a message has it; -1 where the interface has none: then only the wait here ends."""
    return _NO_LIMIT if deadline_ns is None or not connection.has_deadlines else deadline_ns


def ask_execution(
    connection: Connection,
    message: messages.Call,
    described: Sequence[TensorInfo],
    request: Request,
    config: ExecutionConfig,
    deadline_ns: int | None,
) -> Outcome:
    """Send a call that Executed answers, with the request's memories, and judge the answer; as `execute_once`."""
    try:
        answer = connection.ask(message, messages.Executed, lent_fds(request.pools), deadline_ns)
    except NnfmqError:
        note_outputs(connection, request, None)
        raise
    shapes = messages.shapes_from_data(answer.shapes)
    timing = Timing(answer.time_on_device_ns, answer.time_in_driver_ns)
    is_measured = config.measure is MeasureTiming.YES
    check_result(described, request.outputs, answer.status, shapes, timing, is_measured)
    note_outputs(connection, request, shapes if answer.status is ErrorStatus.NONE else None)
    if answer.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        raise OutputInsufficientSize(answer.message, shapes)
    if answer.status is not ErrorStatus.NONE:
        raise error_for(answer.status, answer.message)
    return Outcome(shapes, timing)


def _check_out(infos: Sequence[TensorInfo], out: Sequence[Array | Buffer]) -> None:
    given: Any = out  # whatever the application gave
    if not isinstance(given, Sequence) or not any(isinstance(target, Buffer) for target in given):
        arguments.check_out(infos, given)
        return
    if len(given) != len(infos):
        raise InvalidArgument(f"the model has {len(infos)} outputs, `out` has {len(given)} arrays or buffers")
    arrays = [pair for pair in zip(infos, given, strict=True) if not isinstance(pair[1], Buffer)]
    arguments.check_out([info for info, _ in arrays], [target for _, target in arrays])


def _copy_out(targets: Sequence[Array | Buffer], results: Sequence[Array | Buffer]) -> tuple[Array | Buffer, ...]:
    """Copy results into the caller's arrays, and return what the caller gave."""
    pairs = zip(targets, results, strict=True)
    arrays = [(t, r) for t, r in pairs if isinstance(t, np.ndarray) and isinstance(r, np.ndarray)]
    arguments.copy_out([target for target, _ in arrays], [result for _, result in arrays])
    return tuple(targets)


class PreparedModel:
    """A prepared model. Close it, or use `with`; closing the client closes it too. Thread-safe.

    `inputs` and `outputs` describe the arrays that it takes and gives: name, shape, dtype, scale, zero point.
    `last_timing` is that of the execution that ended last, in whichever thread.
    """

    def __init__(
        self,
        connection: Connection,
        model_id: int | None,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
    ) -> None:
        self._connection = connection
        self._model_id = model_id
        self.inputs = inputs
        self.outputs = outputs
        self.last_timing = Timing()

    @property
    def model_id(self) -> int:
        """The driver's number for this model. Raises InvalidArgument once closed."""
        if self._model_id is None:
            raise InvalidArgument("this prepared model is closed")
        return self._model_id

    def memory_preference(self, kind: Literal["input", "output"], index: int) -> arguments.MemoryPreference:
        """Return where in a memory of the application's one input or output lies best (MEM-6).

        Padding counts nothing where a result is too large, and nothing is written there. Raises InvalidArgument where
        there is no such input or output.
        """
        count = len(self.inputs if kind == "input" else self.outputs)
        if not 0 <= index < count:
            raise InvalidArgument(f"the model has {count} {kind}s, there is no {kind} {index}")
        return arguments.MemoryPreference(arguments.ALIGNMENT, arguments.PADDING)

    def take_answer(self, answer: messages.PreparedModelReady) -> None:
        """Note what the driver made; for a model that is created before its number is known."""
        if answer.status is ErrorStatus.NONE:
            self._model_id = answer.model_id

    @overload
    def execute(
        self,
        *inputs: ArrayLike | Buffer,
        out: Sequence[Array] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> tuple[Array, ...]: ...

    @overload
    def execute(
        self,
        *inputs: ArrayLike | Buffer,
        out: Sequence[Array | Buffer],
        measure: bool = False,
        timeout: float | None = None,
    ) -> tuple[Array | Buffer, ...]: ...

    def execute(
        self,
        *inputs: ArrayLike | Buffer,
        out: Sequence[Array | Buffer] | None = None,
        measure: bool = False,
        timeout: float | None = None,
    ) -> tuple[Array | Buffer, ...]:
        """Run the model once over the control channel and return its outputs; blocks.

        Takes one array per input, in order, of the input's shape and dtype, or a Buffer that holds it. Returns new
        arrays that the caller owns, or fills and returns those of `out`, among which may be Buffers, too. With
        `measure`, `last_timing` then holds the times in ns. `timeout` is in seconds and becomes the execution's
        deadline: None = no limit, 0 = has passed.

        Raises InvalidArgument (shape, dtype, count, closed), MissedDeadline, DeadObject, ProtocolError where the driver
        states impossible shapes, or what the driver answered.
        """
        model_id = self.model_id
        arguments.check_count("input", self.inputs, len(inputs))
        given = [
            value if isinstance(value, Buffer) else arguments.checked_array(info, value)
            for info, value in zip(self.inputs, inputs, strict=True)
        ]
        if out is not None:
            _check_out(self.outputs, out)
        targets = out if out is not None else [None] * len(self.outputs)
        deadline_ns = deadline_after(timeout)
        shapes = [info.shape for info in self.outputs]
        asked = MeasureTiming.YES if measure else MeasureTiming.NO
        try:
            results = self._execute(model_id, given, targets, shapes, asked, deadline_ns)
        except OutputInsufficientSize as error:
            # Outputs of unknown shape: the driver has now said what they need.
            known = [shape.dimensions for shape in error.output_shapes]
            if known == shapes or any(0 in shape for shape in known):
                raise
            results = self._execute(model_id, given, targets, known, asked, deadline_ns)
        return results if out is None else _copy_out(out, results)

    def _execute(
        self,
        model_id: int,
        given: Sequence[Array | Buffer],
        targets: Sequence[Array | Buffer | None],
        shapes: Sequence[tuple[int, ...]],
        measure: MeasureTiming,
        deadline_ns: int | None,
    ) -> tuple[Array | Buffer, ...]:
        here = [value.shape if isinstance(value, np.ndarray) else () for value in given]
        inputs, input_bytes = arguments.layout(self.inputs, here, 0)
        outputs, output_bytes = arguments.layout(self.outputs, shapes, 1)
        with ExitStack() as stack:
            source = stack.enter_context(Memory.create(input_bytes, "nnfmq-inputs", one_writer=True))
            sink = stack.enter_context(Memory.create(output_bytes, "nnfmq-outputs"))
            for info, argument, value in zip(self.inputs, inputs, given, strict=True):
                if isinstance(value, np.ndarray):
                    np.copyto(arguments.view(source, argument, info, value.shape), value, casting="same_kind")
            pools: list[Memory | BufferToken] = [source, sink]
            asked = self._in_buffers(inputs, given, pools), self._in_buffers(outputs, targets, pools)
            request, config = Request(*asked, tuple(pools)), ExecutionConfig(measure)
            outcome = execute_once(self._connection, model_id, self.outputs, request, config, deadline_ns)
            self.last_timing = outcome.timing
            final = [shape.dimensions for shape in outcome.shapes] or shapes
            results: list[Array | Buffer] = []
            for info, place, shape, target in zip(self.outputs, outputs, final, targets, strict=True):
                if isinstance(target, Buffer):
                    results.append(target)
                    continue
                results.append(arguments.view(sink, place, info, shape).copy())
            return tuple(results)

    def _in_buffers(
        self,
        places: Sequence[RequestArgument],
        values: Sequence[Array | Buffer | None],
        pools: list[Memory | BufferToken],
    ) -> tuple[RequestArgument, ...]:
        """Return `places` with those of Buffers, which are added to `pools`, in place of the others."""
        found = []
        for place, value in zip(places, values, strict=True):
            if isinstance(value, Buffer):
                found.append(RequestArgument(location=DataLocation(len(pools))))
                pools.append(value.pool_on(self._connection))
            else:
                found.append(place)
        return tuple(found)

    def execute_request(
        self,
        request: Request,
        config: ExecutionConfig = ExecutionConfig(),  # noqa: B008  frozen
        *,
        timeout: float | None = None,
    ) -> Outcome:
        """Execute one request as the HAL has it; its pools are nnfmq memories and stay the caller's. Blocks.

        Return the shapes that the driver reports, none where it reports none, and the timing. What is wrong with the
        request, the driver says. Raises what it answers, MissedDeadline, DeadObject, ProtocolError for what cannot be
        true.
        """
        asked = self._connection, self.model_id, self.outputs, request, config, deadline_after(timeout)
        return execute_once(*asked)

    def request_burst(self, *, timeout: float | None = 10.0) -> Burst:
        """Configure a burst for `execute_request` alone: it has no memory of its own, so shapes may be unknown.

        Blocks up to `timeout` seconds. The caller closes the burst.
        """
        from nnfmq.runtime.burst import Burst

        return Burst.configure(self._connection, self, None, deadline_after(timeout), with_memory=False)

    def aidl_burst(self, *, timeout: float | None = 10.0) -> AidlBurst:
        """Configure a burst as AIDL has it: without queues, over the control channel, with tokens for memories.

        Blocks up to `timeout` seconds. The caller closes the burst.
        """
        from nnfmq.runtime.aidl_burst import AidlBurst

        return AidlBurst.configure(self._connection, self, deadline_after(timeout))

    def burst(self, *, polling_window_us: float | None = None, timeout: float | None = 10.0) -> Burst:
        """Configure a burst: two queues and a memory for each direction, kept for a series of quick executions.

        `polling_window_us`: how long a call polls before it sleeps (0 = sleep at once); the default is
        $NNFMQ_BURST_CONTROLLER_POLLING_WINDOW or 50. Blocks up to `timeout` seconds. The caller closes the burst.
        """
        from nnfmq.runtime.burst import Burst

        return Burst.configure(self._connection, self, polling_window_us, deadline_after(timeout))

    def close(self) -> None:
        """Release the model in the driver; its bursts live on. Harmless when repeated, or when the driver is gone."""
        model_id, self._model_id = self._model_id, None
        if model_id is None or not self._connection.is_open:
            return
        try:
            message = messages.ReleaseModel(self._connection.new_call(), model_id)
            self._connection.ask(message, messages.Reply, (), time.monotonic_ns() + 1_000_000_000)
        except NnfmqError:
            pass  # the driver is gone, and the model with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
