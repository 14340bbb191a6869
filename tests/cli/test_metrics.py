"""`nnfmq metrics`: what a scrape contains, read by Prometheus' own parser; the endpoint; the command as a process."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import select
import signal
import socket
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import promql
from support.activity import MIB, NO_PID, FakeClient, burst, client, counted, driver, model
from support.commands import started
from support.drivers import LIMIT_S, Daemon, running_daemon, until
from support.model_folders import add_version, adder
from support.places import ROOT

import nnfmq
from nnfmq.cli import main, metrics, metrics_endpoint
from nnfmq.cli.metrics import listen_address
from nnfmq.cli.metrics_endpoint import Address, Endpoint
from nnfmq.cli.statistics import DriverSample, read_served_models
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, GeneralFailure
from nnfmq.observe import statistics_layout as layout
from nnfmq.observe.limits import LIMITS

prometheus = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")
NAMES = {"client": "camera.py", "model": "face.tflite", "version": "", "device": "compiled"}
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scraped:
    """The series of successive scrapes of given statistics."""

    def __init__(self, *readings: Any) -> None:
        from nnfmq.cli.metrics_collector import DriverCollector

        self.readings = list(readings)
        self._registry = prometheus.CollectorRegistry()
        self._registry.register(DriverCollector(self._read))

    def _read(self) -> DriverSample | None:
        statistics = self.readings.pop(0)
        return None if statistics is None else DriverSample(statistics, {})

    def scrape(self) -> Series:
        text = prometheus.generate_latest(self._registry).decode()
        families = parser.text_string_to_metric_families(text)
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


def test_a_scrape_has_the_counts_of_each_model() -> None:
    series = Scraped(driver(client(10, models=(model(10, failures=2),)))).scrape()
    assert value(series, "nnfmq_up") == 1
    assert value(series, "nnfmq_executions_total", **NAMES) == 10
    assert value(series, "nnfmq_failures_total", **NAMES) == 2
    for name, seconds in {"client": 16e-6, "queue": 8e-6, "driver": 4e-6, "engine": 2e-6}.items():
        assert value(series, f"nnfmq_{name}_seconds_sum", **NAMES) == pytest.approx(10 * seconds)
        assert value(series, f"nnfmq_{name}_seconds_count", **NAMES) == 10


def test_buckets_are_cumulative_with_bounds_of_powers_of_two_microseconds() -> None:
    models = (model(3, 1_500), replace(model(2, 5_000), id=2))  # the same name: one series
    series = Scraped(driver(client(5, models=models))).scrape()
    found = {
        dict(labels)["le"]: count for (name, labels), count in series.items() if name == "nnfmq_driver_seconds_bucket"
    }
    assert [float(bound) for bound in found] == [*(1e-6 * 2**power for power in range(27)), float("inf")]
    assert list(found.values()) == [0, 3, 3, *[5] * 25]


def test_a_scrape_has_the_state_of_driver_and_clients() -> None:
    bursts = burst(polled=7, slept=2, received=1), burst(id=9, polled=1, slept=1)
    row = client(0, open_calls=4, running_calls=3, bursts=bursts)
    limits = tuple({("clients", "driver"): 62, ("memory", "driver"): 1000 * MIB}.get(each[:2], 0) for each in LIMITS)
    series = Scraped(driver(row, compile_server_pid=NO_PID, limits=limits)).scrape()
    assert value(series, "nnfmq_uptime_seconds") == 10
    assert value(series, "nnfmq_clients") == 1
    assert value(series, "nnfmq_rejected_clients_total") == 2
    assert value(series, "nnfmq_dead_workers_total", cause="killed") == 1
    assert value(series, "nnfmq_build_info", version="1.2.3", core="compiled", python="3.12.1", machine="riscv64") == 1
    in_use = {("clients", "driver", ""): (62, 1), ("memory", "driver", "bytes"): (1000 * MIB, MIB)}
    for (limit, of, unit), values in in_use.items():
        assert value(series, "nnfmq_limit", limit=limit, of=of, unit=unit) == values[0]
        assert value(series, "nnfmq_limit_used", limit=limit, of=of, unit=unit) == values[1]
    assert not [labels for name, labels in series if name == "nnfmq_limit" and ("of", "user") in labels]
    assert value(series, "nnfmq_cache_hits_total") == 7
    assert value(series, "nnfmq_compile_server_up") == 1
    labels = {"client": "camera.py"}
    assert value(series, "nnfmq_queued_calls", **labels) == 1
    assert value(series, "nnfmq_requests_in_flight", **labels) == 4  # and one of a burst
    assert value(series, "nnfmq_charged_bytes", **labels) == MIB
    assert value(series, "nnfmq_burst_waits_total", how="polled", **labels) == 8
    assert value(series, "nnfmq_burst_waits_total", how="slept", **labels) == 3


def test_counts_do_not_go_back_when_one_of_two_equal_models_or_bursts_is_released() -> None:
    two = client(15, models=(model(10), replace(model(5), id=4)), bursts=(burst(polled=6), burst(id=7, polled=3)))
    one = client(16, models=(model(11),), bursts=(burst(polled=8),), past=(model(5, id=0),))
    scraped = Scraped(driver(two), driver(one))
    first, second = scraped.scrape(), scraped.scrape()
    assert value(first, "nnfmq_executions_total", **NAMES) == 15
    assert value(second, "nnfmq_executions_total", **NAMES) == 16
    assert value(second, "nnfmq_driver_seconds_count", **NAMES) == 16
    labels = {"client": "camera.py"}
    assert value(first, "nnfmq_burst_waits_total", how="polled", **labels) == 9
    assert value(second, "nnfmq_burst_waits_total", how="polled", **labels) == 11


def test_each_version_of_a_served_model_has_series_of_its_own_while_it_is_used() -> None:
    old, new = model(10, name="digits", version=1), model(4, id=5, name="digits", version=2)
    plain = model(7, id=6, name="digits")  # of a file with that name
    scraped = Scraped(driver(client(21, models=(old, new, plain))), driver(client(25, models=(new, plain))))
    for versions in ({"1": 10, "2": 4, "": 7}, {"2": 4, "": 7}):
        series = scraped.scrape()
        found = {
            dict(labels)["version"]: count
            for (name, labels), count in series.items()
            if name == "nnfmq_executions_total"
        }
        assert found == versions
        labels = {**NAMES, "model": "digits", "version": "2"}
        assert value(series, "nnfmq_driver_seconds_count", **labels) == 4
        assert value(series, "nnfmq_failures_total", **labels) == 0
        assert value(series, "nnfmq_engine_seconds_sum", **labels) == pytest.approx(4 * 2e-6)


def test_the_number_of_series_is_bounded_by_the_rows_of_the_statistics() -> None:
    """A client with a full slot, whose every row is another version, has one series of each metric for each row."""
    rows = tuple(model(1, id=number, name="digits", version=number) for number in range(1, layout.MODELS_MAX + 1))
    series = Scraped(driver(client(16, models=rows))).scrape()
    assert sum(name == "nnfmq_executions_total" for name, _ in series) == layout.MODELS_MAX == 16


def test_series_of_what_has_ended_end() -> None:
    scraped = Scraped(driver(client(10)), driver(client(10, models=())), driver(), None, driver(client(3)))
    names = [{name for name, _ in scraped.scrape()} for _ in range(4)]
    assert "nnfmq_executions_total" in names[0] and "nnfmq_executions_total" not in names[1]
    assert "nnfmq_queued_calls" in names[1] and "nnfmq_queued_calls" not in names[2]
    assert names[3] == {"nnfmq_up"}
    assert value(scraped.scrape(), "nnfmq_executions_total", **NAMES) == 3  # of another driver: from zero


def test_labels_with_quotes_and_newlines_are_escaped() -> None:
    series = Scraped(driver(client(1, models=(model(1, name='a"b\\c\nd'),)))).scrape()
    assert value(series, "nnfmq_executions_total", **{**NAMES, "model": 'a"b\\c\nd'}) == 1


def test_cpu_and_memory_of_a_worker_are_series() -> None:
    from nnfmq.cli.statistics import take_sample

    fake = FakeClient(driver(client(1, worker_pid=os.getpid())))
    scraped = Scraped()
    scraped._read = lambda: take_sample(fake)  # type: ignore[method-assign,arg-type]
    from nnfmq.cli.metrics_collector import DriverCollector

    families = {family.name: family for family in DriverCollector(scraped._read).collect()}
    assert families["nnfmq_worker_resident_bytes"].samples[0].value > MIB
    assert families["nnfmq_worker_cpu_seconds"].samples[0].value > 0


# ------------------------------------------------------------------------------------------------ the connection


def test_a_reader_connects_again_to_the_next_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    dying, next_one = FakeClient(driver(), DeadObject("gone")), FakeClient(driver(client(1)))
    made = [dying, next_one]
    monkeypatch.setattr(nnfmq, "connect", lambda *_, **__: made.pop(0), raising=False)
    with metrics.DriverReader(None) as reader:
        first, second = reader.read(), reader.read()
        assert first is not None and second is not None
        assert (len(first.statistics.clients), len(second.statistics.clients)) == (0, 1)
        assert (dying.is_closed, next_one.is_closed) == (True, False)
    assert next_one.is_closed


@pytest.mark.parametrize("error", [DeviceUnavailable("none listens"), GeneralFailure("uid 7 does not administer")])
def test_a_reader_without_a_driver_logs_once_why_and_once_that_there_is_one(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def connect(*_: object, **__: object) -> FakeClient:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    outcomes: list[Exception | FakeClient] = [error, error, FakeClient(driver(), driver(), error), error]
    monkeypatch.setattr(nnfmq, "connect", connect, raising=False)
    caplog.set_level(logging.INFO, "nnfmq.metrics")
    with metrics.DriverReader(None) as reader:
        assert [reader.read() is None for _ in range(5)] == [True, True, False, False, True]
    why = f"the driver cannot be read: {error}"
    assert caplog.messages == [why, "the driver can be read again", why]


def test_a_reader_gives_up_on_drivers_that_die_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnfmq, "connect", lambda *_, **__: FakeClient(DeadObject("gone")), raising=False)
    with metrics.DriverReader(None) as reader:
        assert reader.read() is None


# ------------------------------------------------------------------------------------------------ the endpoint


@contextmanager
def serving(address: Address) -> Iterator[Endpoint]:
    """Serve a fixed text, one request for each call of the test, on a thread."""

    class Ended(Exception):
        pass

    with Endpoint(address, lambda: (b"up 1\n", "text/plain")) as endpoint:

        def serve() -> None:
            while not ended.is_set():
                endpoint._server.handle_request()

        ended = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield endpoint
        finally:
            ended.set()
            family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
            with socket.socket(family) as last:
                last.connect(endpoint._server.server_address)
            thread.join(30)


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""


def test_metrics_are_at_one_path_of_a_loopback_address() -> None:
    with serving(listen_address("127.0.0.1:0")) as endpoint:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", endpoint.url)
        assert get(endpoint.url) == (200, b"up 1\n")
        assert get(endpoint.url + "?name[]=x") == (200, b"up 1\n")
        assert get(endpoint.url.replace("/metrics", "/"))[0] == 404


def ask(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(str(path))
        asked.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        received = b""
        while more := asked.recv(4096):
            received += more
        return received


def test_a_unix_socket_is_the_user_s_only_and_removed_at_the_end(folder: Path) -> None:
    path = folder / "m.sock"
    with serving(path) as endpoint:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ask(path).endswith(b"up 1\n")
        assert str(path) in endpoint.url
    assert not path.exists()


def test_a_client_has_the_limit_of_time_for_its_whole_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "REQUEST_TIMEOUT_S", 0.3)
    path = folder / "m.sock"
    with serving(path), socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        poll, end_s = select.poll(), time.monotonic() + LIMIT_S
        poll.register(slow, select.POLLIN)
        with suppress(BrokenPipeError):  # the endpoint has hung up
            while not poll.poll(20) and time.monotonic() < end_s:
                slow.send(b"x")  # always long before the limit
        assert time.monotonic() < end_s
        assert ask(path).endswith(b"up 1\n")


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(folder: Path) -> None:
    path = folder / "m.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with serving(path):
        assert ask(path).endswith(b"up 1\n")
        with pytest.raises(OSError, match="another program listens"):
            Endpoint(path, lambda: (b"", ""))
        assert ask(path).endswith(b"up 1\n")


def test_a_file_that_is_no_socket_is_kept(folder: Path) -> None:
    path = folder / "m.sock"
    path.write_text("mine")
    with pytest.raises(OSError, match="no socket"):
        Endpoint(path, lambda: (b"", ""))
    assert path.read_text() == "mine"


def test_a_socket_that_another_program_has_put_there_is_kept(folder: Path) -> None:
    path = folder / "m.sock"
    with Endpoint(path, lambda: (b"", "")):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_a_client_that_hangs_up_does_not_end_the_endpoint(folder: Path) -> None:
    path = folder / "m.sock"
    with serving(path):
        with socket.socket(socket.AF_UNIX) as rude:
            rude.connect(str(path))
            rude.sendall(b"GET /metrics")
        assert ask(path).endswith(b"up 1\n")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("unix:/run/m.sock", Path("/run/m.sock")),
    ],
)
def test_addresses_to_listen_on(text: str, address: Address) -> None:
    assert listen_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0:9464", "192.0.2.1:80", "[::]:80", "example.org:80", "127.0.0.1", ":80", "127.0.0.1:65536", "unix:"],
)
def test_other_addresses_are_rejected(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"neither unix:PATH nor a loopback address"):
        listen_address(text)


# ------------------------------------------------------------------------------------------------ the command


def test_the_dashboard_uses_only_metrics_that_the_endpoint_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--dashboard"]) == 0
    dashboard = json.loads(capsys.readouterr().out)
    used = set(re.findall(r"\bnnfmq_\w+", json.dumps(dashboard)))
    offered = {name for name, _ in Scraped(driver(client(1))).scrape()}
    offered |= {"nnfmq_worker_cpu_seconds_total", "nnfmq_worker_resident_bytes"}  # of processes that exist
    assert used <= offered
    assert len(dashboard["panels"]) > 10


def label_uses(dashboard: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """Yield each expression of a panel, and the labels that it and its legend use; and those of the variables."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            grouped = [name for names in re.findall(r"by \(([^)]*)\)", text) for name in re.split(r",\s*", names)]
            legend = re.findall(r"{{(\w+)}}", target.get("legendFormat") or "")
            yield text, {*grouped, *legend, *re.findall(r"(\w+)=~?\"", text)}
    for variable in dashboard["templating"]["list"]:
        for label in re.findall(r"label_values\(\w+, (\w+)\)", str(variable["query"])):
            yield str(variable["query"]), {label}


def test_the_dashboard_uses_only_labels_that_the_metrics_have(capsys: pytest.CaptureFixture[str]) -> None:
    """A legend with a label that an aggregation drops would be empty."""
    assert main(["metrics", "--dashboard"]) == 0
    dashboard = json.loads(capsys.readouterr().out)
    labels = {name: {label for label, _ in pairs} for name, pairs in Scraped(driver(client(1))).scrape()}
    labels["nnfmq_worker_cpu_seconds_total"] = labels["nnfmq_worker_resident_bytes"] = {"client"}
    uses = list(label_uses(dashboard))
    assert len(uses) > 15
    for text, used in uses:
        for name in re.findall(r"\bnnfmq_\w+", text):
            assert used <= labels[name], f"{text}: {name} has the labels {labels[name]}"


def test_the_command_without_prometheus_client_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    assert main(["metrics"]) == 1
    assert "pip install 'nnfmq[metrics]'" in capsys.readouterr().err


@pytest.fixture
def lab(folder: Path) -> Iterator[Daemon]:
    with running_daemon(folder / "d.sock") as daemon:
        yield daemon


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_a_driver_and_ends_at_a_signal(lab: Daemon, number: signal.Signals) -> None:
    with started("metrics", "--connect", str(lab.path), "--listen", "127.0.0.1:0") as process:
        line = process.stdout.readline().decode()  # type: ignore[union-attr]
        url = line.removeprefix("nnfmq: metrics at ").strip()
        status, body = get(url)
        assert status == 200
        assert b"nnfmq_up 1.0\n" in body and b"nnfmq_clients 0.0\n" in body  # itself is not counted
        process.send_signal(number)
    assert process.returncode == 0


def test_a_driver_s_served_models_have_their_version_in_a_scrape_and_in_the_status(folder: Path) -> None:
    from nnfmq.cli.metrics_collector import DriverCollector

    folder.joinpath("models").mkdir()
    add_version(folder / "models", "adder", 1, adder(1))
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon(folder / "d.sock", models=folder / "models"))
        user = stack.enter_context(daemon.connect())
        opened = stack.enter_context(user.model("adder"))
        run = partial(stack.enter_context(opened.burst()).execute, np.zeros((1, 4), np.float32))
        path = str(daemon.path)
        collector = DriverCollector(
            lambda: DriverSample(user.statistics(), {}, read_served_models(user, path, LIMIT_S))
        )

        def served(metric: str) -> list[tuple[dict[str, str], float]]:
            (family,) = [found for found in collector.collect() if found.name == metric]
            return [(each.labels, each.value) for each in family.samples]

        def executed() -> dict[tuple[str, str], float]:
            """Return the executions of each model that has any, by its name and version."""
            (family,) = [found for found in collector.collect() if found.name == "nnfmq_executions"]
            return {(each.labels["model"], each.labels["version"]): each.value for each in family.samples if each.value}

        run()
        until(lambda: executed() == {("adder", "1"): 1}, "the execution is counted")
        add_version(folder / "models", "adder", 2, adder(2))
        until(lambda: opened.version == 2, "the model moves")
        run()
        run()
        until(lambda: executed().get(("adder", "2")) == 2, "they are counted")
        assert "adder/2" in output_of("status", "--connect", str(daemon.path))
        (row,) = json.loads(output_of("top", "--once", "--json", "--connect", str(daemon.path)))["served"]
        assert (row["name"], row["version"], row["state"], row["bursts"]) == ("adder", 2, "READY", 1)
        assert served("nnfmq_model_version") == [({"model": "adder"}, 2)]
        states = {labels["state"]: value for labels, value in served("nnfmq_model_state")}
        assert states == {"READY": 1, "LOADING": 0, "UNAVAILABLE": 0}
        assert served("nnfmq_model_failed_version") == [({"model": "adder"}, 0)]
        add_version(folder / "models", "adder", 3, b"")
        until(lambda: served("nnfmq_model_failed_version") == [({"model": "adder"}, 3)], "version 3 is not prepared")


def output_of(*arguments: str) -> str:
    """Return what the command prints in a process of its own, in whose output this process is a client."""
    with started(*arguments) as process:
        return process.communicate(timeout=60)[0].decode()


def test_the_command_outlives_its_driver(folder: Path) -> None:
    with started("metrics", "--connect", str(folder / "d.sock"), "--listen", f"unix:{folder}/m.sock") as process:
        process.stdout.readline()  # type: ignore[union-attr]
        assert b"nnfmq_up 0.0\n" in ask(folder / "m.sock")
        with running_daemon(folder / "d.sock"):
            assert b"nnfmq_up 1.0\n" in ask(folder / "m.sock")
        assert b"nnfmq_up 0.0\n" in ask(folder / "m.sock")
        process.terminate()
    assert process.returncode == 0
    assert not (folder / "m.sock").exists()


# ------------------------------------------------------------------------------------------------ the queries


def test_the_queries_of_the_guide_return_what_a_known_load_has() -> None:
    """Within 10 s, 90 executions take 0.5 ms for their client and 10 take 5 ms, half of each in the queues; 5 fail."""
    old = model(100, name="digits", version=2, failures=7)
    quick, slow = counted(90, 125_000, failures=5), counted(10, 1_250_000)  # in the driver: a quarter
    new = replace(old, counts=old.counts + quick + slow)
    scraped = Scraped(driver(client(100, models=(old,)), read_s=11), driver(client(200, models=(new,)), read_s=21))
    scrapes = scraped.scrape(), scraped.scrape()
    queries = promql.queries_of(ROOT / "docs" / "how-to" / "monitor.md")
    found = [list(promql.Query(query, *scrapes, 10).evaluate().values()) for query in queries]
    in_driver_s = (1.024 + 1.024 * 9 / 10) / 1e3  # the 99th of 100, in the bucket from 1.024 to 2.048 ms
    in_client_s = (4.096 + 4.096 * 9 / 10) / 1e3
    in_queues_s = (90 * 0.25 + 10 * 2.5) / 100 / 1e3
    expected = [0.9, in_client_s, in_driver_s, in_queues_s, 0.5]
    assert [value for values in found for value in values] == pytest.approx(expected)
