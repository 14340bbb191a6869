"""Caching tokens of steps: which compilations get the same one."""

from __future__ import annotations

import hashlib

import pytest
from msgspec.structs import replace
from support.planned import FakeDevice, cpu, only
from support.sketches import chain

from nnfmq.hal.types import ExecutionPreference, OperationType, Priority
from nnfmq.planning.partitioning import make_plan, step_token
from nnfmq.planning.plan import ExecutionPlan, ExecutionStep
from nnfmq.validation.values import validate_cache_token

RELU, EXP = OperationType.RELU, OperationType.EXP
TOKEN = bytes(range(32))


def plan() -> ExecutionPlan:
    return make_plan(chain(RELU, EXP, RELU), [FakeDevice("acme-a", only(RELU)), cpu()])


def a_step() -> ExecutionStep:
    return plan().execution_steps[0]


def test_a_token_is_a_cache_token_and_the_same_in_every_process() -> None:
    """The bytes are those of the documented form: each field with its length in 8 bytes before it."""
    fields = TOKEN, b"acme-a", b"1", b"".join(n.to_bytes(4, "little") for n in (2, 1, 0, 0))
    expected = hashlib.sha256(b"".join(len(field).to_bytes(8, "little") + field for field in fields)).digest()

    found = step_token(TOKEN, a_step(), FakeDevice("acme-a"))

    assert found == expected
    validate_cache_token(found)


def test_steps_of_one_plan_have_different_tokens() -> None:
    device = FakeDevice("acme-a")

    assert len({step_token(TOKEN, step, device) for step in plan().execution_steps}) == 3


def test_the_same_step_planned_again_has_the_same_token() -> None:
    first, second = (step_token(TOKEN, a_step(), FakeDevice("acme-a")) for _ in range(2))

    assert first == second


@pytest.mark.parametrize(
    "changed",
    [
        {"device": FakeDevice("acme-b")},
        {"device": FakeDevice("acme-a", version_string="2")},
        {"device": FakeDevice("acme-a1", version_string="")},
        {"preference": ExecutionPreference.LOW_POWER},
        {"preference": ExecutionPreference.SUSTAINED_SPEED},
        {"priority": Priority.LOW},
        {"priority": Priority.HIGH},
        {"token": bytes(32)},
        {"step": replace(a_step(), subgraph=1)},
        {"step": replace(a_step(), operations=(1,))},
        {"step": replace(a_step(), operations=(0, 1))},
    ],
)
def test_a_token_differs_with_application_token_device_version_preference_priority_and_partition(
    changed: dict[str, object],
) -> None:
    usual: dict[str, object] = {
        "token": TOKEN,
        "step": a_step(),
        "device": FakeDevice("acme-a"),
        "preference": ExecutionPreference.FAST_SINGLE_ANSWER,
        "priority": Priority.MEDIUM,
    }

    assert step_token(**usual) != step_token(**(usual | changed))  # type: ignore[arg-type]
