"""`nnfmq metrics` scraped by a Prometheus server: the values that it stores, and the queries of the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.commands import started
from support.drivers import Daemon, one, running_daemon, until
from support.models import plus_model
from support.places import ROOT
from support.promql import queries_of

from nnfmq.cli import main

pytest.importorskip("prometheus_client")
PROGRAM = shutil.which("prometheus")
EXECUTIONS = 25
SCRAPE_S = 1
VARIABLES = {"$__rate_interval": "10s", "$client": ".*", "$model": ".*"}  # and what Grafana puts in their place

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="Prometheus is not installed")


@pytest.fixture
def endpoint(folder: Path) -> Iterator[tuple[Daemon, str]]:
    """A driver, and the address of `nnfmq metrics`, which reads it."""
    command = ("metrics", "--connect", str(folder / "d.sock"), "--listen", "127.0.0.1:0")
    with running_daemon(folder / "d.sock") as daemon, started(*command) as process:
        line = process.stdout.readline().decode()  # type: ignore[union-attr]
        yield daemon, line.removeprefix("nnfmq: metrics at ").strip()
        process.terminate()


@contextmanager
def running_prometheus(folder: Path, url: str) -> Iterator[str]:
    """Run a Prometheus server that scrapes `url` every second, and yield its own URL."""
    target = urllib.parse.urlsplit(url)
    job = {
        "job_name": "nnfmq",
        "metrics_path": target.path,
        "static_configs": [{"targets": [target.netloc]}],
    }
    configuration = folder / "prometheus.yml"  # YAML contains JSON
    times = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"}
    configuration.write_text(json.dumps({"global": times, "scrape_configs": [job]}))
    log = folder / "prometheus.log"
    arguments = [
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen([str(PROGRAM), *arguments], stdout=output, stderr=output)
    with process:
        try:
            until(lambda: is_ready(log), "Prometheus is ready")
            yield server_url(log)
        finally:
            process.terminate()


def server_url(log: Path) -> str:
    """Return the URL at which Prometheus has logged that it listens; empty before that."""
    found = re.search(r'"Listening on" address=(\S+)', log.read_text())
    return f"http://{found[1]}" if found else ""


def is_ready(log: Path) -> bool:
    url = server_url(log)
    if not url:
        return False
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except urllib.error.HTTPError:  # it replies 503 until it has read its files
        return False


def queried(server: str, expression: str) -> list[dict[str, Any]]:
    """Return the series of an instant query. Raises HTTPError if Prometheus does not accept the expression."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{server}/api/v1/query?{query}", timeout=5) as reply:
        found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return found


def value_of(server: str, expression: str) -> float:
    """Return the sum of the series."""
    return sum(float(series["value"][1]) for series in queried(server, expression))


def dashboard_expressions(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the queries of all panels, with values instead of Grafana's variables."""
    assert main(["metrics", "--dashboard"]) == 0
    panels = json.loads(capsys.readouterr().out)["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for variable, value in VARIABLES.items():
        expressions = [text.replace(variable, value) for text in expressions]
    assert not [text for text in expressions if "$" in text]
    return expressions


def test_prometheus_stores_what_the_driver_counts(
    folder: Path, endpoint: tuple[Daemon, str], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon, url = endpoint
    with ExitStack() as stack:
        server = stack.enter_context(running_prometheus(folder, url))
        device = stack.enter_context(daemon.connect()).device("reference")
        burst = stack.enter_context(stack.enter_context(device.prepare(plus_model(2), name="plus")).burst())
        for number in range(EXECUTIONS):
            burst.execute(one(number))
        selected = 'nnfmq_executions_total{model="plus"}'
        until(lambda: value_of(server, selected) == EXECUTIONS, "the executions are scraped")
        assert value_of(server, "up") == 1
        assert value_of(server, 'nnfmq_driver_seconds_count{model="plus"}') == EXECUTIONS
        guide = queries_of(ROOT / "docs" / "how-to" / "monitor.md")
        for expression in (*guide, *dashboard_expressions(capsys)):
            queried(server, expression)
