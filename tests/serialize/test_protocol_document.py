"""The tables of docs/reference/protocol.md are those of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest
from support import places

from nnfmq.serialize import control_protocol, execution_stats, messages, packets, repository_protocol
from nnfmq.serialize.codec import decode_request
from nnfmq.serialize.control_protocol import FD_COUNTS, REPLIES, TRANSITIONS, PeerRole, Phase
from nnfmq.serialize.messages import Message
from nnfmq.serialize.packets import DatumVariant

Row = tuple[str, ...]
CODES = {"B": "u8", "I": "u32", "i": "i32", "Q": "u64"}
DATA = (
    messages.DeviceInfo,
    messages.ExtensionData,
    messages.OperandTypeData,
    messages.CapabilitiesData,
    messages.OperandPerformanceData,
    messages.PerformanceData,
    messages.MQDescriptorData,
    messages.GrantorData,
    messages.MemoryData,
    messages.TokenData,
    messages.RequestData,
    messages.ArgumentData,
    messages.LocationData,
    messages.ConfigData,
    messages.RoleData,
    messages.HintData,
    messages.PrefixData,
    messages.CachesData,
    messages.ShapeData,
)


@pytest.fixture
def tables() -> list[list[Row]]:
    """Return the rows of every table of the document, without their headings."""
    text = (places.ROOT / "docs" / "reference" / "protocol.md").read_text()
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    return [
        [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()] for table in found
    ]


def table(tables: list[list[Row]], *headings: str) -> list[Row]:
    """Return the rows of the tables with these headings, one after another."""
    return [row for rows in tables if rows[0] == headings for row in rows[2:]]


def quoted(names: Iterator[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def fields_of(kind: type[msgspec.Struct]) -> str:
    return quoted(field.encode_name for field in msgspec.structs.fields(kind))


def rows_of_messages() -> Iterator[Row]:
    """Return the rows of the code, except those of the closed phase, which the document describes in its text."""
    for sender in PeerRole:
        for phase, allowed in TRANSITIONS[sender].items():
            for kind, next_phase in allowed.items():
                if phase is not Phase.CLOSED:
                    yield _row(kind, sender, phase, next_phase)


def _row(kind: type[Message], sender: PeerRole, phase: Phase, next_phase: Phase) -> Row:
    fds = FD_COUNTS.get(kind, "")
    replies = REPLIES.get(kind, ())  # type: ignore[call-overload]
    return (
        f"`{kind.__name__}`",
        sender.value,
        phase.value,
        next_phase.value,
        f"`{fds}`" if fds and isinstance(fds, str) else str(fds),
        quoted(reply.__name__ for reply in replies),
        fields_of(kind),
    )


def rows_of_records(variants: tuple[DatumVariant, ...]) -> list[Row]:
    return [
        (str(v.discriminator), f"`{v.name}`", ", ".join(f"`{f.name}` {CODES[f.code]} @{f.offset}" for f in v.fields))
        for v in variants
    ]


def test_the_table_of_messages_agrees_with_the_code(tables: list[list[Row]]) -> None:
    documented = table(tables, "message", "from", "phase", "next phase", "fds", "replies", "fields")
    assert sorted(documented) == sorted(rows_of_messages())


def test_after_goodbye_the_driver_may_send_what_it_may_send_while_open() -> None:
    assert TRANSITIONS[PeerRole.DRIVER][Phase.CLOSED].keys() == TRANSITIONS[PeerRole.DRIVER][Phase.OPEN].keys()
    assert Phase.CLOSED not in TRANSITIONS[PeerRole.CLIENT]


def test_the_data_inside_messages_are_as_documented(tables: list[list[Row]]) -> None:
    documented = [(name, fields) for name, _, fields in table(tables, "name", "where", "array of")]
    assert documented == [(f"`{kind.__name__}`", fields_of(kind)) for kind in DATA]


def test_the_records_are_as_documented(tables: list[list[Row]]) -> None:
    documented = table(tables, "kind", "record", "fields at bytes")
    assert documented == [*rows_of_records(packets.REQUEST_VARIANTS), *rows_of_records(packets.RESULT_VARIANTS)]


def test_the_execution_statistics_are_as_documented(tables: list[list[Row]]) -> None:
    documented = {name.strip("`"): int(word) for word, name, _ in table(tables, "word", "name", "meaning")}
    assert documented == {name: vars(execution_stats)[name] for name in documented}
    assert sorted(documented.values()) == list(range(execution_stats.RESERVED + 1))


def test_the_limits_are_as_documented() -> None:
    text = " ".join((places.ROOT / "docs" / "reference" / "protocol.md").read_text().split())
    assert f"at most {control_protocol.MAX_BODY_BYTES >> 20} MiB and {messages.MAX_FDS} file descriptors" in text
    assert f"a name at most {messages.MAX_NAME} characters, an error text {messages.MAX_TEXT}" in text
    assert f"protocol (this is {control_protocol.PROTOCOL})" in text


def test_the_example_of_the_codec_runs() -> None:
    text = (places.ROOT / "docs" / "reference" / "protocol.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert names["request"] == decode_request(names["packet"])  # type: ignore[arg-type]


def test_the_messages_of_the_model_repository_are_as_documented(tables: list[list[Row]]) -> None:
    documented = table(tables, "repository message", "from", "fds", "reply", "fields")
    senders = repository_protocol.SENDERS
    kinds = {kind.__name__: (sender.value, kind) for sender, allowed in senders.items() for kind in allowed}
    assert [row[0].strip("`") for row in documented] == [
        "OpenModel", "ModelOpened", "ListModels", "ModelList", "VersionChanged"
    ]  # fmt: skip
    assert {row[0].strip("`") for row in documented} == kinds.keys()
    for name, sender, fds, _, fields in documented:
        assert (sender, fields) == (kinds[name.strip("`")][0], fields_of(kinds[name.strip("`")][1]))
        assert fds == ("`pools`" if name == "`ModelOpened`" else "")


def test_the_data_of_the_model_repository_are_as_documented(tables: list[list[Row]]) -> None:
    kinds = (repository_protocol.ModelDescription, repository_protocol.ModelEntry)
    documented = table(tables, "repository data", "fields")
    assert documented == [(f"`{kind.__name__}`", fields_of(kind)) for kind in kinds]
