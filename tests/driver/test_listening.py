"""Which sockets of a service manager a driver takes, and why it refuses others."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.drivers import short_folder
from support.service_manager import seqpacket_listener

from nnfmq.base.paths import models_socket
from nnfmq.driver.process import listening
from nnfmq.driver.process.listening import PassedSockets, open_listeners, take_passed_sockets
from nnfmq.hal.errors import InvalidArgument

UNIX = socket.AF_UNIX
REMEDY = r"write ListenSequentialPacket=PATH into the \.socket unit, and neither ListenStream= nor Accept=yes"


@pytest.fixture
def path() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder / "d.sock"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def taken(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, *passed: socket.socket | int, named: Path | None = None
) -> PassedSockets | None:
    """Return what a driver takes of these; closes them."""
    fds = [each if isinstance(each, int) else each.detach() for each in passed]
    monkeypatch.setattr(listening, "take_passed_fds", lambda: fds)
    return take_passed_sockets(stack, named)


def test_without_a_manager_there_are_none(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(stack, monkeypatch) is None


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_second_socket_is_that_of_models_by_name_in_either_order(
    is_reversed: bool, path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = [seqpacket_listener(path), seqpacket_listener(models_socket(path))]
    found = taken(stack, monkeypatch, *(reversed(sockets) if is_reversed else sockets), named=path)
    assert found is not None and found.models is not None
    assert (found.path, found.listener.path(), found.models.path()) == (path, path, models_socket(path))
    assert open_listeners(stack, path, True, None, found, 0o600) == (found.listener, found.models)
    with pytest.raises(InvalidArgument, match=r"d\.sock\.models for models by name, but this driver has none"):
        open_listeners(stack, path, False, None, found, 0o600)


def inet() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def stream(path: Path) -> socket.socket:
    listener = socket.socket(UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


def connected() -> socket.socket:
    one, other = socket.socketpair(UNIX, socket.SOCK_SEQPACKET)
    other.close()
    return one


def fifo(path: Path) -> int:
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda _path: inet(), "and this one is an AF_INET STREAM socket"),
        (stream, "and this one is an AF_UNIX STREAM socket"),
        (lambda _path: socket.socket(UNIX, socket.SOCK_DGRAM), "and this one is an AF_UNIX DGRAM socket"),
        (lambda _path: connected(), "and this one does not listen"),
        (fifo, "Socket operation on non-socket"),
    ],
    ids=["inet", "stream", "datagram", "connected", "fifo"],
)
def test_another_kind_of_descriptor_is_refused_with_what_to_write(
    make: object, found: str, path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(make)
    text = rf"^the service manager passes descriptor \d+: a listener needs .*{found}; {REMEDY}$"
    with pytest.raises(InvalidArgument, match=text):
        taken(stack, monkeypatch, make(path))


def test_a_socket_without_a_path_is_refused(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket(UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0nnfmq-{os.getpid()}")
    listener.listen()
    with pytest.raises(InvalidArgument, match=f"passes a socket that has no path; {REMEDY}"):
        taken(stack, monkeypatch, listener)


def test_two_sockets_that_do_not_belong_together_are_refused(
    path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = path.with_name("other.sock")
    with pytest.raises(InvalidArgument, match=rf"{path} and {other}; allowed beside the first is {path}\.models"):
        taken(stack, monkeypatch, seqpacket_listener(path), seqpacket_listener(other))


def test_another_socket_than_the_option_names_is_refused(
    path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match=r"--socket names /other\.sock: leave out --socket"):
        taken(stack, monkeypatch, seqpacket_listener(path), named=Path("/other.sock"))
