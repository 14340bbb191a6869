"""`async with nnfmq.connect(...)` lets the other tasks of the event loop run, whatever its arguments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.drivers import LIMIT_S, Daemon, running_daemon

import nnfmq

BEATS = 10
"""So often the loop runs at least, while a driver starts, unless a call blocks it."""


class Heart:
    """Counts how often the event loop runs."""

    def __init__(self) -> None:
        self.beats = 0
        self._is_stopped = False
        self._beat()

    def _beat(self) -> None:
        self.beats += 1
        if not self._is_stopped:
            asyncio.get_running_loop().call_later(0.001, self._beat)

    async def reaches(self, beats: int) -> None:
        while self.beats < beats:
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._is_stopped = True


@asynccontextmanager
async def heart() -> AsyncIterator[Heart]:
    made = Heart()
    yield made
    made.stop()


@pytest.fixture
def path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the default socket, where no driver listens yet."""
    monkeypatch.setenv("NNFMQ_SOCKET", str(folder / "d.sock"))
    return folder / "d.sock"


@pytest.mark.parametrize("is_named", [True, False])
def test_a_driver_may_be_started_by_another_task_while_one_waits_for_it(
    is_named: bool, path: Path, resources: ExitStack
) -> None:
    async def main() -> None:
        async with heart() as beating:
            starting = asyncio.create_task(start(beating))
            waiting = nnfmq.connect(path if is_named else None, wait=True, timeout=LIMIT_S)
            assert "waits for a driver" in repr(waiting)
            async with waiting as client:
                assert client is waiting and client.driver_pid > 0 and not client.is_embedded
                assert [info.name for info in client.devices()]
            await starting

    async def start(beating: Heart) -> None:
        await beating.reaches(BEATS)
        await asyncio.to_thread(lambda: resources.enter_context(running_daemon(path)))

    asyncio.run(main())


@pytest.mark.parametrize("arguments", [{"embedded": True}, {"embedded": True, "wait_ready": True}, {"recover": False}])
def test_an_embedded_driver_starts_beside_the_loop(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("NNFMQ_SOCKET", raising=False)

    async def main() -> None:
        async with heart() as beating:
            before = beating.beats
            async with nnfmq.connect(**arguments) as client:
                assert client.connection.has_started
                assert beating.beats > before + BEATS

    asyncio.run(main())


@pytest.mark.parametrize("arguments", [{}, {"wait": True}, {"wait_ready": True}, {"embedded": False}])
def test_a_driver_that_does_not_reply_yet_does_not_block_the_loop(arguments: dict[str, Any], folder: Path) -> None:
    async def main(daemon: Daemon) -> None:
        daemon.process.stop()
        async with heart() as beating:
            waking = asyncio.create_task(resume(daemon, beating))
            async with nnfmq.connect(daemon.path, timeout=LIMIT_S, **arguments) as client:
                assert client.driver_pid == daemon.process.pid
            await waking

    async def resume(daemon: Daemon, beating: Heart) -> None:
        await beating.reaches(BEATS)
        daemon.process.resume()

    with running_daemon(folder / "d.sock") as daemon:
        asyncio.run(main(daemon))


def test_a_task_that_is_cancelled_while_it_waits_leaves_no_thread(path: Path) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), nnfmq.connect(path, wait=True, timeout=None):
                pass

    asyncio.run(main())
    assert threading.active_count() == 1


def test_a_wait_whose_timeout_passes_says_that_no_driver_listens(path: Path) -> None:
    async def main() -> None:
        async with nnfmq.connect(path, wait=True, timeout=0.05):
            pass

    with pytest.raises(nnfmq.DeviceUnavailable, match="no driver listens"):
        asyncio.run(main())


def test_without_async_with_the_first_use_waits(daemon: Daemon) -> None:
    async def main() -> None:
        with nnfmq.connect(daemon.path, wait=True) as client:
            assert client.device("reference").info.name == "reference"
            assert not hasattr(client, "no_such_attribute")
        assert "closed" in repr(client)

    asyncio.run(main())


def test_a_client_that_is_closed_before_it_has_connected_stays_closed(path: Path) -> None:
    async def main() -> None:
        client = nnfmq.connect(path, wait=True, timeout=None)
        client.close()
        assert repr(client) == "<Client, closed>"
        with pytest.raises(nnfmq.BadState, match="closed"):
            client.devices()
        with pytest.raises(nnfmq.BadState, match="closed"):
            await client.__aenter__()

    asyncio.run(main())
