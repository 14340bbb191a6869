"""`model.toml`: each key, each wrong value."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import nnfmq
from nnfmq.hal.types import ExecutionPreference, Priority
from nnfmq.repository.version_import import FILE_NAME, VersionOptions, read_options


def options(folder: Path, text: str | bytes) -> VersionOptions:
    (folder / FILE_NAME).write_bytes(text.encode() if isinstance(text, str) else text)
    return read_options(folder)


def test_without_a_file_and_without_keys_everything_has_its_default(tmp_path: Path) -> None:
    default = VersionOptions("", ExecutionPreference.SUSTAINED_SPEED, Priority.MEDIUM, 1, None, {})
    assert read_options(tmp_path) == options(tmp_path, "# nothing\n") == default


def test_every_key_is_read(tmp_path: Path) -> None:
    text = 'device = "reference"\npreference = "low_power"\npriority = "high"\nbatch = 65536\nsignature = "serve"'
    assert options(tmp_path, text) == VersionOptions(
        "reference", ExecutionPreference.LOW_POWER, Priority.HIGH, 65536, "serve"
    )
    assert options(tmp_path, 'preference = "fast_single_answer"').preference == ExecutionPreference.FAST_SINGLE_ANSWER
    assert options(tmp_path, 'priority = "low"').priority == Priority.LOW
    given = options(tmp_path, "[runtime_options]\nthreads = 1\nproviders = ['CPUExecutionProvider']")
    assert given.runtime_options == {"threads": 1, "providers": ["CPUExecutionProvider"]}
    assert options(tmp_path, "deterministic = true").deterministic is True
    assert options(tmp_path, "deterministic = false").deterministic is False
    assert options(tmp_path, "shapes = { x = [1, 4], scalar = [] }").shapes == {"x": (1, 4), "scalar": ()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threads = 2", "there is no key 'threads'; allowed: device, preference, priority, batch, signature, shapes"),
        *[
            (f"shapes = {wrong}", "allowed: a table of shapes by the names of inputs, each an array of integers of at")
            for wrong in (
                "[1, 4]",
                "{}",
                "{ x = 4 }",
                "{ x = [0] }",
                "{ x = [true] }",
                "{ x = [1.0] }",
                "{ x = ['a'] }",
            )
        ],
        (f"shapes = {{ x = {[1] * 33} }}", "allowed: a table of shapes"),
        ("shapes = { x = [2147483648] }", "allowed: a table of shapes"),
        ("[model]\ndevice = 'x'", "there is no key 'model'"),
        ("device = ''", "device is ''; allowed: the name of a device of the driver"),
        ("device = 1", "device is 1; allowed: the name of a device of the driver"),
        ("device = '" + "x" * 257 + "'", "xxx; allowed: the name of a device"),
        ("signature = false", "signature is False; allowed: the name of a signature of the model file"),
        (
            "preference = 'quick'",
            "preference is 'quick'; allowed: 'low_power', 'fast_single_answer', 's",
        ),
        ("deterministic = 1", "deterministic is 1; allowed: true or false"),
        ("preference = 1", "preference is 1; allowed: 'low_power', 'fast_single_answer', 'sustained_speed'"),
        ("priority = 'urgent'", "priority is 'urgent'; allowed: 'low', 'medium', 'high'"),
        ("batch = 0", "batch is 0; allowed: an integer from 1 to 65536"),
        ("batch = 65537", "batch is 65537; allowed: an integer from 1 to 65536"),
        ("batch = true", "batch is True; allowed: an integer from 1 to 65536"),
        ("batch = 2.0", "batch is 2.0; allowed: an integer from 1 to 65536"),
        *[
            (f"runtime_options = {wrong}", "allowed: a table of options of a hosted runtime, values of JSON")
            for wrong in ("1", "{}", "{ a = 1979-05-27 }", "{ a = [{ b = 07:32:00 }] }")
        ],
        ("device = ", "model.toml is no TOML: "),
        (b"device = '\xff'", "model.toml is no TOML: "),
        ("a = " + "[" * 5000, "model.toml is no TOML: "),
        ("#" * 65537, "model.toml has more than 65536 bytes"),
    ],
)
def test_a_wrong_file_is_rejected_with_key_value_and_what_is_allowed(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(nnfmq.InvalidArgument) as raised:
        options(tmp_path, text)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_file_that_is_no_regular_file_is_rejected_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / FILE_NAME)
    with pytest.raises(nnfmq.InvalidArgument, match="no regular file"):
        read_options(tmp_path)
