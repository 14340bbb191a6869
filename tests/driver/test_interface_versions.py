"""The tables of the interface versions, and handshakes with unknown versions."""

from __future__ import annotations

import pytest
from support import places

from nnfmq.driver.devices import interface_versions
from nnfmq.driver.devices.interface_versions import InterfaceVersion
from nnfmq.driver.session.calls import HANDLERS
from nnfmq.driver.session.session import HandlerThread
from nnfmq.hal.errors import ErrorStatus
from nnfmq.hal.feature_levels import FeatureLevel as L
from nnfmq.hal.feature_levels import interface_name
from nnfmq.serialize import messages
from nnfmq.serialize.control_protocol import REPLIES, PeerRole, message_types_of


def test_every_call_of_the_table_can_be_rejected() -> None:
    assert set(interface_versions.CALLS) <= set(REPLIES) & set(message_types_of(PeerRole.CLIENT))
    assert [call for call in interface_versions.CALLS if HANDLERS[call].thread is HandlerThread.WATCHER] == []


def rows(columns: int) -> list[tuple[str, ...]]:
    """Return the rows of the document's tables with this number of columns, without backticks."""
    lines = (places.ROOT / "docs" / "reference" / "hal-versions.md").read_text().replace("`", "").splitlines()
    found = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("|")]
    return [row for row in found if len(row) == columns and not row[0].startswith("---")][1:]


def test_the_document_has_the_tables() -> None:
    assert rows(4) == [
        (kind.__name__, span.name, interface_name(span.first), interface_name(span.last))
        for kind, span in interface_versions.CALLS.items()
    ]
    assert rows(2) == [(value.description, interface_name(value.first)) for value in interface_versions.ARGUMENTS]


def test_no_call_is_in_every_interface_and_in_the_table() -> None:
    assert [
        span.name for span in interface_versions.CALLS.values() if (span.first, span.last) == (L.V1_0, L.AIDL_V4)
    ] == []


@pytest.mark.parametrize("status", ErrorStatus)
@pytest.mark.parametrize("level", L, ids=interface_name)
def test_EXE_9_an_interface_reports_only_its_own_statuses(level: L, status: ErrorStatus) -> None:
    last = 4 if level < L.V1_3 else 8
    downgraded = status if status <= last else ErrorStatus.GENERAL_FAILURE
    if level is L.AIDL_V4 and status is ErrorStatus.DEAD_OBJECT:
        return  # no driver sends this status
    assert InterfaceVersion(level).downgrade_reply(messages.Reply(1, status, "why")) == messages.Reply(
        1, downgraded, "why"
    )


@pytest.mark.parametrize("level", L, ids=interface_name)
def test_TIM_2_times_of_every_reply_are_whole_microseconds_in_hidl(level: L) -> None:
    reply = messages.Executed(1, ErrorStatus.NONE, "", (), 1999, 5001)
    times = {L.V1_0: (-1, -1), L.V1_1: (-1, -1), L.V1_2: (1000, 5000), L.V1_3: (1000, 5000)}.get(level, (1999, 5001))
    downgraded = InterfaceVersion(level).downgrade_reply(reply)
    assert (downgraded.time_on_device_ns, downgraded.time_in_driver_ns) == times
    nothing = messages.Executed(1, ErrorStatus.NONE, "")
    assert InterfaceVersion(level).downgrade_reply(nothing) == nothing
