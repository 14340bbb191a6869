"""What every hosted runtime gets from `HostedDevice`, with a runtime of this module in this process."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support.drivers import InThread

import nnfmq
from nnfmq.base.file_memory import FileMemory
from nnfmq.base.processes import allowed_cores, allowed_cpus
from nnfmq.base.shared_constants import SharedConstants
from nnfmq.driver.compilation.jobs import PrepareContext, prepare_context
from nnfmq.driver.execution.watchdog import WATCHDOG
from nnfmq.driver.memory.private import ConstantPool, copy_constant_pools
from nnfmq.driver.memory.quota import MemoryQuota
from nnfmq.engines import memory
from nnfmq.engines.execution import PreparedProgram, RunOptions
from nnfmq.hal.hosted import HostedCall, HostedDescription, HostedTensor, Shape
from nnfmq.hal.types import Protection
from nnfmq.hosted.adapter import HostedFile, HostedModel, HostedRun, OpenOptions
from nnfmq.hosted.device import HostedDevice
from nnfmq.importers.hosted import hosted_model, load_hosted
from nnfmq.operations.declaration import Array

MIB = 1 << 20
X = np.array([1, 2], np.float32)


class Opened(HostedModel):
    """A file that doubles two floats: `size` MiB are taken by opening it, and as much again by the first execution."""

    def __init__(self, size_mib: int) -> None:
        self.description = HostedDescription(
            (HostedTensor("x", "float32", (2,)),), (HostedTensor("y", "float32", (2,)),)
        )
        self.size_mib = size_mib
        self.taken = [np.ones(size_mib * MIB, np.uint8)]
        self.runs = 0
        self.read: list[Array] = []  # the input of each execution that was bound
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> HostedRun:
        self.read.append(inputs[0])
        return Run(self, inputs[0], outputs[0])


class Run(HostedRun):
    def __init__(self, model: Opened, x: Array, y: Array | None) -> None:
        self.model, self.x, self.y = model, x, y

    def __call__(self) -> Sequence[Array | None]:
        model = self.model
        model.runs += 1
        if model.runs == 1:
            model.taken.append(np.ones(model.size_mib * MIB, np.uint8))
        model.begun.set()
        assert model.may_end.wait(10)
        assert self.y is not None
        np.multiply(self.x, 2, self.y)
        return [None]


class Doubling(HostedDevice):
    name = "doubling"
    formats = ("twice",)

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[OpenOptions] = []
        self.models: list[Opened] = []

    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        self.opened.append(options)
        self.models.append(Opened(int(bytes(file.model))))
        return self.models[-1]


@pytest.fixture
def device() -> Iterator[Doubling]:
    yield Doubling()
    memory.trim_memory()
    WATCHDOG.stop()


@pytest.fixture
def quota() -> Iterator[MemoryQuota]:
    """The budget of this process: 100 MiB."""
    gc.collect()  # memory that is freed during a test would be missing in what is charged
    made = MemoryQuota(100 * MIB)
    memory.use_budget(made)
    yield made
    memory.use_budget(None)


def received(parts: Sequence[SharedConstants], *, is_sealed: bool = True) -> tuple[ConstantPool, ...]:
    """Return memories as a driver has them when it has received them."""
    if not is_sealed:
        return tuple(ConstantPool(bytes(part.view)) for part in parts)
    files = [FileMemory.from_fd(part.fileno(), part.size_bytes, protection=Protection.READ) for part in parts]
    return copy_constant_pools(files, lambda: None)


class Sent:
    """A file of so many MiB that its runtime takes, as a client sends it with its question and with its model."""

    def __init__(self, device: Doubling, tmp_path: Path, size_mib: int = 0, *, is_sealed: bool = True) -> None:
        path = tmp_path / "net.twice"
        path.write_text(str(size_mib))

        def describe(
            call: HostedCall, parts: Sequence[SharedConstants]
        ) -> tuple[HostedDescription, Sequence[SharedConstants]]:
            self.call, self.parts, self.pools = call, parts, received(parts, is_sealed=is_sealed)
            self.received_again = received(parts, is_sealed=is_sealed)
            return device.describe_file(call, self.pools), parts

        self.model = replace(load_hosted(path, describe).model, pools=self.received_again)


def executed(program: PreparedProgram, options: RunOptions | None = None) -> list[float]:
    out = np.zeros(2, np.float32)
    program.bind([X], [out]).run(options or RunOptions())
    return [float(value) for value in out]


# ----------------------------------------------------------------------------------------------------------------------
# The open file that is kept for the preparation that follows.


@pytest.mark.parametrize("is_sealed", [True, False], ids=["mapped", "copied"])
def test_a_file_is_opened_once_for_the_question_and_the_preparation(
    device: Doubling, tmp_path: Path, is_sealed: bool
) -> None:
    sent = Sent(device, tmp_path, is_sealed=is_sealed)
    assert executed(device.compile(sent.model)) == [2, 4]
    assert len(device.opened) == 1
    device.compile(sent.model)  # the first program has the open file
    assert len(device.opened) == 2


def test_a_signature_is_refused_by_a_device_whose_files_have_none(device: Doubling, tmp_path: Path) -> None:
    (tmp_path / "net.twice").write_text("0")

    def describe(
        call: HostedCall, parts: Sequence[SharedConstants]
    ) -> tuple[HostedDescription, Sequence[SharedConstants]]:
        return device.describe_file(call, received(parts)), parts

    with pytest.raises(nnfmq.InvalidArgument, match="signature 'serving': files on doubling have no signatures"):
        load_hosted(tmp_path / "net.twice", describe, signature="serving")
    assert device.opened == []


def test_the_preparation_of_another_file_does_not_take_it(device: Doubling, tmp_path: Path) -> None:
    first, second = Sent(device, tmp_path, 0), Sent(device, tmp_path, 1)
    device.compile(first.model)
    device.compile(second.model)
    assert len(device.opened) == 3  # both, and the first again: one is kept


def test_two_threads_never_get_the_same_open_file(device: Doubling, tmp_path: Path) -> None:
    sent = Sent(device, tmp_path)
    barrier = threading.Barrier(4)

    def prepare() -> PreparedProgram:
        barrier.wait(10)
        return device.compile(sent.model)

    programs = [call.wait().value for call in [InThread.start(prepare) for _ in range(4)]]
    assert len({id(program.opened) for program in programs}) == len(device.opened) == 4


def test_an_idle_worker_drops_it_with_its_charge(device: Doubling, tmp_path: Path, quota: MemoryQuota) -> None:
    sent = Sent(device, tmp_path, 20)
    assert quota.charged_bytes >= 19 * MIB
    memory.trim_memory()
    assert quota.charged_bytes == 0
    assert executed(device.compile(sent.model)) == [2, 4]
    assert len(device.opened) == 2


def test_it_makes_way_when_the_client_needs_its_memory(device: Doubling, tmp_path: Path, quota: MemoryQuota) -> None:
    Sent(device, tmp_path, 60)
    quota.charge(60 * MIB).close()
    assert quota.charged_bytes == 0


def test_a_file_that_was_opened_too_late_is_found_by_the_next_attempt(device: Doubling, tmp_path: Path) -> None:
    sent = Sent(device, tmp_path)
    memory.trim_memory()
    with pytest.raises(nnfmq.MissedDeadline), prepare_context(PrepareContext(time.monotonic_ns())):
        device.compile(sent.model)
    with prepare_context(PrepareContext(time.monotonic_ns() + 10**10)):
        assert executed(device.compile(sent.model)) == [2, 4]
    assert len(device.opened) == 2


# ----------------------------------------------------------------------------------------------------------------------
# Memory.


def test_a_client_is_charged_what_opening_a_file_and_its_first_execution_took(
    device: Doubling, tmp_path: Path, quota: MemoryQuota
) -> None:
    program = device.compile(Sent(device, tmp_path, 20).model)
    assert 19 * MIB <= quota.charged_bytes < 30 * MIB
    for _ in range(2):
        assert executed(program) == [2, 4]
        assert 38 * MIB <= quota.charged_bytes < 50 * MIB
    del program
    gc.collect()
    assert quota.charged_bytes == 0


def test_a_client_is_not_charged_what_a_runtime_has_freed_again(
    device: Doubling, tmp_path: Path, quota: MemoryQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_wastefully(file: HostedFile, options: OpenOptions) -> HostedModel:
        blocks = [np.ones(MIB // 16, np.uint8) for _ in range(30 * 16)]  # of a size that glibc has in its heap
        opened = Opened(0)
        opened.taken = blocks[-1:]  # above all others
        return opened

    monkeypatch.setattr(device, "open", open_wastefully)
    program = device.compile(Sent(device, tmp_path).model)
    assert quota.charged_bytes < 5 * MIB
    assert executed(program) == [2, 4]


def test_a_file_beyond_the_limit_is_RESOURCE_EXHAUSTED(device: Doubling, tmp_path: Path, quota: MemoryQuota) -> None:
    with pytest.raises(nnfmq.ResourceExhaustedPersistent, match=f"the limit is {100 * MIB}"):
        Sent(device, tmp_path, 110)
    assert quota.charged_bytes == 0


def test_so_is_each_execution_of_a_model_whose_first_one_took_too_much(
    device: Doubling, tmp_path: Path, quota: MemoryQuota
) -> None:
    program = device.compile(Sent(device, tmp_path, 60).model)
    for _ in range(2):
        with pytest.raises(nnfmq.ResourceExhaustedTransient):
            executed(program)
    assert 59 * MIB <= quota.charged_bytes < 70 * MIB


# ----------------------------------------------------------------------------------------------------------------------
# Threads.


def test_an_execution_has_the_cores_of_the_process_unless_fewer_are_asked_for(device: Doubling, tmp_path: Path) -> None:
    sent = Sent(device, tmp_path)
    for threads in (1, 10**6):
        device.describe_file(replace(sent.call, options={"threads": threads}), sent.pools)
    assert [options.threads for options in device.opened] == [allowed_cores(), 1, allowed_cpus()]
    for wrong in (0, "2", True):
        with pytest.raises(nnfmq.InvalidArgument, match="threads"):
            device.describe_file(replace(sent.call, options={"threads": wrong}), sent.pools)


def test_a_runtime_of_one_thread_lets_an_execution_wait_until_its_deadline(device: Doubling, tmp_path: Path) -> None:
    program = device.compile(Sent(device, tmp_path).model)
    opened = device.models[0]
    opened.may_end.clear()
    first = InThread.start(lambda: executed(program))
    assert opened.begun.wait(10)
    with pytest.raises(nnfmq.MissedDeadlineTransient, match="while another execution of the model ran"):
        executed(program, RunOptions(time.monotonic_ns() + 20_000_000))
    second = InThread.start(lambda: executed(program, RunOptions(time.monotonic_ns() + 10**10)))
    opened.may_end.set()
    assert first.wait().value == second.wait().value == [2, 4]


class Unlimited(Opened):
    """The same for inputs of all shapes."""

    def resolve(self, shapes: Sequence[Shape | None]) -> Sequence[Shape | None]:
        return shapes


class AnyShape(Doubling):
    def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
        return Unlimited(0)


@pytest.mark.parametrize("declared", [("z", "float32"), ("x", "int32")])
def test_a_runtime_that_takes_all_shapes_gets_no_other_names_and_types_than_those_of_its_file(
    tmp_path: Path, declared: tuple[str, str]
) -> None:
    device = AnyShape()
    sent = Sent(device, tmp_path)
    for name, dtype in (("x", "float32"), declared):
        tensors = (HostedTensor(name, dtype, (3,)),), (HostedTensor("y", "float32", (3,)),)
        call = replace(sent.call, inputs=tensors[0], outputs=tensors[1])
        made = hosted_model(call, sent.parts, HostedDescription(*tensors))
        model = replace(made.model, pools=sent.received_again)
        if name == "x" and dtype == "float32":
            device.compile(model)
        else:
            with pytest.raises(
                nnfmq.InvalidArgument, match=rf"declares input 0 as '{name}', {dtype} .* as 'x', float32"
            ):
                device.compile(model)


@pytest.mark.parametrize("is_private", [False, True])
def test_floats_lie_in_the_client_s_memory_unless_the_runtime_sorts_by_them(
    device: Doubling, tmp_path: Path, is_private: bool
) -> None:
    program = device.compile(Sent(device, tmp_path).model)
    (opened,) = device.models
    opened.copies_floats = is_private
    assert executed(program) == [2, 4]
    assert np.shares_memory(opened.read[0], X) is not is_private


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64"])
def test_what_may_be_an_index_or_a_size_is_private_and_read_before_each_run(tmp_path: Path, dtype: str) -> None:
    class Indexing(Doubling):
        def open(self, file: HostedFile, options: OpenOptions) -> HostedModel:
            opened = super().open(file, options)
            opened.description = replace(opened.description, inputs=(HostedTensor("x", dtype, (2,)),))
            return opened

    device = Indexing()
    program = device.compile(Sent(device, tmp_path).model)
    x, y = np.array([1, 0], dtype).view(program.inputs[0].dtype), np.zeros(2, np.float32)
    bound = program.bind([x], [y])
    (opened,) = device.models
    for values in ([1, 0], [0, 1]):
        x[:] = values
        bound.run()
        assert y.tolist() == [2 * value for value in values]
    assert opened.read[0].dtype == dtype and not np.shares_memory(opened.read[0], x)
