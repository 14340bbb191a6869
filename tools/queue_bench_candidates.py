"""The candidates of queue_bench.py: each runs one round in a child process, with a forked server.

A round returns a Sample: times in ns, and other metrics by name. Both processes are pinned before they begin, the
warm-up is not recorded, and all times are of one clock. The garbage collector stays enabled, as in applications. The
server is killed when this process exits, and this process has a time limit.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import latency_baselines
from bench_processes import set_time_limit
from queue_bench_server import POLLING_NS, RoundJob, Sample, forked, receive_report
from queue_bench_transports import REPLY, REQUEST, TRANSPORTS, SendReceive, Transport

from nnfmq.hal.errors import NnfmqError
from nnfmq.measure import cpu_pinning
from nnfmq.measure.failures import BenchmarkFailed, RunnerUnavailable
from nnfmq.queue import MessageQueue
from nnfmq.queue import core as cores

RECORD_BYTES, BATCH = 24, 64


def child_main(results: Connection, job: RoundJob) -> None:
    """Run the job and send its Sample, or the exception that explains why there is none."""
    set_time_limit(job.limit_s)
    try:
        results.send(CANDIDATES[job.candidate](job))
    except RunnerUnavailable as missing:
        results.send(missing)
    except (BenchmarkFailed, NnfmqError, ImportError, OSError) as error:
        results.send(BenchmarkFailed(f"{job.candidate}: {type(error).__name__}: {error}"))
    finally:
        results.close()


# ---- round trips ----


class Queues:
    """A queue for requests and one for replies, with the given core and, for the Python core, the given atomics."""

    def __init__(self, window_ns: int, core: str = "compiled", atomics: str | None = None) -> None:
        if atomics is not None:
            _force_atomics(atomics)
        using = cores.load(core)
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

    def end(self) -> None:
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
        with forked(job, job.cpus.driver, lambda ready, _: transport.serve(ready)) as (process, _):
            cpu_pinning.pin_process(0, job.cpus.client)
            send, receive = transport.connect()
            _round_trips(send, receive, job.window_ns, job.warm_up)
            samples = _round_trips(send, receive, job.window_ns, job.count)
            transport.end()
            if job.candidate.startswith("iceoryx2"):
                process.join(5)  # the server removes its files
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
            program = latency_baselines.compile_c_pingpong(job.folder.parent)
        return Sample(latency_baselines.run_c_pingpong(program, job.count, job.warm_up, job.cpus, job.limit_s, mode))

    return run


def _multiprocessing_pipe(job: RoundJob) -> Sample:
    with latency_baselines.PipeServer.start(job.cpus.driver, job.limit_s) as pipe:
        cpu_pinning.pin_process(0, job.cpus.client)
        return Sample(pipe.round(job.count, job.warm_up))


def _working(job: RoundJob) -> Sample:
    """Measure the overhead: each round trip minus the work in it, as measured by the server."""
    queues = Queues(job.window_ns)
    with forked(job, job.cpus.driver, lambda ready, _: queues.serve_working(ready, job.work_ns)):
        cpu_pinning.pin_process(0, job.cpus.client)
        _overheads(queues, job, job.warm_up)
        wall, cpu = _clock(), time.process_time_ns()
        samples = _overheads(queues, job, job.count)
        share = (time.process_time_ns() - cpu) / (_clock() - wall)
        queues.end()
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
        with queue, forked(job, job.cpus.driver, read) as (_, results):
            cpu_pinning.pin_process(0, job.cpus.client)
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

    with forked(job, job.cpus.driver, read) as (_, results):
        cpu_pinning.pin_process(0, job.cpus.client)
        begin = _clock()
        for _ in range(job.count):
            os.write(write_end, REQUEST)
        seconds = (receive_report(results, job.candidate) - begin) / 1e9
    return Sample(metrics={"per_second": job.count / seconds})


# ---- idle ----


def _idle(job: RoundJob) -> Sample:
    """Measure, from outside, a process that waits in receive after its polling window has passed."""
    queues = Queues(job.window_ns)
    with forked(job, job.cpus.driver, lambda ready, _: queues.serve(ready)) as (process, _):
        cpu_pinning.pin_process(0, job.cpus.client)
        send, receive = queues.connect()
        _round_trips(send, receive, job.window_ns, job.warm_up)
        time.sleep(0.2 + job.window_ns / 1e9)
        before = _cpu_cost(process.pid)
        time.sleep(job.idle_s)
        after = _cpu_cost(process.pid)
        queues.end()
    return Sample(metrics={name: after[name] - value for name, value in before.items()} | {"seconds": job.idle_s})


def _cpu_cost(pid: int) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    run_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return {"cpu_seconds": run_ns / 1e9, "wake_ups": float(status["voluntary_ctxt_switches"])}


# ---- model and codec ----


def _burst(path: str) -> Callable[[RoundJob], Sample]:
    def run(job: RoundJob) -> Sample:
        import latency_client as client

        os.environ[client.CLIENT_WINDOW] = os.environ[client.SERVER_WINDOW] = str(job.window_ns // 1000)
        plan = client.LatencyPlan(
            connect="embedded", device="reference", model=None, only="null", counts={}, warm_up=job.warm_up, clients=1,
            placement="apart", window_us=None, rounds=1, limit_s=job.limit_s,
        )  # fmt: skip
        return Sample(client.null_burst(plan, path, job.count, job.cpus))

    return run


def _codec(job: RoundJob) -> Sample:
    """Return the medians, in µs, of the measurements of codec_bench.py with the compiled codec."""
    import statistics

    try:
        import codec_bench  # type: ignore[import-not-found, unused-ignore]

        from nnfmq.serialize import codec as codecs  # type: ignore[attr-defined, unused-ignore]

        compiled = codecs.load("compiled")
    except ImportError:
        raise RunnerUnavailable("the compiled codec and tools/codec_bench.py are not built here") from None
    cpu_pinning.pin_process(0, job.cpus.client)
    found = codec_bench.samples(compiled)
    return Sample(metrics={f"{name} µs": statistics.median(times) / 1000 for name, times in found.items()})


# ---- under load ----


@contextmanager
def busy_cpu(limit_s: int, cpu: int | None) -> Iterator[None]:
    """Run a process that computes on `cpu` meanwhile. The calling process must be able to fork."""
    job = RoundJob("busy CPU", 0, 0, cpu_pinning.Cpus(None, None), Path(), limit_s)

    def compute(ready: Callable[[], None], _: Connection) -> None:
        ready()
        while True:
            pass

    with forked(job, cpu, compute):
        yield


def _under_load(candidate: Callable[[RoundJob], Sample]) -> Callable[[RoundJob], Sample]:
    def run(job: RoundJob) -> Sample:
        with busy_cpu(job.limit_s, cpu_pinning.choose("apart", 0).client):
            return candidate(job)

    return run


_QUEUES = _round_trip_candidate(lambda job: Queues(job.window_ns))
_PIPES = _round_trip_candidate(lambda job: TRANSPORTS["os.pipe"](job.folder))


def _python_core_candidate(atomics: str) -> Callable[[RoundJob], Sample]:
    return _round_trip_candidate(lambda job: Queues(job.window_ns, "python", atomics))


def _transport_candidate(name: str) -> Callable[[RoundJob], Sample]:
    return _round_trip_candidate(lambda job: TRANSPORTS[name](job.folder))


CANDIDATES: dict[str, Callable[[RoundJob], Sample]] = {
    "nnfmq": _QUEUES,
    "C spin": _c("spin"),
    "C futex": _c("futex"),
    "multiprocessing.Pipe": _multiprocessing_pipe,
    **{name: _transport_candidate(name) for name in TRANSPORTS},
    "nnfmq under load": _under_load(_QUEUES),
    "os.pipe under load": _under_load(_PIPES),
    "nnfmq stream": _stream(len(REQUEST), 256, 1, False),
    "os.pipe stream": _stream_os_pipe,
    "nnfmq batches": _stream(RECORD_BYTES, 4096, BATCH, True),
    "nnfmq with work": _working,
    "nnfmq idle": _idle,
    "burst in place": _burst("in-place"),
    "burst copied": _burst("burst"),
    "codec": _codec,
    "python, libatomic": _python_core_candidate("LibAtomic"),
    "python, FUTEX_WAKE_OP": _python_core_candidate("KernelAtomic"),
}
