"""The priority of the compile server's session, with the file replaced; that of the processes is tested in drivers."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from nnfmq.driver.compilation import process


class _Refusing:
    """A file that the kernel does not let this process write."""

    def __init__(self, number: int) -> None:
        self._number = number

    def write_text(self, _text: str) -> None:
        raise OSError(self._number, "as the test wants it")


def test_the_value_for_the_session_is_that_of_compilations_that_callers_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_AUTOGROUP", tmp_path / "autogroup")
    assert process.lower_session_priority()
    assert (tmp_path / "autogroup").read_text() == "5"


@pytest.mark.parametrize(
    ("number", "is_final"), [(errno.EAGAIN, False), (errno.ENOENT, True), (errno.EACCES, True), (errno.EROFS, True)]
)
def test_a_session_is_tried_again_only_if_the_kernel_says_so(
    monkeypatch: pytest.MonkeyPatch, number: int, is_final: bool
) -> None:
    monkeypatch.setattr(process, "_AUTOGROUP", _Refusing(number))
    assert process.lower_session_priority() is is_final
