"""Limits on a client's number of objects in a driver, which have costs that no quota counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support import models

from nnfmq.client.connection.client import Client
from nnfmq.client.connection.connection import Connection
from nnfmq.client.connection.device import Device
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.driver.session.handle_table import HandleTable
from nnfmq.driver.session.session import Session
from nnfmq.hal.errors import ResourceExhaustedTransient

FEW = 3
ADD = models.add_model()
FLOATS = np.zeros(4, np.float32)
Make = Callable[[Device, PreparedModel], Any]

KINDS: dict[str, tuple[Callable[[Session], HandleTable[Any]], Make]] = {
    "models": (lambda session: session.models, lambda device, _: device.prepare(ADD)),
    "bursts": (lambda session: session.bursts, lambda _, model: model.request_burst()),
    "AIDL bursts": (lambda session: session.aidl_bursts, lambda _, model: model.aidl_burst()),
    "executions": (lambda session: session.executions, lambda _, model: model.create_reusable_execution()),
    "fenced executions": (
        lambda session: session.fenced_callbacks,
        lambda _, model: model.execute_fenced(FLOATS, FLOATS),
    ),
    "buffers": (
        lambda session: session.buffers._handles,
        lambda device, model: device.allocate(inputs=[(model, 0)], dimensions=[4]),
    ),
}


@pytest.mark.parametrize(("handles_of", "make"), KINDS.values(), ids=KINDS.keys())
def test_LIFE_8_the_number_of_a_client_s_objects_of_each_kind_is_limited(
    handles_of: Callable[[Session], HandleTable[Any]],
    make: Make,
    real: tuple[Connection, Session],
    resources: ExitStack,
) -> None:
    connection, session = real
    device = Client(connection, None).device("reference")
    model = device.prepare(ADD)
    handles = handles_of(session)
    limit = handles._limit._limit = len(handles.values()) + FEW
    made = [resources.enter_context(make(device, model)) for _ in range(FEW)]
    with pytest.raises(ResourceExhaustedTransient, match=f"has {limit} .*s already"):
        make(device, model)
    assert len(handles.values()) == limit
    made[0].close()
    resources.enter_context(make(device, model))
