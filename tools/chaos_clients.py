"""The clients of `tools/chaos.py`: scripts of calls that together pass every step, and a neighbour.

A client is a fork of the tool. It makes the calls of one script, and sends what came of each: its name, its status, and
when it began and ended. It compares every output with NumPy's. A call has a time limit, after which it has hung.
"""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import nnfmq
from nnfmq.base.channel import close_all
from nnfmq.hal.errors import ErrorStatus, NnfmqError, status_for_error
from nnfmq.hal.types import (
    DataLocation,
    DeviceStatus,
    ExecutionPreference,
    LifeTime,
    Model,
    Operand,
    OperandType,
    Operation,
    OperationType,
    Request,
    RequestArgument,
    Subgraph,
)
from nnfmq.observe.driver_statistics import ModelCounts
from nnfmq.observe.statistics_layout import bucket_of
from nnfmq.serialize import messages

CALL_S = 20.0
"""The time limit of a call."""
CHANGE_S = 60.0
"""The time limit of a change of the repository's models, which includes retries after 1 and 2 s."""
WRONG = "WRONG OUTPUT"
"""The status of a call whose output was not NumPy's."""
SURPLUS = 3
"""More connections than the tool's driver accepts from one process."""
_ELEMENTS = 64
_WIDTH = 256
"""Of a product: workers share the constants of a program from 64 KiB on."""


class Call(NamedTuple):
    """A call of a client: its name, the name of its status, and its times (monotonic clock, ns)."""

    name: str
    status: str
    text: str
    begin_ns: int
    end_ns: int


class Account(NamedTuple):
    """Whose a client is, and which driver it trusts, if the driver serves several users."""

    uid: int
    server_uid: int


class ChaosClient:
    """One client's calls. `folder` is its own, `models` the directory of the driver's models.

    `account` is None if the driver serves one user, who is the client's.
    """

    def __init__(self, socket: str, folder: Path, models: Path, seed: int, account: Account | None = None) -> None:
        self.socket = socket
        self.account = account
        self.folder = folder
        self.models = models
        self.seed = seed
        self.numbers = np.random.default_rng(seed)
        self.calls: list[Call] = []

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Record a block as a call. Its error ends the script."""
        begin = time.monotonic_ns()
        try:
            yield
        except (NnfmqError, OSError, MemoryError) as error:
            status = status_for_error(error).name if isinstance(error, NnfmqError) else type(error).__name__
            self.calls.append(Call(name, status, str(error)[:300], begin, time.monotonic_ns()))
            raise ScriptEnded from error
        self.calls.append(Call(name, ErrorStatus.NONE.name, "", begin, time.monotonic_ns()))

    def check(self, name: str, found: Any, expected: Any) -> None:
        """Record a wrong output."""
        if not np.array_equal(found, expected):
            now = time.monotonic_ns()
            self.calls.append(Call(name, WRONG, f"{np.ravel(found)[:4]} instead of {np.ravel(expected)[:4]}", now, now))

    def connect(self, stack: ExitStack) -> nnfmq.Client:
        """Connect; `stack` disconnects."""
        with self.call("connect"):
            client = self.connected()
        stack.callback(client.close)
        return client

    def connected(self) -> nnfmq.Client:
        """Return a new client of the driver."""
        return connected(self.socket, self.account)

    @contextmanager
    def administering(self) -> Iterator[None]:
        """Make a call that only an administrator of the driver may make: another user's is refused."""
        try:
            yield
        except nnfmq.GeneralFailure as error:
            if self.account is None or "does not administer this driver" not in str(error):
                raise

    def array(self) -> Any:
        """Return a random input."""
        return self.numbers.standard_normal(_ELEMENTS, np.float32)


def connected(socket: str, account: Account | None) -> nnfmq.Client:
    """Return a new client of the driver, which trusts the driver's account."""
    server_uid = None if account is None else account.server_uid
    return nnfmq.connect(socket, timeout=CALL_S, recover=False, server_uid=server_uid)


class ScriptEnded(Exception):
    """A call of the script has failed."""


_TENSOR = OperandType.TENSOR_FLOAT32
_ZERO = struct.pack("<i", 0)


def sum_model() -> Model:
    """Return a model that adds two inputs."""
    ends = (LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_INPUT, LifeTime.SUBGRAPH_OUTPUT)
    a, b, output = (Operand(_TENSOR, (_ELEMENTS,), lifetime=lifetime) for lifetime in ends)
    none = Operand(OperandType.INT32, lifetime=LifeTime.CONSTANT_COPY, location=DataLocation(0, 0, 4))
    add = Operation(OperationType.ADD, (0, 1, 2), (3,))
    return Model(Subgraph((a, b, none, output), (add,), (0, 1), (3,)), operand_values=_ZERO)


def product_model(weights: Any) -> Model:
    """Return a model that multiplies a row by the transposed weights, which the program keeps in another layout."""
    row = Operand(_TENSOR, (1, _WIDTH), lifetime=LifeTime.SUBGRAPH_INPUT)
    output = Operand(_TENSOR, (1, _WIDTH), lifetime=LifeTime.SUBGRAPH_OUTPUT)
    values, constants = bytearray(), []
    for kind, data, shape in (
        (_TENSOR, weights.tobytes(), weights.shape),
        (_TENSOR, bytes(4 * _WIDTH), (_WIDTH,)),
        (OperandType.INT32, _ZERO, ()),
    ):
        location = DataLocation(0, len(values), len(data))
        constants.append(Operand(kind, shape, lifetime=LifeTime.CONSTANT_COPY, location=location))
        values += data
    product = Operation(OperationType.FULLY_CONNECTED, (0, 1, 2, 3), (4,))
    return Model(Subgraph((row, *constants, output), (product,), (0,), (4,)), operand_values=bytes(values))


# ----------------------------------------------------------------------------------------------------------------------
# The scripts


def executions(own: ChaosClient) -> None:
    """Ask for everything of the devices, prepare a model, and execute it in every mode but bursts."""
    with ExitStack() as stack:
        client = own.connect(stack)
        with own.call("queries"):
            client.devices(timeout=CALL_S)
            client.statistics_memory(timeout=CALL_S).close()
            with own.administering():
                client.set_device_status("reference", DeviceStatus.AVAILABLE, timeout=CALL_S)
            client.set_client_class("normal", timeout=CALL_S)
        with own.call("prepare"):
            device, model = client.device("reference", timeout=CALL_S), sum_model()
            device.capabilities(timeout=CALL_S)
            device.supported_operations(model, timeout=CALL_S)
            prepared = stack.enter_context(device.prepare(model, timeout=CALL_S))
        a, b = own.array(), own.array()
        for name, execute in _MODES.items():
            with own.call(name):
                found = execute(prepared, a, b)
            own.check(name, found, a + b)
        _buffers(own, device, prepared, a, b)
        _rare_calls(own, client)


def _reusable(model: nnfmq.PreparedModel, a: Any, b: Any) -> Any:
    with model.create_reusable_execution() as execution:
        (found,) = execution.compute(a, b, timeout=CALL_S)
        with execution.compute_fenced() as launched:
            launched.result(CALL_S)
        return found.copy()


def _fenced(model: nnfmq.PreparedModel, a: Any, b: Any) -> Any:
    with model.execute_fenced(a, b) as launched:
        (found,) = launched.result(CALL_S)
        _ = launched.info
        return found


_MODES: dict[str, Callable[[nnfmq.PreparedModel, Any, Any], Any]] = {
    "execute": lambda model, a, b: model.execute(a, b, timeout=CALL_S)[0],
    "execute_async": lambda model, a, b: model.execute_async(a, b).result(CALL_S)[0],
    "execute_fenced": _fenced,
    "reusable execution": _reusable,
}


def _buffers(own: ChaosClient, device: nnfmq.Device, prepared: nnfmq.PreparedModel, a: Any, b: Any) -> None:
    with own.call("buffers"), ExitStack() as stack:
        source = stack.enter_context(device.allocate(inputs=[(prepared, 0)], timeout=CALL_S))
        target = stack.enter_context(device.allocate(outputs=[(prepared, 0)], timeout=CALL_S))
        source.copy_from(a, timeout=CALL_S)
        prepared.execute(source, b, out=[target], timeout=CALL_S)
        found = target.array(timeout=CALL_S)
    own.check("buffers", found, a + b)


def _rare_calls(own: ChaosClient, client: nnfmq.Client) -> None:
    """Make the calls that applications do not make: of the trace, and of a hosted runtime, which this device is not."""
    connection = client.connection
    deadline_ns = time.monotonic_ns() + int(CALL_S * 1e9)
    with own.call("rare calls"), nnfmq.Memory.create(4096, "chaos") as memory:
        start = messages.StartTrace(connection.next_call_id())
        connection.exchange(start, messages.Reply, [memory.fileno()], deadline_ns)
        trace = messages.TraceDriver(connection.next_call_id())
        with own.administering():
            connection.exchange(trace, messages.DriverTraced, (), deadline_ns, on_fds=close_all)
        describe = messages.DescribeFile(connection.next_call_id(), "reference", -1, b"{}", ())
        connection.exchange(describe, messages.FileDescription, (), deadline_ns, on_fds=close_all)


def bursts(own: ChaosClient) -> None:
    """Execute over a burst, over one of requests whose memory is freed, and over one of AIDL."""
    with ExitStack() as stack:
        client = own.connect(stack)
        with own.call("prepare"):
            prepared = stack.enter_context(
                client.device("reference", timeout=CALL_S).prepare(sum_model(), timeout=CALL_S)
            )
        with own.call("configure"):
            burst = stack.enter_context(prepared.burst(timeout=CALL_S))
        for _ in range(4):
            a, b = own.array(), own.array()
            with own.call("burst"):
                (found,) = burst.execute(a, b, timeout=CALL_S)
            own.check("burst", found, a + b)
        with own.call("burst error"):
            question = messages.GetBurstError(client.connection.next_call_id(), burst.channel.burst_id)
            client.connection.exchange(question, messages.BurstError, (), time.monotonic_ns() + int(CALL_S * 1e9))
        _requests(own, prepared)


def _requests(own: ChaosClient, prepared: nnfmq.PreparedModel) -> None:
    size = 4 * _ELEMENTS
    with ExitStack() as stack:
        memory = stack.enter_context(nnfmq.Memory.create(3 * size, "chaos"))
        places = [RequestArgument(location=DataLocation(0, place * size, size)) for place in range(3)]
        request = Request(tuple(places[:2]), (places[2],), (memory,))
        floats = np.frombuffer(memory.view, np.float32)
        a, b = own.array(), own.array()
        floats[: 2 * _ELEMENTS] = np.concatenate([a, b])
        with own.call("requests"):
            burst = stack.enter_context(prepared.request_burst(timeout=CALL_S))
            burst.execute_request(request, timeout=CALL_S)
        own.check("requests", floats[2 * _ELEMENTS :], a + b)
        with own.call("free"):
            burst.free_memory(memory, timeout=CALL_S)
        with own.call("AIDL burst"):
            aidl = stack.enter_context(prepared.aidl_burst(timeout=CALL_S))
            token = aidl.cache_memory(memory)
            aidl.execute_synchronously(request, timeout=CALL_S)
            aidl.release_memory_resource(token, timeout=CALL_S)
        del floats


def compilation(own: ChaosClient) -> None:
    """Compile a new model, prepare it in a second worker, and save it to files of the client's and load it again."""
    caches = own.folder / "caches"
    caches.mkdir()
    # Small integers, whose products are exact.
    weights = own.numbers.integers(-8, 8, (_WIDTH, _WIDTH)).astype(np.float32)
    row = own.numbers.integers(-8, 8, (1, _WIDTH)).astype(np.float32)
    expected = row @ weights.T
    with ExitStack() as stack:
        for client in (own.connect(stack), own.connect(stack)):
            with own.call("compile"):
                device = client.device("compiled", timeout=CALL_S)
                prepared = stack.enter_context(_compiled(device, product_model(weights), timeout=CALL_S))
            with own.call("execute compiled"):
                (found,) = prepared.execute(row, timeout=CALL_S)
            own.check("execute compiled", found, expected)
        for name in ("save", "load"):
            with own.call(name):
                saved = _compiled(device, product_model(weights), timeout=CALL_S, cache_dir=caches)
                stack.enter_context(saved)
            with own.call("execute saved"):
                (found,) = saved.execute(row, timeout=CALL_S)
            own.check("execute saved", found, expected)


def _compiled(device: nnfmq.Device, model: Model, **options: Any) -> nnfmq.PreparedModel:
    return device.prepare(
        model, preference=ExecutionPreference.SUSTAINED_SPEED, progress=lambda _done, _total: None, **options
    )


def surplus(own: ChaosClient) -> None:
    """Open more connections than the driver accepts from one process."""
    with ExitStack() as stack:
        clients = [own.connect(stack) for _ in range(SURPLUS)]
        with own.call("one too many"):
            try:
                own.connected().close()
            except nnfmq.ResourceExhausted:
                return
        with own.call("the others"):  # it may have the place of one whose worker has died
            for client in clients:
                client.devices(timeout=CALL_S)
        own.check("one too many", 0, 1)


def versions(own: ChaosClient) -> None:
    """Add a model to the repository, use it by its name, change its version, and remove it."""
    name = f"of{os.getpid()}"
    directory = own.models / name
    add_version(directory, 1)
    with ExitStack() as stack:
        client = own.connect(stack)
        with own.call("listing"):
            _until(lambda: any(entry.name == name for entry in client.models(timeout=CALL_S)), "the model")
        with own.call("open by name"):
            model = stack.enter_context(client.model(name, timeout=CALL_S))
        with own.call("burst by name"):
            burst = stack.enter_context(model.burst(timeout=CALL_S))
            image = own.numbers.random(model.inputs[0].shape, np.float32)
            (first,) = burst.execute(image, timeout=CALL_S)
            first = first.copy()
        add_version(directory, 2)
        with own.call("change of version"):
            _until(lambda: _execute(burst, image) is not None and burst.version == 2, "version 2")
            (second,) = burst.execute(image, timeout=CALL_S)
        own.check("change of version", second, first)
        shutil.rmtree(directory)
        with own.call("removal of the model"):
            _until(lambda: all(entry.name != name for entry in client.models(timeout=CALL_S)), "the removal")


def broken(own: ChaosClient) -> None:
    """Add a version to the repository whose file is none, and remove it."""
    name = f"broken{os.getpid()}"
    directory = own.models / name
    add_version(directory, 1, b"no model")
    with ExitStack() as stack:
        client = own.connect(stack)
        with own.call("failed import"):
            _until(
                lambda: any(entry.name == name and entry.failed_version for entry in client.models(timeout=CALL_S)),
                "the failure",
            )
        shutil.rmtree(directory)


def _execute(burst: nnfmq.Burst, image: Any) -> Any:
    time.sleep(0.01)
    return burst.execute(image, timeout=CALL_S)


def _until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition.

    Raises:
        MissedDeadlineTransient: If it is not true within CHANGE_S.
    """
    end = time.monotonic() + CHANGE_S
    while not condition():
        if time.monotonic() > end:
            raise nnfmq.MissedDeadlineTransient(f"{what} did not come within {CHANGE_S:g} s")
        time.sleep(0.02)


def add_version(directory: Path, version: int, content: bytes | None = None) -> None:
    """Add a version to the models, by renaming, with files that are old enough to be loaded at the next look."""
    made = directory.parent / f".{directory.name}.{version}"
    made.mkdir()
    file = made / "model.tflite"
    file.write_bytes(nnfmq.example_path("digits.tflite").read_bytes() if content is None else content)
    old = time.time() - 60
    for path in (file, made):
        os.utime(path, (old, old))
    directory.mkdir(exist_ok=True)
    made.rename(directory / str(version))


SCRIPTS: dict[str, Callable[[ChaosClient], None]] = {
    "executions": executions, "bursts": bursts, "compilation": compilation, "surplus": surplus, "versions": versions,
    "broken": broken,
}  # fmt: skip


def run_script(name: str, own: ChaosClient) -> list[Call]:
    """Run a script until its end or its first error; return its calls."""
    try:
        SCRIPTS[name](own)
    except ScriptEnded:
        pass
    return own.calls


# ----------------------------------------------------------------------------------------------------------------------
# The neighbour


Times: TypeAlias = dict[str, Counter[int]]
"""The neighbour's executions by what they took, in the buckets of the driver's statistics (6 %), for each of TIMES."""
TIMES = ("client", "queue", "driver", "engine")
"""The neighbour itself measures the first, from the call to the return; the others are the driver's statistics."""


def run_neighbour(connection: Connection, socket: str, account: Account | None = None) -> None:
    """Execute over a burst until the tool closes its end, 1,000 times a second at most.

    For each message of the tool the `Times` of the executions since the last one are sent, and what was wrong.
    """
    numbers = np.random.default_rng(0)
    arrays = numbers.standard_normal((64, 2, _ELEMENTS), np.float32)
    with connected(socket, account) as client:
        device = client.device("reference", timeout=CALL_S)
        with device.prepare(sum_model(), timeout=CALL_S) as prepared, prepared.burst(timeout=CALL_S) as burst:
            connection.send(client.worker_pid)
            found, wrong, before = Counter[int](), list[str](), ModelCounts()
            while True:
                for a, b in arrays:
                    _measure(burst, a, b, found, wrong)
                    time.sleep(0.001)
                    if connection.poll():
                        connection.recv()
                        now = _counts(client)
                        connection.send((_times(found, now.since(before)), wrong))
                        found, wrong, before = Counter(), [], now


def _measure(burst: nnfmq.Burst, a: Any, b: Any, found: Counter[int], wrong: list[str]) -> None:
    begin = time.perf_counter_ns()
    try:
        (output,) = burst.execute(a, b, timeout=CALL_S)
    except NnfmqError as error:
        wrong.append(f"{type(error).__name__}: {error}")
        return
    found[bucket_of(time.perf_counter_ns() - begin)] += 1
    if not np.array_equal(output, a + b):
        wrong.append(f"{output[:4]} instead of {(a + b)[:4]}")


def _counts(client: nnfmq.Client) -> ModelCounts:
    """Return what the driver has counted of a client's executions; nothing if it does not tell."""
    with suppress(NnfmqError):  # its supervisor may have been killed
        of_all = client.statistics(timeout=CALL_S).clients
        return sum((model.counts for each in of_all if each.worker_pid == client.worker_pid for model in each.models),
            ModelCounts())  # fmt: skip
    return ModelCounts()


def _times(found: Counter[int], counted: ModelCounts) -> Times:
    times = {name: Counter(dict(enumerate(getattr(counted, name).counts))) for name in TIMES[1:]}
    return {TIMES[0]: found, **{name: +counts for name, counts in times.items()}}


def texts(calls: Sequence[Call]) -> list[str]:
    """Return the statuses of calls that failed, with their texts."""
    return [f"{call.name}: {call.status}: {call.text}" for call in calls if call.status != ErrorStatus.NONE.name]
