"""Other transports that exchange 512 bytes for 64 between two processes: a class each, with both sides.

An instance is created before the server is forked, imports its library after the fork, and serves until it is killed.
`connect` returns (send, receive) with the signatures of the queue's methods: `send(data)` and
`receive(deadline_ns, window_ns)`; the transports ignore the last two. `end` makes a
server remove its files, if it has any.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from latency_baselines import REPLY_BYTES, REQUEST_BYTES

from nnfmq.measure.failures import RunnerUnavailable

REQUEST, REPLY = bytes(REQUEST_BYTES), bytes(REPLY_BYTES)
LAST = b"\xff" * REQUEST_BYTES
INSTALL = "pip install 'nnfmq[bench]'"
SendReceive = tuple[Callable[[Any], Any], Callable[[Any, int], Any]]


class Transport(Protocol):
    """A way to exchange messages. `folder` is for sockets."""

    def serve(self, ready: Callable[[], None]) -> None:
        """In the server: call `ready` as soon as requests may come, then reply to them."""
        ...

    def connect(self) -> SendReceive:
        """In the client, when the server is ready: return (send, receive)."""
        ...

    def end(self) -> None:
        """In the client, at the end: make the server remove its files, if it has any."""
        ...


def require(module: str) -> None:
    """Check that a module is installed.

    Raises:
        RunnerUnavailable: If it is not; the message has the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise RunnerUnavailable(f"{module} is not installed: {INSTALL}")


class OsPipes:
    """Two os.pipe, blocking: the means of the kernel and plain Python."""

    def __init__(self, folder: Path) -> None:
        self._requests, self._replies = os.pipe(), os.pipe()

    def serve(self, ready: Callable[[], None]) -> None:
        """Reply to each 512 bytes with 64."""
        ready()
        read_end, write_end = self._requests[0], self._replies[1]
        while True:
            os.read(read_end, REQUEST_BYTES)
            os.write(write_end, REPLY)

    def connect(self) -> SendReceive:
        """Return write and read of the client's two ends."""
        write_end, read_end = self._requests[1], self._replies[0]
        return lambda data: os.write(write_end, data), lambda deadline_ns, window_ns: os.read(read_end, REPLY_BYTES)

    def end(self) -> None:
        """Do nothing; no files are left."""


class Zmq:
    """pyzmq, REQ and REP over ipc://."""

    def __init__(self, folder: Path) -> None:
        require("zmq")
        self._address = f"ipc://{folder}/zmq"

    def _socket(self, kind: str) -> Any:
        import zmq

        socket = zmq.Context().socket(getattr(zmq, kind))
        socket.linger = 0
        return socket

    def serve(self, ready: Callable[[], None]) -> None:
        """Reply to each message with 64 bytes."""
        socket = self._socket("REP")
        socket.bind(self._address)
        ready()
        while True:
            socket.recv()
            socket.send(REPLY)

    def connect(self) -> SendReceive:
        """Return send and recv of a connected socket."""
        self._client = self._socket("REQ")
        self._client.connect(self._address)
        return self._client.send, lambda deadline_ns, window_ns: self._client.recv()

    def end(self) -> None:
        """Close the client's side."""
        self._client.context.destroy()


class Grpc:
    """grpcio, a unary call with raw bytes over a unix socket."""

    def __init__(self, folder: Path) -> None:
        require("grpc")
        self._address = f"unix:{folder}/grpc"

    def serve(self, ready: Callable[[], None]) -> None:
        """Reply to each call with 64 bytes."""
        import grpc

        server = grpc.server(ThreadPoolExecutor(1))
        handler = grpc.unary_unary_rpc_method_handler(lambda request, context: REPLY)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"Call": handler}),))
        server.add_insecure_port(self._address)
        server.start()
        ready()
        server.wait_for_termination()

    def connect(self) -> SendReceive:
        """Return the call as `send`, which waits for the reply, and a `receive` that does nothing."""
        import grpc

        self._channel = grpc.insecure_channel(self._address)
        return self._channel.unary_unary("/bench/Call"), lambda deadline_ns, window_ns: None

    def end(self) -> None:
        """Close the client's side."""
        self._channel.close()


class _Message512(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint8 * REQUEST_BYTES),)


class _Message64(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint8 * REPLY_BYTES),)


class _Iceoryx:
    """Base class for iceoryx2: names that no other run uses, and a server that exits on request and removes files."""

    def __init__(self, folder: Path) -> None:
        require("iceoryx2")
        self._name = f"nnfmq-bench-{folder.name}"
        self._send: Callable[[Any], Any] | None = None

    def _builder(self, suffix: str) -> Any:
        import iceoryx2

        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        self._node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        return self._node.service_builder(iceoryx2.ServiceName.new(self._name + suffix))

    def end(self) -> None:
        """Ask the server to exit; it removes its files."""
        if self._send is not None:
            self._send(_Message512.from_buffer_copy(LAST))


class IceoryxPubSub(_Iceoryx):
    """iceoryx2, a service in each direction; both sides poll."""

    def _ports(self, out: tuple[str, Any], into: tuple[str, Any]) -> tuple[Any, Any]:
        publisher = self._builder(out[0]).publish_subscribe(out[1]).open_or_create().publisher_builder().create()
        service = self._builder(into[0]).publish_subscribe(into[1]).open_or_create()
        return publisher, service.subscriber_builder().create()

    def serve(self, ready: Callable[[], None]) -> None:
        """Reply to each sample with one of 64 bytes, until the last."""
        publisher, subscriber = self._ports(("-replies", _Message64), ("-requests", _Message512))
        reply, is_last = _Message64(), False
        ready()
        while not is_last:
            sample = subscriber.receive()
            if sample is not None:
                is_last = sample.payload().contents.data[0] == LAST[0]
                publisher.send_copy(reply)

    def connect(self) -> SendReceive:
        """Return send_copy, and a receive that polls."""
        publisher, subscriber = self._ports(("-requests", _Message512), ("-replies", _Message64))
        request = _Message512()
        self._send = publisher.send_copy

        def receive(deadline_ns: int | None, window_ns: int) -> Any:
            while (sample := subscriber.receive()) is None:
                pass
            return sample.payload().contents

        return lambda data: publisher.send_copy(request), receive


class IceoryxRequestResponse(_Iceoryx):
    """iceoryx2, requests and their responses; both sides poll."""

    def _service(self) -> Any:
        return self._builder("-calls").request_response(_Message512, _Message64).open_or_create()

    def serve(self, ready: Callable[[], None]) -> None:
        """Reply to each request with 64 bytes, until the last."""
        server = self._service().server_builder().create()
        reply, is_last = _Message64(), False
        ready()
        while not is_last:
            request = server.receive()
            if request is not None:
                is_last = request.payload().contents.data[0] == LAST[0]
                request.send_copy(reply)

    def connect(self) -> SendReceive:
        """Return a send that stores the pending response, and a receive that polls it."""
        client = self._service().client_builder().create()
        request = _Message512()
        self._send = client.send_copy
        pending: list[Any] = [None]

        def send(data: bytes) -> None:
            pending[0] = client.send_copy(request)

        def receive(deadline_ns: int | None, window_ns: int) -> Any:
            while (response := pending[0].receive()) is None:
                pass
            return response.payload().contents

        return send, receive


TRANSPORTS: dict[str, Callable[[Path], Transport]] = {
    "os.pipe": OsPipes,
    "pyzmq": Zmq,
    "grpc": Grpc,
    "iceoryx2 pub-sub": IceoryxPubSub,
    "iceoryx2 request-response": IceoryxRequestResponse,
}
