"""graph_dump writes NNAPI's graph of a model, with subgraphs and the steps of a plan. (UTL-6)"""

from __future__ import annotations

import io
import struct

import pytest
from support.control_flow_models import branching
from support.models import add_model, null_model

from nnfmq.base import verbose_log
from nnfmq.graphs.graph_dump import graph_dump
from nnfmq.hal.types import DataLocation, LifeTime, Model, Operand, OperandType, Operation, OperationType, Subgraph
from nnfmq.planning.plan import MAIN, ExecutionPlan, ExecutionStep, IfStep, OperandKey


def dump(model: Model, plan: ExecutionPlan | None = None, name: str = "name") -> list[str]:
    stream = io.StringIO()
    graph_dump(name, model, stream, plan)
    assert stream.getvalue().endswith("}\n")
    return stream.getvalue().splitlines()


def test_UTL_6_a_model_is_dumped_in_the_form_of_nnapi() -> None:
    assert dump(add_model((2, 3))) == [
        "// name",
        "digraph {",
        '    d0 [style=filled fillcolor=black fontcolor=white label="0\\nTF32(2x3)"]',
        '    d1 [style=filled fillcolor=black fontcolor=white label="1\\nTF32(2x3)"]',
        '    d2 [style=filled fillcolor=black fontcolor=white label="2\\nTF32(2x3)"]',
        '    d3 [label="3: COPY\\nI32 = 0"]',
        '    n0 [shape=box ordering=in label="0: ADD"]',
        "    d0 -> n0 [label=0]",
        "    d1 -> n0 [label=1]",
        "    d3 -> n0 [label=2]",
        "    n0 -> d2",
        "}",
    ]


def operand_line(operand: Operand, values: bytes = b"") -> str:
    """Return the label of an operand that is neither input nor output of the model."""
    (line,) = (line for line in dump(Model(Subgraph((operand,), (), (), ()), operand_values=values)) if "d0 [" in line)
    return line.removeprefix('    d0 [label="0').removesuffix('"]')


@pytest.mark.parametrize(
    ("operand_type", "text"),
    [
        (OperandType.FLOAT32, "F32"),
        (OperandType.INT32, "I32"),
        (OperandType.UINT32, "U32"),
        (OperandType.TENSOR_FLOAT32, "TF32"),
        (OperandType.TENSOR_INT32, "TI32"),
        (OperandType.TENSOR_QUANT8_ASYMM, "TQ8A"),
        (OperandType.OEM, "OEM"),
        (OperandType.TENSOR_OEM_BYTE, "TOEMB"),
        (OperandType.TENSOR_BOOL8, "TENSOR_BOOL8"),
        (OperandType(0x10001), "EXTENSION_0x10001"),
    ],
)
def test_UTL_6_types_are_abbreviated(operand_type: OperandType, text: str) -> None:
    assert operand_line(Operand(operand_type)) == f"\\n{text}"


@pytest.mark.parametrize(
    ("lifetime", "text"),
    [
        (LifeTime.TEMPORARY_VARIABLE, "\\nTI32(4)"),
        (LifeTime.CONSTANT_COPY, ": COPY\\nTI32(4)"),
        (LifeTime.CONSTANT_REFERENCE, ": REF\\nTI32(4)"),
        (LifeTime.NO_VALUE, ": NO\\nTI32(4)"),
    ],
)
def test_UTL_6_the_kind_of_constants_is_shown(lifetime: LifeTime, text: str) -> None:
    assert operand_line(Operand(OperandType.TENSOR_INT32, (4,), lifetime=lifetime)) == text


@pytest.mark.parametrize(
    ("operand_type", "value", "text"),
    [
        (OperandType.FLOAT32, struct.pack("<f", -1.5), "F32 = -1.5"),
        (OperandType.FLOAT32, struct.pack("<f", 0.1), "F32 = 0.1"),  # as C++ writes a float: 6 significant digits
        (OperandType.FLOAT16, struct.pack("<e", 0.5), "FLOAT16 = 0.5"),
        (OperandType.INT32, struct.pack("<i", -7), "I32 = -7"),
        (OperandType.UINT32, struct.pack("<I", 2**32 - 1), "U32 = 4294967295"),
        (OperandType.BOOL, b"\1", "BOOL = 1"),
    ],
)
def test_UTL_6_values_of_scalars_are_shown(operand_type: OperandType, value: bytes, text: str) -> None:
    location = DataLocation(0, 2, len(value))
    assert operand_line(Operand(operand_type, lifetime=LifeTime.CONSTANT_COPY, location=location), b"xx" + value) == (
        f": COPY\\n{text}"
    )


@pytest.mark.parametrize("location", [DataLocation(0, 0, 2), DataLocation(0, 9, 4)])
def test_UTL_6_a_value_that_an_invalid_model_lacks_is_left_out(location: DataLocation) -> None:
    operand = Operand(OperandType.INT32, lifetime=LifeTime.CONSTANT_COPY, location=location)
    assert operand_line(operand, bytes(8)) == ": COPY\\nI32"


def test_UTL_6_edges_have_labels_if_there_are_several() -> None:
    operands = (Operand(OperandType.TENSOR_FLOAT32, (4,)),) * 3
    model = Model(Subgraph(operands, (Operation(OperationType.SPLIT, (0,), (1, 2)),), (), ()))
    assert dump(model)[-5:] == [
        '    n0 [shape=box ordering=out label="0: SPLIT"]',
        "    d0 -> n0",
        "    n0 -> d1 [label=0]",
        "    n0 -> d2 [label=1]",
        "}",
    ]


def test_UTL_6_subgraphs_are_clusters() -> None:
    lines = dump(branching())
    operands = [line for line in lines if "SUBGRAPH" in line]
    assert [line.split("label=")[1] for line in operands] == [
        f'"{i}: SUBGRAPH\\nSUBGRAPH = {number}"]'
        for number, i in enumerate(
            i for i, o in enumerate(branching().main.operands) if o.lifetime == LifeTime.SUBGRAPH
        )
    ]
    first = lines.index('    subgraph cluster_s1 { label="referenced subgraph 0"')
    second = lines.index('    subgraph cluster_s2 { label="referenced subgraph 1"')
    assert lines[second - 1] == lines[-2] == "    }"
    assert any(line.startswith("    s1_n0 [shape=box ordering=in ") and "ADD" in line for line in lines[first:second])
    assert any(line.startswith("    s2_n0 [shape=box ordering=in ") and "MUL" in line for line in lines[second:])


def test_UTL_6_the_name_stays_in_its_comment() -> None:
    assert dump(null_model(), name="a\nb {")[0] == "// a b {"


def branching_plan() -> ExecutionPlan:
    """Return a plan: the runtime interprets IF, `slow` adds, and the device `fa"st` multiplies."""
    model = branching()
    steps = (
        IfStep(MAIN, 0, OperandKey(MAIN, 0), 1, 2, (), (), (), (), (), ()),
        ExecutionStep(0, 1, (0,), model, (), ()),
        ExecutionStep(1, 2, (0,), model, (), ()),
    )
    return ExecutionPlan(model, ("slow", 'fa"st'), steps)


def test_UTL_6_the_steps_of_a_plan_are_clusters_with_the_colour_of_their_device() -> None:
    lines = dump(branching(), branching_plan())
    boxes = {line.split("label=")[1].split('" ')[0]: line for line in lines if "cluster_step" in line}
    assert list(boxes) == ['"step 0: the runtime', '"step 1: slow', '"step 2: fa\\"st']
    assert "fillcolor" not in boxes['"step 0: the runtime']
    colours = [box.split('fillcolor="')[1].split('"')[0] for box in list(boxes.values())[1:]]
    assert len(set(colours)) == 2


def test_UTL_6_without_a_stream_the_graph_goes_to_the_verbose_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbose_log._Mask, "tags", frozenset())
    graph_dump("name", add_model())
    assert caplog.records == []
    monkeypatch.setattr(verbose_log._Mask, "tags", frozenset(["model"]))
    with caplog.at_level("INFO", "nnfmq.vlog"):
        graph_dump("name", add_model())
    assert [record.getMessage() for record in caplog.records] == dump(add_model())
