"""The priority of the compile server's session, with the files replaced; that of the processes is tested in drivers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nnfmq.driver.compilation import process
from nnfmq.driver.compilation.process_queue import Claim
from nnfmq.driver.compilation.server import _Server

BACKGROUND, FOREGROUND = Claim(1, 0, True), Claim(2, 0, False)


class _Refusing:
    """Files of which the kernel does not let this process write one."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __truediv__(self, _name: str) -> _Refusing:
        return self

    def read_text(self) -> str:
        return "/autogroup-6 nice 0\n"

    def write_text(self, _text: str) -> None:
        raise OSError(self._number, "as the test wants it")


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of this process's session; that of its parent has the value 3."""
    for name in ("self", str(os.getppid())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "autogroup").write_text("/autogroup-6 nice 3\n")
    monkeypatch.setattr(process, "_PROC", tmp_path)
    return tmp_path / "self" / "autogroup"


@pytest.mark.parametrize("nicer", [0, 5])
def test_the_session_is_nicer_than_the_parents_by_what_is_said(group: Path, nicer: int) -> None:
    assert process.set_session_priority(nicer)
    assert group.read_text() == str(3 + nicer)


def test_the_session_of_a_driver_that_is_nice_itself_has_no_higher_value_than_there_is(group: Path) -> None:
    (group.parents[1] / str(os.getppid()) / "autogroup").write_text("/autogroup-6 nice 15\n")
    assert process.set_session_priority(10)
    assert group.read_text() == "19"


def test_the_session_of_a_process_whose_parent_exits_is_nicer_than_the_default(group: Path) -> None:
    (group.parents[1] / str(os.getppid()) / "autogroup").write_text("")
    assert process.set_session_priority(10)
    assert group.read_text() == "10"


@pytest.mark.parametrize(
    ("number", "is_final"), [(errno.EAGAIN, False), (errno.ENOENT, True), (errno.EACCES, True), (errno.EROFS, True)]
)
def test_a_session_is_tried_again_only_if_the_kernel_says_so(
    monkeypatch: pytest.MonkeyPatch, number: int, is_final: bool
) -> None:
    monkeypatch.setattr(process, "_PROC", _Refusing(number))
    assert process.set_session_priority(5) is is_final


class _Compilation:
    """A compilation, as the server looks at it here: one whose process runs."""

    process = object()


def test_the_session_has_the_priority_of_background_compilations_only_while_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    may_change = True

    def set_session_priority(nicer: int) -> bool:
        tried.append(nicer)
        return may_change

    monkeypatch.setattr("nnfmq.driver.compilation.server.set_session_priority", set_session_priority)
    server = _Server.__new__(_Server)
    server._compilations, server._nicer = {}, None
    server._set_priority(BACKGROUND)
    assert tried == [10]
    server._compilations[BACKGROUND] = _Compilation()  # type: ignore[assignment]
    server._set_priority(BACKGROUND)
    assert tried == [10]  # it has it
    server._set_priority(FOREGROUND)
    server._compilations[FOREGROUND] = _Compilation()  # type: ignore[assignment]
    may_change = False
    del server._compilations[FOREGROUND]
    server._set_priority()
    server._set_priority()
    assert tried == [10, 5, 10, 10]  # until the kernel lets it
    may_change = True
    del server._compilations[BACKGROUND]
    server._set_priority()
    server._set_priority()
    assert tried == [10, 5, 10, 10, 0]  # an idle server is as quick as the driver
