"""The verbose log of real applications and drivers, also when a driver is killed. (OBS-5)"""

from __future__ import annotations

import re

import pytest
from support.drivers import Daemon, Process, app

from nnfmq.base.verbose_log import TAGS

OPERATIONS = ["CONV_2D", "MAX_POOL_2D", "CONV_2D", "MAX_POOL_2D", "FULLY_CONNECTED", "SOFTMAX"]


def log_of(target: object, device: str, tags: str) -> list[tuple[int, str, str]]:
    """Run the application `traced`; return pid, tag and text of the lines of both processes."""
    with app("traced", target, device, environment={"NNFMQ_VLOG": tags}) as program:
        program.tell("1")
        program.line()
        program.end_input()
        assert program.wait() == 0
        return parsed(program.errors())


def parsed(text: str) -> list[tuple[int, str, str]]:
    found = [re.fullmatch(r"\S+Z INFO nnfmq\.vlog\.(\w+)\[(\d+)\]: (.*)", line) for line in text.splitlines()]
    assert all(found), text
    return [(int(one[2]), one[1], one[3]) for one in found if one]


def test_OBS_5_client_and_driver_log_the_tags_that_are_on() -> None:
    lines = log_of("embedded", "reference", "compilation:cpuexe,driver")
    assert {tag for _, tag, _ in lines} == {"compilation", "cpuexe", "driver"}
    assert len({pid for pid, _, _ in lines}) == 2
    texts = [text for _, _, text in lines]
    assert texts[0] == "device reference prepares model 'digits.tflite'"
    assert "device reference has prepared model 'digits.tflite' with id 1" in texts
    operations = [text for _, tag, text in lines if tag == "cpuexe"]
    one_run = [f"operation {number} {name}" for number, name in enumerate(OPERATIONS)]
    assert operations == one_run * 2  # one execution in the burst, and a synchronous one
    assert sum(text.startswith("PrepareModel took ") for text in texts) == 1


def test_OBS_5_each_tag_has_lines_but_the_model_s() -> None:
    assert {tag for _, tag, _ in log_of("embedded", "reference", "all")} == {*TAGS} - {"model"}


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_OBS_5_nothing_is_logged_without_the_setting(device: str) -> None:
    assert log_of("embedded", device, "") == []


def test_OBS_5_the_log_names_the_end_of_a_killed_driver(daemon: Daemon) -> None:
    with app("traced", daemon.path, "reference", environment={"NNFMQ_VLOG": "manager"}) as program:
        program.tell("1")
        with Process(int(program.line())) as worker:
            worker.kill()
        program.tell("1")
        assert program.wait() == 1
        lines = [line for line in program.errors().splitlines() if "nnfmq.vlog.manager" in line]
    ends = [text for _, _, text in parsed("\n".join(lines)) if text.startswith("the connection has ended: ")]
    assert len(ends) == 1
    assert ends[0].startswith("the connection has ended: the driver ")
