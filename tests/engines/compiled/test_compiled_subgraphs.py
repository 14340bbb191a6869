"""The subgraphs of IF and WHILE are compiled, stored and restored like the main one, and do not share arenas."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import numpy as np
import pytest
from support.control_flow_models import REAL, TRUTH, Parts, branching, counting, inputs, named, output, rotating
from support.small_models import scalar

from nnfmq.engines import interpreter
from nnfmq.engines.compiled.executor import CompiledPartition
from nnfmq.engines.compiled.partition import CompiledPreparation, prepare
from nnfmq.engines.program import Program
from nnfmq.hal.types import Model, Operation, OperationType, Subgraph

ADD, IF = OperationType.ADD, OperationType.IF
X, Y = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
YES, NO, FIVE = np.array([1], np.uint8), np.array([0], np.uint8), np.array([5], np.int32)


def calling_twice() -> Model:
    """Return y + IF(c, y, x), where y = IF(c, x, x); both call the same subgraphs."""
    parts, (none, raw) = Parts(), scalar(0)
    branches = [named(parts.binary(ADD)), named(parts.binary(OperationType.MUL))]
    operands = [*inputs(TRUTH), *branches, *inputs(REAL), REAL, REAL, none, output(REAL)]
    operations = [
        Operation(IF, (0, 1, 2, 3, 3), (4,)),
        Operation(IF, (0, 1, 2, 4, 3), (5,)),
        Operation(ADD, (4, 5, 6), (7,)),
    ]
    return parts.model(operands, operations, c6=raw)


def result(program: Program, given: tuple[Any, ...]) -> list[float]:
    out = np.zeros(2, np.float32)
    program.execute(given, [out])
    return out.tolist()


def unexpected_compile(*_: Any) -> NoReturn:
    raise AssertionError("a restored program was compiled")


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        (branching(), (YES, X, Y), [11, 22]),
        (branching(), (NO, X, Y), [10, 40]),
        (counting(), (Y, FIVE, X), [15, 30]),
        (calling_twice(), (YES, X), [5, 10]),
        (calling_twice(), (NO, X), [2, 12]),
    ],
)
def test_a_compiled_and_a_restored_program_compute_the_same(model: Model, given: Any, expected: list[float]) -> None:
    program = prepare(model)
    restored = prepare(model, program.prepacked, unexpected_compile)
    assert [result(p, given) for p in (program, program, restored, restored)] == [expected] * 4
    assert len(restored.prepacked) == len(program.prepacked)


def test_all_operations_of_called_subgraphs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    original, programs = CompiledPreparation.program, []

    def spying(self: CompiledPreparation) -> Program:
        programs.append(original(self))
        return programs[-1]

    monkeypatch.setattr(CompiledPreparation, "program", spying)
    model = branching()
    prepare(model)
    subgraphs: list[Subgraph] = [*model.referenced, model.main]
    assert len(programs) == len(subgraphs) == 3
    for program in programs[:-1]:
        assert [type(step.function) for step in program.steps] == [CompiledPartition]


def test_threads_that_run_the_same_loop_do_not_disturb_each_other() -> None:
    program, wrong = prepare(counting()), []

    def run(start: int) -> None:
        given = (np.array([start, 2 * start], np.float32), np.array([40], np.int32), X)
        for _ in range(50):
            if (found := result(program, given)) != [start + 40, 2 * start + 80]:
                wrong.append(found)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("prepared", [interpreter.prepare, prepare], ids=["reference", "compiled"])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 4, 7])
def test_states_that_are_views_of_other_states_keep_their_values(prepared: Any, rounds: int) -> None:
    given = [np.array([k, 10 * k], np.float32) for k in (1, 2, 3)]
    a, b, c = given
    for _ in range(rounds):
        a, b, c = b, c, a + c
    program = prepared(rotating())
    for _ in range(2):
        outputs = [np.zeros(2, np.float32) for _ in given]
        program.execute([*given, np.array([rounds], np.int32)], outputs)
        assert [out.tolist() for out in outputs] == [state.tolist() for state in (a, b, c)]
