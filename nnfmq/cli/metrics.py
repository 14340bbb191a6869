"""`nnfmq metrics`: a Prometheus endpoint for a driver, as a process of its own; and the Grafana dashboard."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nnfmq.cli.console import add_socket_argument, open_running

if TYPE_CHECKING:
    from nnfmq.cli.statistics import DriverSample
    from nnfmq.client.connection.client import Client

EXAMPLES = """\
examples:
  nnfmq metrics                           # http://127.0.0.1:9464/metrics
  nnfmq metrics --listen unix:/run/user/1000/nnfmq/metrics.sock
  nnfmq metrics --dashboard > nnfmq.json  # to import into Grafana

Needs prometheus-client: pip install 'nnfmq[metrics]'. Exit status 0 after SIGTERM or Ctrl-C.
"""
_DEFAULT = "127.0.0.1:9464"
_UNIX = "unix:"
_REPOSITORY_S = 2.0  # for the reply of the model repository
_log = logging.getLogger("nnfmq.metrics")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `metrics`."""
    add_socket_argument(parser)
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        type=listen_address,
        default=_DEFAULT,
        help="unix:PATH, or a loopback address with a port; port 0 takes any (default: %(default)s)",
    )
    parser.add_argument("--dashboard", action="store_true", help="print the Grafana dashboard as JSON instead")


def listen_address(text: str) -> Path | tuple[str, int]:
    """Argparse type: unix:PATH, or HOST:PORT with a loopback address."""
    import ipaddress

    if text.startswith(_UNIX) and len(text) > len(_UNIX):
        return Path(text.removeprefix(_UNIX))
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither unix:PATH nor a loopback address with a port, such as 127.0.0.1:9464"
        )
    return host, int(port)


def execute(arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives; return the exit status. The driver may start and end meanwhile."""
    if arguments.dashboard:
        from importlib.resources import files

        print((files("nnfmq") / "data" / "grafana_dashboard.json").read_text(encoding="utf-8"), end="")
        return 0
    try:
        import prometheus_client
    except ModuleNotFoundError:
        print("nnfmq: error: this needs prometheus-client: pip install 'nnfmq[metrics]'", file=sys.stderr)
        return 1
    from nnfmq.base import logs
    from nnfmq.cli.metrics_collector import DriverCollector
    from nnfmq.cli.metrics_endpoint import Endpoint

    logs.configure()

    registry = prometheus_client.CollectorRegistry()
    with DriverReader(arguments.connect) as reader:
        registry.register(DriverCollector(reader.read))

        def render() -> tuple[bytes, str]:
            return prometheus_client.generate_latest(registry), prometheus_client.CONTENT_TYPE_LATEST

        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with Endpoint(arguments.listen, render) as endpoint:
                print(f"nnfmq: metrics at {endpoint.url}", flush=True)
                endpoint.serve()
        except KeyboardInterrupt:
            return 0
        finally:
            signal.signal(signal.SIGTERM, previous)
    return 0


class DriverReader:
    """Reads the statistics of the driver at `path`, and connects again when another one runs there. Close it.

    Logs when they can no longer be read, and when they can again.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._client: Client | None = None
        self._problem = ""

    def read(self) -> DriverSample | None:
        """Return a sample with the models by name; None if no driver runs, or it does not let this user read."""
        from nnfmq.cli.statistics import read_served_models, take_sample
        from nnfmq.hal.errors import DeadObject, NnfmqError

        for _ in range(2):  # the driver may have been replaced since the last scrape
            try:
                client = self._connected()
                sample = replace(take_sample(client), served=read_served_models(client, self._path, _REPOSITORY_S))
            except DeadObject as error:
                self.close()
                problem = str(error)
            except (NnfmqError, OSError) as error:
                problem = str(error)
                break
            else:
                self._note("")
                return sample
        self._note(problem)
        return None

    def _note(self, problem: str) -> None:
        """Log why the driver cannot be read, or with "" that it can again, unless that is known."""
        before, self._problem = self._problem, problem
        if problem and problem != before:
            _log.warning("the driver cannot be read: %s", problem)
        elif before and not problem:
            _log.info("the driver can be read again")

    def _connected(self) -> Client:
        if self._client is None:
            self._client = open_running(self._path, monitor=True)
        return self._client

    def close(self) -> None:
        """Hang up. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def __enter__(self) -> DriverReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
