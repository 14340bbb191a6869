"""What the clients of isolation_bench.py do: each phase keeps the client's worker busy in another way.

A phase is a generator function. It connects and prepares what it needs, yields the pid of its worker, and then the
name of a status after each repetition of its work. So the benchmark decides how often the work is done, and knows when
it has begun.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_processes import set_time_limit

import nnfmq
from nnfmq.hal.errors import ErrorStatus, NnfmqError
from nnfmq.hal.types import (
    DataLocation,
    ExecutionPreference,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Subgraph,
)
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed

if TYPE_CHECKING:
    from nnfmq.runtime.client import Client

Work = Generator[int | str, None, None]
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class PhaseJob:
    """A phase and its sizes; sent to a client's process. `message` and `model` are files."""

    phase: str
    socket: str
    pool_bytes: int
    message: Path
    model: Path
    limit_s: int
    cpus: tuple[int, ...] = ()


def phase_main(connection: Connection, job: PhaseJob) -> None:
    """Send this process's pid and the worker's; then work on request, until the parent closes the connection.

    After a message of the parent, "began" is sent, the work is repeated until the next message, and the times of the
    repetitions in seconds are sent, with the last status. Entry point of a client's process.
    """
    set_time_limit(job.limit_s)
    if job.cpus:
        cpu_pinning.pin_to(0, job.cpus)
    work = PHASES[job.phase](job)
    try:
        connection.send((os.getpid(), next(work)))
        while connection.recv():
            set_time_limit(job.limit_s)
            connection.send("began")
            connection.send(_repeat(work, connection))
    except (EOFError, BrokenPipeError):
        pass  # the parent has closed the connection
    except (BenchmarkFailed, NnfmqError, OSError) as error:
        with suppress(BrokenPipeError):
            connection.send(BenchmarkFailed(f"{job.phase}: {type(error).__name__}: {error}"))
    finally:
        connection.close()


def _repeat(work: Work, connection: Connection) -> tuple[list[float], str]:
    times: list[float] = []
    status = ""
    while not times or not connection.poll():
        begin = time.monotonic()
        status = str(next(work))
        times.append(time.monotonic() - begin)
    connection.recv()
    return times, status


# ---- phases


def _connect(job: PhaseJob) -> Client:
    return nnfmq.connect(job.socket, timeout=_CONNECT_S)


def copying(job: PhaseJob) -> Work:
    """Prepare a model whose constants fill a pool of `pool_bytes`; the driver copies the pool."""
    with _connect(job) as client, nnfmq.Memory.create(job.pool_bytes, "isolation") as memory:
        memory.view[:] = bytes(1) * job.pool_bytes
        device, model = client.device("reference"), _add_constant(memory, job.pool_bytes // 4)
        yield client.worker_pid
        while True:
            device.prepare(model).close()
            yield "NONE"


def _add_constant(memory: Any, count: int) -> Model:
    """Return a model that adds `count` floats of a pool to its input."""
    tensor = OperandType.TENSOR_FLOAT32
    operands = (
        Operand(tensor, (1,), lifetime=LifeTime.SUBGRAPH_INPUT),
        Operand(tensor, (count,), lifetime=LifeTime.CONSTANT_REFERENCE, location=DataLocation(0, 0, 4 * count)),
        Operand(OperandType.INT32, lifetime=LifeTime.CONSTANT_COPY, location=DataLocation(0, 0, 4)),
        Operand(tensor, (count,), lifetime=LifeTime.SUBGRAPH_OUTPUT),
    )
    add = Operation(OperationType.ADD, (0, 1, 2), (3,))
    return Model(Subgraph(operands, (add,), (0,), (3,)), operand_values=bytes(4), pools=(memory,))


def decoding(job: PhaseJob) -> Work:
    """Send a large encoded model, of operands that no operation uses; the driver decodes and then rejects it."""
    from nnfmq.serialize import messages

    data = job.message.read_bytes()
    with _connect(job) as client:
        connection = client.connection
        yield client.worker_pid
        while True:
            message = messages.GetSupportedOperations(connection.next_call_id(), "reference", data)
            reply = connection.exchange(message, messages.SupportedOperations)
            if reply.status is not ErrorStatus.INVALID_ARGUMENT:
                raise BenchmarkFailed(f"the model was not decoded: {reply.status.name}: {reply.message}")
            yield reply.status.name


def write_message(path: Path, message_bytes: int) -> None:
    """Write an encoded model of at least `message_bytes` to `path`."""
    from nnfmq.serialize.model_codec import encode_model

    operand = Operand(OperandType.TENSOR_FLOAT32, (1, 2, 3, 4), 0.0, 0, LifeTime.TEMPORARY_VARIABLE)

    def encoded(count: int) -> bytes:
        return bytes(encode_model(Model(Subgraph((operand,) * count, (), (), ())))[0])

    record_bytes = (len(encoded(2000)) - len(encoded(1000))) / 1000
    path.write_bytes(encoded(int(message_bytes / record_bytes) + 1))


def compiling(job: PhaseJob) -> Work:
    """Prepare the model on `compiled`; the driver must have no program cache."""
    with _connect(job) as client:
        device, model = client.device("compiled"), nnfmq.load(job.model)
        yield client.worker_pid
        while True:
            device.prepare(model, preference=ExecutionPreference.SUSTAINED_SPEED).close()
            yield "NONE"


def computing(job: PhaseJob) -> Work:
    """Execute a convolution of some tenths of a second on `compiled`."""
    yield from _execute(job, "compiled", 256, 128)


def interpreting(job: PhaseJob) -> Work:
    """Execute a convolution of some tenths of a second on `reference`."""
    yield from _execute(job, "reference", 128, 64)


def _execute(job: PhaseJob, device: str, size: int, channels: int) -> Work:
    from model_work import generate_model

    with _connect(job) as client:
        model = generate_model("convolution 3×3", "float32", size, channels)
        sustained = ExecutionPreference.SUSTAINED_SPEED
        with client.device(device).prepare(model, preference=sustained) as prepared, prepared.burst() as burst:
            yield client.worker_pid
            _clear(burst.inputs)
            while True:
                burst.execute(out=burst.outputs, timeout=job.limit_s)
                yield "NONE"


def idle(job: PhaseJob) -> Work:
    """Keep a burst of a small model open, and do nothing."""
    with _connect(job) as client, _small_burst(client) as burst:
        _clear(burst.inputs)
        burst.execute(out=burst.outputs)
        yield client.worker_pid
        while True:
            time.sleep(0.5)
            yield "NONE"


@contextmanager
def _small_burst(client: Client) -> Iterator[Any]:
    model = nnfmq.load(nnfmq.example_path("digits.tflite"))
    with client.device("compiled").prepare(model) as prepared, prepared.burst() as burst:
        yield burst


PHASES: dict[str, Callable[[PhaseJob], Work]] = {
    "copying": copying, "decoding": decoding, "compiling": compiling, "computing": computing,
    "interpreting": interpreting, "idle": idle,
}  # fmt: skip


# ---- connections


def silent_main(connection: Connection, socket: str, count: int, limit_s: int) -> None:
    """Open `count` connections that send nothing, and keep them until the parent closes its end. Entry point.

    The first half is opened at once; then "half" is sent, and the second half opened, while the parent goes on. At the
    end the number of the opened connections is sent.
    """
    from nnfmq.channel import Channel
    from nnfmq.deadlines import deadline_after

    set_time_limit(limit_s)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    channels = []
    try:
        for number in range(count):
            if number == count // 2:
                connection.send("half")
            with suppress(NnfmqError):
                channels.append(Channel.connect(Path(socket), deadline_after(2)))
        connection.send(len(channels))
        connection.recv()
    except EOFError:
        pass
    except OSError as error:
        connection.send(BenchmarkFailed(f"silent connections: {error}"))
    finally:
        for channel in channels:
            channel.close()
        connection.close()


def connect_main(connection: Connection, socket: str, limit_s: int) -> None:
    """For each number that the parent sends, connect that often; send the times in seconds, and the errors."""
    try:
        while True:
            set_time_limit(0)
            count = connection.recv()
            set_time_limit(limit_s)
            connection.send(_connect_often(socket, count))
    except EOFError:
        pass
    finally:
        connection.close()


def _connect_often(socket: str, count: int) -> tuple[list[float], list[str]]:
    times, errors = [], []
    for _ in range(count):
        begin = time.monotonic()
        try:
            client = nnfmq.connect(socket, timeout=_CONNECT_S)
        except NnfmqError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            times.append(time.monotonic() - begin)
            client.close()
    return times, errors


# ---- the neighbour


def neighbour_main(connection: Connection, job: PhaseJob) -> None:
    """Execute a burst of a small model, client and worker pinned to `job.cpus`. Entry point.

    Sends the worker's pid; then for each number of seconds that the parent sends, the times of the executions in ns.
    """
    set_time_limit(job.limit_s)
    try:
        with _connect(job) as client:
            cpu_pinning.pin_to(0, job.cpus)
            cpu_pinning.pin_to(client.worker_pid, job.cpus)
            with _small_burst(client) as burst:
                connection.send(client.worker_pid)
                while True:
                    set_time_limit(0)
                    seconds = connection.recv()
                    set_time_limit(job.limit_s)
                    connection.send(_burst_times(burst, seconds))
    except EOFError:
        pass
    except (NnfmqError, OSError) as error:
        connection.send(BenchmarkFailed(f"neighbour: {type(error).__name__}: {error}"))
    finally:
        connection.close()


def _clear(arrays: Iterable[Any]) -> None:
    for array in arrays:
        array[...] = 0


def _burst_times(burst: Any, seconds: float) -> list[int]:
    clock, times, outputs = time.perf_counter_ns, [], burst.outputs
    _clear(burst.inputs)
    end = clock() + int(seconds * 1e9)
    while (begin := clock()) < end:
        burst.execute(out=outputs)
        times.append(clock() - begin)
    return times
