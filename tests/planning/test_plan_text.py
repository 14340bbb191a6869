"""Plans as text and as JSON."""

from __future__ import annotations

import json

import pytest
from support.control_flow_models import branching, counting
from support.planned import FakeDevice, cpu, only
from support.sketches import ANY_LENGTH, Sketch, chain
from support.small_models import I32

from nnfmq.hal.types import Model, Operand, OperandType, OperationType
from nnfmq.planning.partitioning import make_plan
from nnfmq.planning.plan import ExecutionPlan
from nnfmq.planning.text import plan_dict, plan_text

ADD, RELU, EXP = OperationType.ADD, OperationType.RELU, OperationType.EXP


def planned(model: Model, *codes: OperationType) -> ExecutionPlan:
    return make_plan(model, [FakeDevice("acme-dsp", only(*codes)), cpu()])


def test_a_simple_plan_as_text() -> None:
    assert plan_text(planned(chain(RELU), RELU)).splitlines() == [
        "simple plan: 1 step, 0 temporary values of 0 bytes",
        "0  acme-dsp: 1 operation: RELU",
        "     reads  %0 (TENSOR_FLOAT32 4, 16 B)",
        "     writes %1 (TENSOR_FLOAT32 4, 16 B)",
    ]


def test_a_loop_as_text() -> None:
    assert plan_text(planned(counting(), ADD)).splitlines() == [
        "compound plan: 5 steps, 3 temporary values of 13 bytes",
        "0  WHILE: condition from step 1, step 3 while %0.4, then step 5",
        "     reads  %2 (TENSOR_FLOAT32 2, 8 B), %3 (TENSOR_INT32 1, 4 B), %4 (TENSOR_INT32 1, 4 B), … 1 more",
        "     writes %6 (TENSOR_FLOAT32 2, 8 B)",
        "1  nnapi-reference: 1 operation of referenced subgraph 0: LESS",
        "     reads  %0.1 (TENSOR_INT32 1, 4 B), %0.2 (TENSOR_INT32 1, 4 B)",
        "     writes %0.4 (TENSOR_BOOL8 1, 1 B)",
        "2  go to step 0",
        "3  acme-dsp: 2 operations of referenced subgraph 1: ADD, ADD",
        "     reads  %1.0 (TENSOR_FLOAT32 2, 8 B), %1.1 (TENSOR_INT32 1, 4 B), %1.3 (TENSOR_FLOAT32 2, 8 B)",
        "     writes %1.4 (TENSOR_FLOAT32 2, 8 B), %1.5 (TENSOR_INT32 1, 4 B)",
        "4  go to step 0",
    ]


def test_a_branch_as_text() -> None:
    lines = plan_text(planned(branching(), ADD)).splitlines()

    assert lines[1] == "0  IF %0: step 1, otherwise step 3"
    assert lines[-4].startswith("3  nnapi-reference: 1 operation of referenced subgraph 1: MUL")


@pytest.mark.parametrize(("count", "text"), [(1, "1 unknown size"), (2, "2 unknown sizes")])
def test_values_of_unknown_size_are_counted_and_named(count: int, text: str) -> None:
    codes = [(RELU, EXP)[position % 2] for position in range(count + 1)]
    plan = planned(chain(*codes, between=ANY_LENGTH), RELU)

    lines = plan_text(plan).splitlines()

    assert lines[0].endswith(f"of 0 bytes and {text}")
    assert lines[3] == "     writes %1 (TENSOR_FLOAT32 ?, size unknown)"


def test_long_lists_are_cut_and_numbers_of_steps_are_aligned() -> None:
    sketch = Sketch()
    last = sketch.input()
    for position in range(12):
        for _ in range(5):
            value = sketch.temporary()
            sketch.operation((RELU, EXP)[position % 2], [last], value)
            last = value
    sketch.operation(RELU, [last], sketch.output())
    lines = plan_text(planned(sketch.model(), RELU)).splitlines()

    assert lines[1] == " 0  acme-dsp: 5 operations: RELU, RELU, RELU, RELU, … 1 more"
    assert lines[-3] == "12  acme-dsp: 1 operation: RELU"


def test_a_scalar_has_a_size_though_it_has_no_dimensions() -> None:
    sketch = Sketch()
    shape, value = sketch.constant((Operand(I32, (1,)), b"\4\0\0\0")), sketch.input(Operand(OperandType.FLOAT32))
    sketch.operation(OperationType.FILL, [shape, value], sketch.output())
    plan = planned(sketch.model(), OperationType.FILL)

    assert plan_text(plan).splitlines()[2] == "     reads  %1 (FLOAT32, 4 B)"
    assert plan_dict(plan)["steps"][0]["inputs"] == [
        {"subgraph": 0, "operand": 1, "type": "FLOAT32", "dimensions": [], "bytes": 4}
    ]


def test_a_plan_as_JSON_has_everything_that_its_steps_have() -> None:
    found = json.loads(json.dumps(plan_dict(planned(counting(), ADD))))

    condition = {"subgraph": 1, "operand": 4, "type": "TENSOR_BOOL8", "dimensions": [1], "bytes": 1}
    assert (found["kind"], found["devices"]) == ("compound", ["acme-dsp", "nnapi-reference"])
    loop, execution, back, body, _ = found["steps"]
    assert {key: loop[key] for key in loop if not isinstance(loop[key], list)} == {
        "index": 0, "kind": "while", "subgraph": 0, "operation": 0, "condition": condition,
        "condition_step": 1, "body_step": 3, "exit_step": 5,
    }  # fmt: skip
    assert [value["operand"] for value in loop["inputs"]] == [2, 3, 4, 5]
    assert [value["operand"] for value in loop["outputs"]] == [6]
    assert execution["operations"] == [{"index": 0, "type": "LESS"}]
    assert execution["outputs"] == [condition]
    assert back == {"index": 2, "kind": "goto", "target": 0}
    assert (body["device"], body["subgraph"]) == ("acme-dsp", 2)
    assert found["temporaries"][0] == condition
    assert [value["operand"] for value in found["constants"]] == [3]


def test_an_IF_as_JSON() -> None:
    branch = plan_dict(planned(branching(), ADD))["steps"][0]

    assert (branch["kind"], branch["condition"]["operand"], branch["then_step"], branch["else_step"]) == ("if", 0, 1, 3)
    assert [value["operand"] for value in (*branch["inputs"], *branch["outputs"])] == [3, 4, 5]
    assert (branch["subgraph"], branch["operation"]) == (0, 0)


def test_an_unknown_size_is_None_in_JSON() -> None:
    plan = planned(chain(RELU, EXP, between=ANY_LENGTH), RELU)

    assert plan_dict(plan)["temporaries"] == [
        {"subgraph": 0, "operand": 1, "type": "TENSOR_FLOAT32", "dimensions": [0], "bytes": None}
    ]
