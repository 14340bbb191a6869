"""`nnfmq gateway`: serves a running driver's models to other machines, over HTTP and gRPC, as a process of its own.

The protocol is the Open Inference Protocol with Triton's extensions: docs/reference/inference-protocol.md.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nnfmq.base import settings
from nnfmq.base.channel import is_listening
from nnfmq.base.paths import client_socket
from nnfmq.cli.console import add_socket_argument
from nnfmq.hal.errors import DeviceUnavailable

if TYPE_CHECKING:
    from nnfmq.serving.inference_protocol.access import BearerTokens
    from nnfmq.serving.inference_protocol.http import MetricsReader
    from nnfmq.serving.inference_protocol.listeners import TlsFiles
    from nnfmq.serving.server import ModelServer

EXAMPLES = """\
examples:
  nnfmq gateway                           # http://127.0.0.1:8000, gRPC: 8001
  nnfmq gateway --http 0.0.0.0:8000 --grpc none --token-file tokens
  nnfmq gateway --tls-certificate server.pem --tls-key server.key

The driver may start later. It must serve models by name: nnfmq serve --models
DIR. Needs uvicorn and grpcio: pip install 'nnfmq[serving]'. Exit status 0 after
SIGTERM or Ctrl-C.
"""
_NONE = "none"


class Address(NamedTuple):
    """The host and the port at which a server listens."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        import ipaddress

        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def text(self, port: int) -> str:
        """Return the address with the port at which the server listens."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `gateway`."""
    parser.usage = "%(prog)s [options]"
    add_socket_argument(parser)
    for name, port in (("http", 8000), ("grpc", 8001)):
        parser.add_argument(
            f"--{name}",
            metavar="HOST:PORT",
            type=address,
            default=f"127.0.0.1:{port}",
            help="where it listens, or none (default: %(default)s)",
        )
    parser.add_argument(
        "--tls-certificate",
        metavar="FILE",
        type=Path,
        help="PEM of the server's certificate and its chain",
    )
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="PEM of its private key")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="tokens, one a line, of which requests need one",
    )


def address(text: str) -> Address | None:
    """Argparse type: HOST:PORT; None for "none"."""
    if text == _NONE:
        return None
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is neither HOST:PORT, such as 127.0.0.1:8000, nor none")
    return Address(host, int(port))


def execute(arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives; return the exit status. The driver may end and start meanwhile."""
    if (arguments.tls_certificate is None) != (arguments.tls_key is None):
        return _wrong_usage("--tls-certificate and --tls-key belong together")
    if arguments.http is None and arguments.grpc is None:
        return _wrong_usage("--http and --grpc are both none: nothing is left to serve")
    try:
        from nnfmq.serving.inference_protocol.access import BearerTokens
        from nnfmq.serving.inference_protocol.listeners import TlsFiles
    except ModuleNotFoundError as error:
        print(f"nnfmq: error: this needs {error.name}: pip install 'nnfmq[serving]'", file=sys.stderr)
        return 1
    from nnfmq.base import logs

    logs.configure()
    tls = None if arguments.tls_key is None else TlsFiles(arguments.tls_certificate, arguments.tls_key)
    tokens = None if arguments.token_file is None else BearerTokens.read(arguments.token_file)
    _warn(arguments, tls, tokens)
    asyncio.run(_serve(arguments, tls, tokens))
    return 0


def _wrong_usage(reason: str) -> int:
    print(f"nnfmq: error: {reason}", file=sys.stderr)
    return 2


def _warn(arguments: argparse.Namespace, tls: TlsFiles | None, tokens: BearerTokens | None) -> None:
    """Say on stderr what an address that other machines reach lacks."""
    lacking = {
        "no --token-file: anybody can use the models": tokens,
        "no --tls-certificate: anybody can read along": tls,
    }
    reasons = [reason for reason, given in lacking.items() if given is None]
    for each in (arguments.http, arguments.grpc):
        if each is not None and not each.is_loopback and reasons:
            print(f"nnfmq: warning: {each.text(each.port)} has {'; '.join(reasons)}", file=sys.stderr)


async def _serve(arguments: argparse.Namespace, tls: TlsFiles | None, tokens: BearerTokens | None) -> None:
    from nnfmq.serving.server import open_server

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with open_server(arguments.connect) as service:
        models = await _models(service, arguments.connect)
        async with _listening(service, arguments, tls, tokens) as addresses:
            for line in (*addresses, models):
                print(f"nnfmq: {line}", flush=True)
            await ended.wait()


async def _models(service: ModelServer, path: str | None) -> str:
    """Return which models are served, or that a driver has to start, as a line.

    Raises:
        NnfmqError: If a driver listens, but does not serve this process.
    """
    try:
        models = await service.model_index()
    except DeviceUnavailable as error:
        if not is_listening(client_socket() if path is None else Path(path)):
            return f"requests are refused until a driver listens: {error}"
        models = await service.model_index()  # it listens now, or it does not serve this process
    return f"serving {', '.join(entry.name for entry in models) or 'no model yet'}"


@asynccontextmanager
async def _listening(
    service: ModelServer, arguments: argparse.Namespace, tls: TlsFiles | None, tokens: BearerTokens | None
) -> AsyncIterator[list[str]]:
    """Listen at the addresses until the block ends; yields a line for each."""
    from nnfmq.serving.inference_protocol.http import InferenceApp
    from nnfmq.serving.inference_protocol.listeners import grpc_server, http_server
    from nnfmq.serving.inference_protocol.tensors import RequestLimits

    limits = RequestLimits(max_total_bytes=settings.REQUESTS_MIB.value() << 20, max_calls=settings.GRPC_CALLS.value())
    lines = []
    async with AsyncExitStack() as stack:
        if (web := arguments.http) is not None:
            metrics = stack.enter_context(_metrics(service, arguments.connect))
            app = InferenceApp(service, limits=limits, tokens=tokens, metrics=metrics)
            port = await stack.enter_async_context(http_server(app, web.host, web.port, tls=tls))
            lines.append(f"HTTP at http{'s' if tls else ''}://{web.text(port)}")
        if (rpc := arguments.grpc) is not None:
            server = grpc_server(service, rpc.host, rpc.port, tls=tls, tokens=tokens, limits=limits)
            port = await stack.enter_async_context(server)
            lines.append(f"gRPC at {rpc.text(port)}{' with TLS' if tls else ''}")
        yield lines


@contextmanager
def _metrics(service: ModelServer, path: str | None) -> Iterator[MetricsReader | None]:
    """Yield a reader of the metrics of the driver and of this gateway; None without prometheus-client."""
    try:
        import prometheus_client
    except ModuleNotFoundError:
        yield None
        return
    from nnfmq.cli.metrics import DriverReader
    from nnfmq.cli.metrics_collector import DriverCollector, RequestCollector

    registry = prometheus_client.CollectorRegistry()
    with DriverReader(path) as reader:
        registry.register(DriverCollector(reader.read))
        registry.register(RequestCollector(service.counts))
        yield lambda: (prometheus_client.generate_latest(registry), prometheus_client.CONTENT_TYPE_LATEST)
