"""What the deployments of ray_bench.py share: the address of the HTTP proxy, and a folder for models."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from pathlib import Path

from nnfmq.measure.failures import BenchmarkFailed


@dataclass(frozen=True, slots=True)
class StartedServe:
    """A started Ray Serve, and a folder of this run."""

    host: str
    port: int
    folder: Path

    def connection(self) -> http.client.HTTPConnection:
        """Return a new connection to the proxy."""
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def repository(self, name: str, data: bytes) -> Path:
        """Return a new directory of models with one model, which has the same name, in version 1."""
        directory = self.folder / f"models-{name}"
        version = directory / name / "1"
        version.mkdir(parents=True)
        (version / "model.tflite").write_bytes(data)
        return directory


def post(connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Return the body of the reply to a request.

    Raises:
        BenchmarkFailed: If the status is not 200.
    """
    connection.request("POST", path, body, headers)
    reply = connection.getresponse()
    data = reply.read()
    if reply.status != 200:
        raise BenchmarkFailed(f"{path} replied {reply.status}: {data[:300].decode(errors='replace')}")
    return data
