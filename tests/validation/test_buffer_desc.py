"""validate_buffer: roles against the models of a buffer, and what is asked for against the roles (N-DOM, DOM-3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from support.small_models import F32, INPUT, OUTPUT, Q8, TEMPORARY, graph, scalar, two_adds, with_operand

from nnfmq.hal.capabilities import BufferDesc, BufferRole
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.types import ChannelQuant, Model, Operand, Operation, OperationType
from nnfmq.validation.values import validate_buffer

CODES = two_adds(Q8, 0.5, 3)


def roles(*places: tuple[int, int]) -> list[BufferRole]:
    return [BufferRole(model, index) for model, index in places]


def rejected(
    message: str, models: Sequence[Model], inputs: Any = (), outputs: Any = (), dimensions: tuple[int, ...] = ()
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        validate_buffer(BufferDesc(dimensions), models, roles(*inputs), roles(*outputs))


@pytest.mark.parametrize(("dimensions", "inputs", "outputs"), [((-1,), [(0, 0)], []), ((), [], [])])
def test_VAL_4_DOM_3_a_buffer_s_values_are_validated_first(dimensions: Any, inputs: Any, outputs: Any) -> None:
    rejected(
        r"buffer: .*\(VAL-4\)$" if dimensions else r"a buffer without .*\(DOM-3\)$",
        [CODES],
        inputs,
        outputs,
        dimensions,
    )


@pytest.mark.parametrize("kind", ["input", "output"])
def test_N_DOM_4_a_role_of_a_model_that_is_not_there_is_rejected(kind: str) -> None:
    rejected(rf"{kind} role: model index 1, 1 models given \(N-DOM-4\)$", [CODES], **{f"{kind}s": [(1, 0)]})


@pytest.mark.parametrize(("kind", "count"), [("input", 2), ("output", 1)])
def test_N_DOM_5_a_role_of_an_operand_that_is_not_there_is_rejected(kind: str, count: int) -> None:
    rejected(
        rf"{kind} {count} of model 0: the model has {count} {kind}s \(N-DOM-5\)$", [CODES], **{f"{kind}s": [(0, count)]}
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (two_adds(F32), r".* have types TENSOR_QUANT8_ASYMM and TENSOR_FLOAT32 \(N-DOM-8\)$"),
        (two_adds(Q8, 0.25, 3), r".* have scales 0.5 and 0.25 \(N-DOM-9\)$"),
        (two_adds(Q8, 0.5, 4), r".* have zero points 3 and 4 \(N-DOM-10\)$"),
        (
            with_operand(CODES, 0, channel_quant=ChannelQuant((1.0, 2.0), 0)),
            r".* have different extra parameters \(DOM-3\)$",
        ),
        (with_operand(CODES, 0, extension_data=b"x"), r".* have different extra parameters \(DOM-3\)$"),
        (with_operand(CODES, 0, dimensions=(4,)), r".* have dimensions \(2, 2\) and \(4,\) \(N-DOM-11\)$"),
        (with_operand(CODES, 0, dimensions=(2, 3)), r".* have dimensions \(2, 2\) and \(2, 3\) \(N-DOM-12\)$"),
    ],
)
def test_N_DOM_8_to_12_roles_that_disagree_are_rejected(other: Model, message: str) -> None:
    rejected(message, [CODES, other], [(0, 0), (1, 0)])


@pytest.mark.parametrize(("dimensions", "rule"), [((4,), "N-DOM-13"), ((2, 3), "N-DOM-14")])
def test_N_DOM_13_14_dimensions_that_contradict_the_roles_are_rejected(dimensions: Any, rule: str) -> None:
    message = (
        rf"buffer dimensions \({', '.join(map(str, dimensions))},?\) requested, the roles have \(2, 2\) \({rule}\)$"
    )
    rejected(message, [CODES], [(0, 0)], dimensions=dimensions)


def test_N_DOM_15_dimensions_of_a_scalar_are_rejected() -> None:
    (number, _), tensor = scalar(1), Operand(F32, (2,))
    lifetimes = ((number, INPUT), (tensor, INPUT), (tensor, TEMPORARY), (tensor, OUTPUT))
    operands = [replace(operand, lifetime=lifetime) for operand, lifetime in lifetimes]
    adds = [Operation(OperationType.ADD, (1, 1, 0), (2,)), Operation(OperationType.ADD, (2, 1, 0), (3,))]

    rejected(
        r"a scalar buffer with dimensions \(1,\) \(N-DOM-15\)$", [graph(operands, adds)], [(0, 0)], dimensions=(1,)
    )


def test_DOM_3_unknown_dimensions_of_a_role_are_merged_from_other_roles_and_the_description() -> None:
    models = [with_operand(CODES, 0, dimensions=dimensions) for dimensions in ((0, 2), (), (0, 0))]
    found = validate_buffer(BufferDesc((3, 0)), models, roles((0, 0), (1, 0), (2, 0)), [])

    assert (found.type, found.scale, found.zero_point, found.dimensions) == (Q8, 0.5, 3, (3, 2))
