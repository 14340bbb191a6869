"""The candidates of queue_bench.py: round trips between two processes, streams, codecs and bursts. One round of each.

A round runs in a child process, with a forked server: both ends of a queue exist before the fork, as in a driver. It
returns a Sample: times in ns, and other metrics by name. Both processes are pinned before they begin, the warm-up is
not recorded, and all times are of one clock. The garbage collector stays enabled, as in applications. The server is
killed when the round is done, when the process that forked it exits, or at its time limit.

Queues, pipes and iceoryx2 exchange 512 bytes for 64, about the size of a burst's packets. Queues and pipes are created
before the server is forked, which serves until it is killed; a server of iceoryx2 ends after the last message, and then
removes its files. The ping-pong in C is compiled with `cc` against the queue's own header; it measures the least time
that two processes need.

The codec's request has 20 records: two inputs and one output of rank 4, and three pools; the result has 7. Each batch
of calls is one value, so that the median ignores batches that another process disturbed; the cost of the loop itself is
measured before each batch and subtracted.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import shutil
import statistics
import struct
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from bench_support import CLIENT_WINDOW, SERVER_WINDOW
from forked_peers import Serve, forked, iceoryx2_service, receive_report

import nnfmq
import nnfmq.queue
from nnfmq.base import settings
from nnfmq.base.packages import installed_version
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.types import (
    DataLocation,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    OutputShape,
    Pool,
    RequestArgument,
    Subgraph,
)
from nnfmq.lab import placement
from nnfmq.lab.bench.steps import Array, timed
from nnfmq.lab.child_processes import RunnerUnavailable, set_time_limit
from nnfmq.queue import MessageQueue
from nnfmq.queue import core as cores
from nnfmq.queue.hybrid_polling import PollingWindow
from nnfmq.serialize import codec as codecs

# ---- a ping-pong in C


REQUEST_BYTES = 512
REPLY_BYTES = 64
REQUEST, REPLY = bytes(REQUEST_BYTES), bytes(REPLY_BYTES)
LAST = b"\xff" * REQUEST_BYTES
_REMOVAL_S = 5
_C_SOURCE = Path(__file__).with_name("c_pingpong.c")
_C_HEADERS = Path(nnfmq.queue.__file__).parent


def compile_c_pingpong(folder: Path) -> Path:
    """Compile the C ping-pong into `folder` and return the program's path.

    Raises:
        RunnerUnavailable: If there is no C compiler, or compiling fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RunnerUnavailable("no C compiler (cc, gcc, clang) for the C ping-pong")
    program = folder / "c_pingpong"
    command = [compiler, "-O3", "-std=gnu11", "-I", str(_C_HEADERS), "-o", str(program), str(_C_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RunnerUnavailable(f"{compiler} failed: {done.stderr.strip()}")
    return program


def run_c_pingpong(
    program: Path, count: int, warm_up: int, cpus: placement.Cpus, limit_s: int, mode: str = "spin"
) -> list[int]:  # fmt: skip
    """Run the C ping-pong once and return its `count` round trips in ns.

    `mode` is `spin`, which needs two CPUs, or `futex`, which sleeps and wakes for each message.

    Raises:
        RunnerUnavailable: If the program fails.
    """
    words = [mode, count, warm_up, cpus.client, cpus.driver, limit_s]
    command = [str(program), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + 5, check=False)
    if done.returncode:
        raise RunnerUnavailable(f"the C ping-pong ended with {done.returncode}: {done.stderr.strip()}")
    return [int(line) for line in done.stdout.split()]


# ---- rounds


DEFAULT_NS = settings.BURST_SERVER_POLLING_WINDOW.default * 1000
POLLING_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class RoundJob:
    """One round of one candidate; sent to the child process."""

    candidate: str
    count: int
    warm_up: int
    cpus: placement.Cpus
    folder: Path
    limit_s: int
    window_ns: int = DEFAULT_NS
    work_ns: int = 0
    think_ns: int = 0
    idle_s: float = 0

    def forked(self, serve: Serve) -> AbstractContextManager[tuple[Any, Connection]]:
        """Return the context of a server on the driver's CPU; see `forked_peers.forked`."""
        return forked(self.candidate, serve, self.limit_s, self.cpus.driver)


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one round: times of round trips in ns, and other metrics by name."""

    times_ns: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


# ---- codecs, and bursts that use several memories


RECORDS = 20
BATCHES, CALLS = 60, 500  # a batch is shorter than a time slice of the scheduler
MEMORIES = (1, 2, 8, 16)
Samples = dict[str, list[float]]
"""Operation → ns per call, one value for each batch."""


def samples(codec: ModuleType, batches: int = BATCHES, calls: int = CALLS) -> Samples:
    """Return ns per call of each operation of `codec`, a module that `codec.load` returned; takes milliseconds."""
    return {name: list(_measure(call, batches, calls)) for name, call in operations(codec).items()}


def operations(codec: ModuleType) -> dict[str, Callable[[], object]]:
    """Return the measured operations as functions without arguments."""
    arguments = codec_request()
    request_packet = codec.encode_request(*arguments)
    shapes = (OutputShape(_SHAPE),)
    result_packet = codec.encode_result(ErrorStatus.NONE, shapes)
    return {
        "encode request": lambda: codec.encode_request(*arguments),
        "decode request": lambda: codec.decode_request(request_packet),
        "encode result": lambda: codec.encode_result(ErrorStatus.NONE, shapes),
        "decode result": lambda: codec.decode_result(result_packet),
    }


_SHAPE = (1, 224, 224, 3)


def codec_request() -> tuple[tuple[RequestArgument, ...], tuple[RequestArgument, ...], tuple[int, ...]]:
    """Return inputs, outputs and slots of the request: 1 + 3 × 5 + 3 + 1 records."""
    arguments = [RequestArgument(location=DataLocation(pool, 64, 4096), dimensions=_SHAPE) for pool in range(3)]
    return tuple(arguments[:2]), tuple(arguments[2:]), (0, 1, 2)


def memory_trips(memory_count: int, count: int) -> list[int]:
    """Return the ns of `count` executions of the null model over a burst that uses so many memories in turn.

    The driver keeps the last eight requests bound. With more memories in turn it has to decode each and bind it again.
    """
    from nnfmq.base.memory import Memory
    from nnfmq.hal.feature_levels import FeatureLevel
    from nnfmq.lab.hidl import configure_burst

    with ExitStack() as stack:
        client = stack.enter_context(nnfmq.connect(embedded=True))
        model: object = stack.enter_context(client.device("reference").prepare(null_model()))
        memories = [stack.enter_context(Memory.create(4096)) for _ in range(memory_count)]
        requests, results = (stack.enter_context(MessageQueue.create(24, 1024)) for _ in range(2))
        status, burst = configure_burst(model, FeatureLevel.V1_3, _Memories(memories), requests, results)  # type: ignore[arg-type]
        assert status is ErrorStatus.NONE and burst is not None
        stack.callback(burst.close)
        inputs, outputs = ((RequestArgument(location=DataLocation(0, at, 4)),) for at in (0, 64))
        slots, window_ns = itertools.cycle(range(memory_count)), PollingWindow.controller().ns
        times = []
        for _ in range(count + memory_count):
            begin_ns = _clock()
            requests.send(codecs.encode_request(inputs, outputs, (next(slots),)))
            packet = results.receive(None, window_ns)
            assert packet is not None and codecs.decode_result(packet).status is ErrorStatus.NONE
            times.append(_clock() - begin_ns)
        return times[memory_count:]  # without the first use of each memory, which maps it


class _Memories:
    """The burst callback (IBurstCallback): slot n is the n-th memory."""

    def __init__(self, memories: Sequence[Pool]) -> None:
        self._memories = memories

    def getMemories(self, slots: Sequence[int]) -> tuple[ErrorStatus, list[Pool]]:
        return ErrorStatus.NONE, [self._memories[slot] for slot in slots]


def _measure(call: Callable[[], object], batches: int, calls: int) -> Iterator[float]:
    for _ in range(batches):
        yield max(0.0, _batch_ns(call, calls) - _batch_ns(_nothing, calls)) / calls


def _batch_ns(call: Callable[[], object], calls: int) -> int:
    begin_ns = time.perf_counter_ns()
    for _ in itertools.repeat(None, calls):
        call()
    return time.perf_counter_ns() - begin_ns


def _nothing() -> None:
    """An empty call, whose cost is subtracted."""


# ---- the null model


def null_model() -> Model:
    """Return the null model: RESHAPE of one float32 to one float32."""
    operands = (
        Operand(OperandType.TENSOR_FLOAT32, (1,), lifetime=LifeTime.SUBGRAPH_INPUT),
        Operand(OperandType.TENSOR_INT32, (1,), lifetime=LifeTime.CONSTANT_COPY, location=DataLocation(0, 0, 4)),
        Operand(OperandType.TENSOR_FLOAT32, (1,), lifetime=LifeTime.SUBGRAPH_OUTPUT),
    )
    reshape = Operation(OperationType.RESHAPE, (0, 1), (2,))
    return Model(Subgraph(operands, (reshape,), (0,), (2,)), operand_values=struct.pack("<i", 1))


# ---- candidates


RECORD_BYTES, BATCH = 24, 64


def measured(job: RoundJob) -> Sample:
    """Return the measurements of a round. Called in a process of its own, which ends at the job's limit."""
    set_time_limit(job.limit_s)
    return CANDIDATES[job.candidate](job)


# ---- round trips ----


SendReceive = tuple[Callable[[Any], Any], Callable[[Any, int], Any]]
"""With the signatures of the queue's methods."""


class Transport(Protocol):
    """A way to exchange messages."""

    def serve(self, ready: Callable[[], None]) -> None:
        """In the server: call `ready` as soon as requests may come, then reply to them."""
        ...

    def connect(self) -> SendReceive:
        """In the client, when the server is ready: return (send, receive)."""
        ...

    def close(self) -> None:
        """In the client, at the end."""
        ...


class OsPipes:
    """Two os.pipe, blocking: the means of the kernel and plain Python."""

    def __init__(self) -> None:
        self._requests, self._replies = os.pipe(), os.pipe()

    def serve(self, ready: Callable[[], None]) -> None:
        """Reply to each 512 bytes with 64."""
        ready()
        read_end, write_end = self._requests[0], self._replies[1]
        while True:
            os.read(read_end, REQUEST_BYTES)
            os.write(write_end, REPLY)

    def connect(self) -> SendReceive:
        """Return write and read of the client's two ends."""
        write_end, read_end = self._requests[1], self._replies[0]
        return lambda data: os.write(write_end, data), lambda deadline_ns, window_ns: os.read(read_end, REPLY_BYTES)

    def close(self) -> None:
        """Close both pipes."""
        for fd in (*self._requests, *self._replies):
            os.close(fd)


class MultiprocessingPipe:
    """A multiprocessing.Pipe, which is two Unix sockets: the means of Python's standard library."""

    def __init__(self) -> None:
        self._client, self._server = multiprocessing.Pipe()

    def serve(self, ready: Callable[[], None]) -> None:
        """Reply to each 512 bytes with 64."""
        ready()
        while True:
            self._server.recv_bytes()
            self._server.send_bytes(REPLY)

    def connect(self) -> SendReceive:
        """Return send_bytes and recv_bytes."""
        return self._client.send_bytes, lambda deadline_ns, window_ns: self._client.recv_bytes()

    def close(self) -> None:
        """Close both ends."""
        self._client.close()
        self._server.close()


class _Message512(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint8 * REQUEST_BYTES),)


class _Message64(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint8 * REPLY_BYTES),)


class _Iceoryx:
    """Base class for iceoryx2: names that no other run uses, and a server that exits on request and removes files."""

    def __init__(self, folder: Path) -> None:
        if installed_version("iceoryx2") is None:
            raise RunnerUnavailable("iceoryx2 is not installed: pip install 'nnfmq[bench]'")
        self._name = f"nnfmq-bench-{folder.name}"
        self._send: Callable[[Any], Any] | None = None

    def _builder(self, suffix: str) -> Any:
        self._node, builder = iceoryx2_service(self._name + suffix)
        return builder

    def close(self) -> None:
        """Ask the server to exit; it removes its files."""
        if self._send is not None:
            self._send(_Message512.from_buffer_copy(LAST))


class IceoryxPubSub(_Iceoryx):
    """iceoryx2, a service in each direction; both sides poll."""

    def _ports(self, out: tuple[str, Any], into: tuple[str, Any]) -> tuple[Any, Any]:
        publisher = self._builder(out[0]).publish_subscribe(out[1]).open_or_create().publisher_builder().create()
        service = self._builder(into[0]).publish_subscribe(into[1]).open_or_create()
        return publisher, service.subscriber_builder().create()

    def serve(self, ready: Callable[[], None]) -> None:
        """Reply to each sample with one of 64 bytes, until the last."""
        publisher, subscriber = self._ports(("-replies", _Message64), ("-requests", _Message512))
        reply, is_last = _Message64(), False
        ready()
        while not is_last:
            sample = subscriber.receive()
            if sample is not None:
                is_last = sample.payload().contents.data[0] == LAST[0]
                publisher.send_copy(reply)

    def connect(self) -> SendReceive:
        """Return send_copy, and a receive that polls."""
        publisher, subscriber = self._ports(("-requests", _Message512), ("-replies", _Message64))
        request = _Message512()
        self._send = publisher.send_copy

        def receive(deadline_ns: int | None, window_ns: int) -> Any:
            while (sample := subscriber.receive()) is None:
                pass
            return sample.payload().contents

        return lambda data: publisher.send_copy(request), receive


class IceoryxRequestResponse(_Iceoryx):
    """iceoryx2, requests and their responses; both sides poll."""

    def _service(self) -> Any:
        return self._builder("-calls").request_response(_Message512, _Message64).open_or_create()

    def serve(self, ready: Callable[[], None]) -> None:
        """Reply to each request with 64 bytes, until the last."""
        server = self._service().server_builder().create()
        reply, is_last = _Message64(), False
        ready()
        while not is_last:
            request = server.receive()
            if request is not None:
                is_last = request.payload().contents.data[0] == LAST[0]
                request.send_copy(reply)

    def connect(self) -> SendReceive:
        """Return a send that stores the pending response, and a receive that polls it."""
        client = self._service().client_builder().create()
        request = _Message512()
        self._send = client.send_copy
        pending: list[Any] = [None]

        def send(data: bytes) -> None:
            pending[0] = client.send_copy(request)

        def receive(deadline_ns: int | None, window_ns: int) -> Any:
            while (response := pending[0].receive()) is None:
                pass
            return response.payload().contents

        return send, receive


class Queues:
    """A queue for requests and one for replies, with the given core and, for the Python core, the given atomics."""

    def __init__(self, window_ns: int, core: str = "compiled", atomics: str | None = None) -> None:
        if atomics is not None:
            _force_atomics(atomics)
        using = cores.CORES.load(core)
        self._window_ns = window_ns
        self._requests = MessageQueue.create(len(REQUEST), 8, core=using)
        self._replies = MessageQueue.create(len(REPLY), 8, core=using)

    def serve(self, ready: Callable[[], None]) -> None:
        """Reply to each request with 64 bytes."""
        receive, send, window_ns = self._requests.receive, self._replies.send, self._window_ns
        ready()
        while True:
            receive(None, window_ns)
            send(REPLY)

    def serve_working(self, ready: Callable[[], None], work_ns: int) -> None:
        """Compute for `work_ns` per request; the first 8 bytes of the reply are the time that this really took."""
        receive, send, window_ns, clock = self._requests.receive, self._replies.send, self._window_ns, _clock
        ready()
        while True:
            receive(None, window_ns)
            begin = clock()
            while (worked := clock() - begin) < work_ns:
                pass
            send(worked.to_bytes(8, "little") + REPLY[8:])

    def connect(self) -> SendReceive:
        """Return the queues' own send and receive."""
        return self._requests.send, self._replies.receive

    def close(self) -> None:
        """Close both queues."""
        self._requests.close()
        self._replies.close()


def _force_atomics(name: str) -> None:
    from nnfmq.queue import _pycore, futex

    try:
        _pycore._atomics = getattr(futex, name)()
    except OSError as error:
        raise RunnerUnavailable(f"{name} is not available: {error} (install libatomic1)") from None


_clock = time.perf_counter_ns


def _round_trip_candidate(make: Callable[[RoundJob], Transport]) -> Callable[[RoundJob], Sample]:
    """Return the candidate that measures round trips over a transport."""

    def run(job: RoundJob) -> Sample:
        transport = make(job)
        with job.forked(lambda ready, _: transport.serve(ready)) as (process, _):
            with closing(transport):
                placement.pin_process(0, job.cpus.client)
                send, receive = transport.connect()
                _round_trips(send, receive, job.window_ns, job.warm_up)
                samples = _round_trips(send, receive, job.window_ns, job.count)
            if isinstance(transport, _Iceoryx):
                process.join(_REMOVAL_S)  # the server removes its files
        return Sample(samples)

    return run


def _round_trips(send: Any, receive: Any, window_ns: int, count: int) -> list[int]:
    clock, samples = _clock, [0] * count
    for index in range(count):
        begin = clock()
        send(REQUEST)
        receive(None, window_ns)
        samples[index] = clock() - begin
    return samples


def _c(mode: str) -> Callable[[RoundJob], Sample]:
    def run(job: RoundJob) -> Sample:
        program = job.folder.parent / "c_pingpong"
        if not program.exists():
            program = compile_c_pingpong(job.folder.parent)
        return Sample(run_c_pingpong(program, job.count, job.warm_up, job.cpus, job.limit_s, mode))

    return run


def _working(job: RoundJob) -> Sample:
    """Measure the overhead: each round trip minus the work in it, as measured by the server."""
    queues = Queues(job.window_ns)
    with closing(queues), job.forked(lambda ready, _: queues.serve_working(ready, job.work_ns)):
        placement.pin_process(0, job.cpus.client)
        _overheads(queues, job, job.warm_up)
        wall, cpu = _clock(), time.process_time_ns()
        samples = _overheads(queues, job, job.count)
        share = (time.process_time_ns() - cpu) / (_clock() - wall)
    return Sample(samples, {"client_cpu_percent": 100 * share})


def _overheads(queues: Queues, job: RoundJob, count: int) -> list[int]:
    (send, receive), clock, window_ns, samples = queues.connect(), _clock, job.window_ns, []
    for _ in range(count):
        begin = clock()
        while clock() - begin < job.think_ns:
            pass
        begin = clock()
        send(REQUEST)
        reply = receive(None, window_ns)
        samples.append(clock() - begin - int.from_bytes(reply[:8], "little"))
    return samples


# ---- streams ----


def _stream(quantum: int, count: int, batch: int, has_checksum: bool) -> Callable[[RoundJob], Sample]:
    """Return the candidate that sends messages one way through a queue of `count` records; both sides poll."""

    def run(job: RoundJob) -> Sample:
        queue, total = MessageQueue.create(quantum, count), job.count * batch * quantum

        def read(ready: Callable[[], None], results: Connection) -> None:
            receive, got, crc = queue.receive, 0, 0
            ready()
            while got < total:
                data = receive(None, POLLING_NS) or b""
                got += len(data)
                if has_checksum:
                    crc = zlib.crc32(data, crc)
            results.send((_clock(), crc))

        batches = [os.urandom(batch * quantum) for _ in range(16)]
        with queue, job.forked(read) as (_, results):
            placement.pin_process(0, job.cpus.client)
            send, crc, begin = queue.send, 0, _clock()
            for index in range(job.count):
                data = batches[index & 15]
                while not send(data):
                    pass
                if has_checksum:
                    crc = zlib.crc32(data, crc)
            ended, got_crc = receive_report(results, job.candidate)
        metrics = {"per_second": job.count * batch / (ended - begin) * 1e9}
        return Sample(metrics=metrics | ({"checksums_equal": float(got_crc == crc)} if has_checksum else {}))

    return run


def _stream_os_pipe(job: RoundJob) -> Sample:
    read_end, write_end = os.pipe()
    total = job.count * len(REQUEST)

    def read(ready: Callable[[], None], results: Connection) -> None:
        got = 0
        ready()
        while got < total:
            got += len(os.read(read_end, 1 << 16))
        results.send(_clock())

    with job.forked(read) as (_, results):
        placement.pin_process(0, job.cpus.client)
        begin = _clock()
        for _ in range(job.count):
            os.write(write_end, REQUEST)
        seconds = (receive_report(results, job.candidate) - begin) / 1e9
    return Sample(metrics={"per_second": job.count / seconds})


# ---- idle ----


def _idle(job: RoundJob) -> Sample:
    """Measure, from outside, a process that waits in receive after its polling window has passed."""
    queues = Queues(job.window_ns)
    with closing(queues), job.forked(lambda ready, _: queues.serve(ready)) as (process, _):
        placement.pin_process(0, job.cpus.client)
        send, receive = queues.connect()
        _round_trips(send, receive, job.window_ns, job.warm_up)
        time.sleep(0.2 + job.window_ns / 1e9)
        before = _cpu_cost(process.pid)
        time.sleep(job.idle_s)
        after = _cpu_cost(process.pid)
    return Sample(metrics={name: after[name] - value for name, value in before.items()} | {"seconds": job.idle_s})


def _cpu_cost(pid: int) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    run_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return {"cpu_seconds": run_ns / 1e9, "wake_ups": float(status["voluntary_ctxt_switches"])}


# ---- model and codec ----


def _null_burst(*, is_copied: bool) -> Callable[[RoundJob], Sample]:
    """Return the candidate that executes the null model over a burst, with new arrays or its own shared ones."""

    def run(job: RoundJob) -> Sample:
        os.environ[CLIENT_WINDOW] = os.environ[SERVER_WINDOW] = str(job.window_ns // 1000)
        with (
            nnfmq.connect(embedded=True) as client,
            client.device("reference").prepare(null_model(), timeout=job.limit_s) as prepared,
            prepared.burst() as burst,
        ):
            # Pinning comes last: when a burst is created, a process that may use one CPU decides not to poll.
            placement.pin_process(0, job.cpus.client)
            placement.pin_process(client.worker_pid, job.cpus.driver)
            inputs = [np.ones(info.shape, info.dtype) for info in prepared.inputs]
            for target, array in zip(burst.inputs, inputs, strict=True):
                target[...] = array
            outputs = burst.outputs

            def in_place(_: Sequence[Array]) -> Sequence[Array]:
                return burst.execute(out=outputs, timeout=job.limit_s)

            def copied(arrays: Sequence[Array]) -> Sequence[Array]:
                return burst.execute(*arrays, timeout=job.limit_s)

            step = copied if is_copied else in_place
            timed(step, inputs, job.warm_up)
            return Sample(timed(step, inputs, job.count))

    return run


def _codec(name: str) -> Callable[[RoundJob], Sample]:
    """Return the candidate that measures a codec: the medians of its operations, in µs."""

    def run(job: RoundJob) -> Sample:
        try:
            codec = codecs.CORES.load(name)
        except ImportError:
            raise RunnerUnavailable(f"the {name} codec is not built here") from None
        placement.pin_process(0, job.cpus.client)
        found = samples(codec)
        return Sample(metrics={f"{name} µs": statistics.median(times) / 1000 for name, times in found.items()})

    return run


def _memories(count: int) -> Callable[[RoundJob], Sample]:
    return lambda job: Sample(memory_trips(count, job.count))


# ---- under load ----


@contextmanager
def busy_cpu(limit_s: int, cpu: int | None) -> Iterator[None]:
    """Run a process that computes on `cpu` meanwhile. The calling process must be able to fork."""

    def compute(ready: Callable[[], None], _: Connection) -> None:
        ready()
        while True:
            pass

    with forked("busy CPU", compute, limit_s, cpu):
        yield


def _under_load(candidate: Callable[[RoundJob], Sample]) -> Callable[[RoundJob], Sample]:
    def run(job: RoundJob) -> Sample:
        with busy_cpu(job.limit_s, placement.choose("apart", 0).client):
            return candidate(job)

    return run


_QUEUES = _round_trip_candidate(lambda job: Queues(job.window_ns))
_PIPES = _round_trip_candidate(lambda _: OsPipes())


def _python_core_candidate(atomics: str) -> Callable[[RoundJob], Sample]:
    return _round_trip_candidate(lambda job: Queues(job.window_ns, "python", atomics))


CANDIDATES: dict[str, Callable[[RoundJob], Sample]] = {
    "nnfmq": _QUEUES,
    "C spin": _c("spin"),
    "C futex": _c("futex"),
    "os.pipe": _PIPES,
    "multiprocessing.Pipe": _round_trip_candidate(lambda job: MultiprocessingPipe()),
    "iceoryx2 pub-sub": _round_trip_candidate(lambda job: IceoryxPubSub(job.folder)),
    "iceoryx2 request-response": _round_trip_candidate(lambda job: IceoryxRequestResponse(job.folder)),
    "nnfmq under load": _under_load(_QUEUES),
    "os.pipe under load": _under_load(_PIPES),
    "nnfmq stream": _stream(len(REQUEST), 256, 1, False),
    "os.pipe stream": _stream_os_pipe,
    "nnfmq batches": _stream(RECORD_BYTES, 4096, BATCH, True),
    "nnfmq with work": _working,
    "nnfmq idle": _idle,
    "burst in place": _null_burst(is_copied=False),
    "burst copied": _null_burst(is_copied=True),
    "codec": _codec("compiled"),
    "codec, python": _codec("python"),
    **{f"burst, {count} memories": _memories(count) for count in MEMORIES},
    "python, libatomic": _python_core_candidate("LibAtomic"),
    "python, FUTEX_WAKE_OP": _python_core_candidate("KernelAtomic"),
}
