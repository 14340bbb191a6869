"""Guard pages: an access outside of an operand ends the process, and the results are the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support import places
from support.compiled import outputs_of, random_inputs
from support.small_models import F32, one_operation

from nnfmq.base import settings
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.guard_pages import GUARD_BYTES, guarded_layout
from nnfmq.engines.compiled.partition import prepare
from nnfmq.hal.types import Model, Operand, OperationType
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.cases import FAILED, run_test
from nnfmq.lab.conformance.runner import open_target
from nnfmq.lab.conformance.targets import ExecutionTarget

PAGE = 4096
FOLDER = places.data_path() / "vts"
SPECS = sorted(FOLDER.glob("*/*.jsonl.gz"))

# Runs the launches once for each argument, in a child that has moved it by a cache line over its end or beginning, and
# once with moved scratch memory. Prints the numbers of the signals that ended the children, 0 for an ordinary end.
MOVED = """
import json, os, sys
from support.compiled import random_inputs
from test_guard_pages import convolution, partition_of
from nnfmq.engines.compiled.partition import prepare

model, away = convolution(), 64 if sys.argv[1] == "end" else -64
program = prepare(model)
partition = partition_of(program)
partition._pool.set_worker_count(0)
frame = program.bind(random_inputs(model, 1), []).frame
partition(frame)
context = frame[partition._slot].context

def ended_by(argument):
    pid = os.fork()
    if not pid:
        scratch = context.scratch
        if argument is None:
            scratch += away // 64 * context._memory.scratch_stride // 2
        elif argument >= 0:
            context._args[argument] += away
        partition._pool.run(context.records, 0, partition.launch_count, scratch, context.scratch_stride, 0)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])

print(json.dumps([ended_by(argument) for argument in (-1, *range(len(context._args)), None)]))
"""


@pytest.fixture(params=["end", "begin"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Prepare programs with guard pages, also in child processes."""
    monkeypatch.setenv(settings.GUARD_PAGES.variable, request.param)
    return str(request.param)


def convolution() -> Model:
    """Return a model whose kernels have an input, constants, an output and scratch memory."""
    weights = np.linspace(-1, 1, 8 * 3 * 3 * 5, dtype=np.float32)
    filters = (Operand(F32, (8, 3, 3, 5)), weights.tobytes())
    bias = (Operand(F32, (8,)), weights[:8].tobytes())
    arguments = [Operand(F32, (1, 9, 11, 5)), filters, bias, 1, 1, 1, 0]
    return one_operation(OperationType.CONV_2D, arguments, Operand(F32, (1, 9, 11, 8)))


def partition_of(program: object) -> CompiledPartition:
    (found,) = [s.function for s in program.steps if isinstance(s.function, CompiledPartition)]  # type: ignore[attr-defined]
    return found


def test_an_operand_ends_or_begins_at_a_guard() -> None:
    sizes = [0, 1, PAGE, PAGE + 4]
    for side in ("end", "begin"):
        layout = guarded_layout(sizes, side)
        assert len(layout.guards) == 5 and layout.size == layout.guards[-1] + GUARD_BYTES
        before = [offset + GUARD_BYTES for offset in layout.guards[:-1]]
        if side == "begin":
            assert list(layout.offsets) == before
        else:
            assert [offset + size for offset, size in zip(layout.offsets, sizes, strict=True)] == list(
                layout.guards[1:]
            )
        assert [(end - begin) // PAGE for begin, end in zip(before, layout.guards[1:], strict=True)] == [1, 1, 1, 2]
    assert guarded_layout([100], "end", 64).offsets[0] == GUARD_BYTES + PAGE - 128


def test_a_kernel_that_leaves_any_operand_ends_its_process(side: str) -> None:
    tests = Path(__file__).parents[2]
    path = f"import sys; sys.path[:0] = [{str(tests / 'lib')!r}, {str(Path(__file__).parent)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", path + MOVED, side], capture_output=True, text=True, check=True
    )  # fmt: skip
    unmoved, *moved = json.loads(done.stdout)
    assert unmoved == 0
    assert len(moved) >= 5 and set(moved) == {signal.SIGSEGV}


def test_results_are_the_same_and_a_restored_program_has_its_guards(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convolution()
    inputs = random_inputs(model, 1)
    guarded = prepare(model)
    monkeypatch.delenv(settings.GUARD_PAGES.variable)
    ordinary, restored = prepare(model), prepare(model, guarded.prepacked)
    expected = outputs_of(ordinary, model, inputs)[0].tobytes()
    for _ in range(2):
        assert outputs_of(guarded, model, inputs)[0].tobytes() == expected
        assert outputs_of(restored, model, inputs)[0].tobytes() == expected
    guards = partition_of(restored).plan.guards
    assert guards is not None and guards.side == side
    assert partition_of(ordinary).plan.guards is None
    assert partition_of(restored)._constants.base is not restored.prepacked[0][1].base, (
        "they are copied to guarded memory"
    )


@pytest.fixture
def target(side: str) -> Iterator[ExecutionTarget]:
    """A driver of its own, whose worker a wrong access ends."""
    with closing(open_target("burst", "compiled", "embedded")) as opened:
        yield opened


@pytest.mark.full
@pytest.mark.skipif(not SPECS, reason=f"no test data in {FOLDER}; $NNFMQ_DATA can say where it is")
def test_the_hals_test_models_pass_with_guard_pages(target: ExecutionTarget) -> None:
    results = [run_test(testmodels.read(next(testmodels.lines(spec))[1]), target) for spec in SPECS[3::24]]
    assert len(results) > 15
    assert [(r.name, v.kind, v.reason) for r in results for v in r.outcomes if v.status == FAILED] == []
