"""The codec's microbenchmark measures what it reports, on every codec that is built."""

from __future__ import annotations

import json

import codec_bench
import pytest

from nnfmq.hal.errors import ErrorStatus
from nnfmq.serialize import codec


def test_the_packet_has_the_records_that_the_report_names() -> None:
    assert len(codec.encode_request(*codec_bench.request())) == 24 * codec_bench.RECORDS


@pytest.mark.parametrize("name", codec.available())
def test_each_operation_does_what_it_is_called(name: str) -> None:
    do = codec_bench.operations(codec.load(name))
    packet = codec.encode_request(*codec_bench.request())
    assert do["encode request"]() == packet
    assert do["decode request"]() == codec.decode_request(packet)
    assert do["decode request"]() is not do["decode request"]()
    result = do["decode result"]()
    assert result == codec.decode_result(do["encode result"]())  # type: ignore[arg-type]
    assert result.status is ErrorStatus.NONE  # type: ignore[attr-defined]


def test_there_is_one_sample_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert codec_bench.main(["--json", "--batches", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == list(codec.available())
    assert {len(values) for measured in report.values() for values in measured.values()} == {2}


def test_the_table_has_a_line_for_each_operation_of_each_codec(capsys: pytest.CaptureFixture[str]) -> None:
    codec_bench.main(["--batches", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 * len(codec.available())


def test_round_trips_alternate_between_memories() -> None:
    assert len(codec_bench.round_trips(2, 5)) == 5
