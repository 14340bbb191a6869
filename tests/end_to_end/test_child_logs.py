"""Attacks of a compromised worker on the driver's log, tried by a device of a plug-in inside a real worker."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.drivers import Daemon, Process, opened, running_daemon, short_folder, until
from support.model_folders import RepositoryPeer, add_version, adder
from support.models import logistics_model, relu_model
from support.plugins import add_plugin, path_with

import nnfmq
from nnfmq.base.log_records import CHILD_BURST
from nnfmq.hal.errors import GeneralFailure

DEVICE = "test-logger"
SOURCE = f'''
import errno
import json
import logging
import os
import threading

from nnfmq.base.log_records import MAGIC, RecordHandler
from nnfmq.base.logs import LoggedClient
from nnfmq.driver.devices.device import DeviceBase
from nnfmq.hal.errors import GeneralFailure

STATE = {{}}


def write(data):
    try:
        return os.write(2, data)
    except BlockingIOError:
        return 0


def arguments():
    with open(os.path.join(os.path.dirname(__file__), "logger.json")) as file:
        return json.load(file)


def find():
    """Return which descriptors are the driver's log, after an attempt to empty each that is a file."""
    log, found = tuple(arguments()["log"]), []
    for fd in range(1024):
        try:
            status = os.fstat(fd)
        except OSError:
            continue
        if (status.st_dev, status.st_ino) == log:
            found.append(fd)
        if fd in (1, 2):
            try:
                os.ftruncate(fd, 0)
            except OSError as error:
                found.append(errno.errorcode[error.errno])
    return found


def forge():
    given = arguments()
    other = LoggedClient(given["client"], 0, "forged", given["victim"])
    record = logging.LogRecord("nnfmq.supervisor", logging.CRITICAL, "", 0, "forged record", (), None)
    record.process = given["victim"]
    record.client = other
    write(RecordHandler().encoded(record))
    write((given["line"] + "\\n").encode())
    write(b"x\\r" + given["line"].encode() + b"\\n")


def odd():
    write(b"\\0nul\\x1b]0;title\\x07\\x9b2J\\xe2\\x80\\xae\\n")
    write(MAGIC + b"\\xff\\xff" + b"giant" * 200 + b"\\n")
    write(MAGIC + b"\\x00\\x40half")


def half_record_and_death():
    logging.getLogger("nnfmq.last").error("the last words")
    write(b"a text without its end")
    write(MAGIC + b"\\x00\\x40the half of a record")
    os.abort()


def flood():
    def run():
        record = RecordHandler().encoded(logging.LogRecord("nnfmq.flood", 40, "", 0, "flood", (), None))
        while True:
            write(b"flood\\n" * 500)
            write(record * 40)
            write(MAGIC * 500)

    threading.Thread(target=run, daemon=True).start()


def log_much():
    for number in range(20_000):
        logging.getLogger("nnfmq.much").warning("%d %s", number, "x" * 100)


def close():
    os.close(1)
    os.close(2)


ACTS = [find, forge, odd, half_record_and_death, flood, log_much, close]


class Logger(DeviceBase):
    name = "{DEVICE}"

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        (number,) = model.main.operands[model.main.input_indexes[0]].dimensions
        raise GeneralFailure("done: %s" % (ACTS[number - 1](),))
'''
ACTS = ["find", "forge", "odd", "half record and death", "flood", "log much", "close"]
ALL_JSON = {"NNFMQ_LOG_LEVEL": "info", "NNFMQ_LOG_FORMAT": "json", "NNFMQ_RUNTIMES": ""}
Line = dict[str, Any]


def act(client: nnfmq.Client, name: str) -> str:
    """Let a worker do something; return its answer."""
    with pytest.raises(GeneralFailure) as error:
        client.device(DEVICE).prepare(relu_model((ACTS.index(name) + 1,)))
    return str(error.value)


def lines(driver: Daemon, text: str = "") -> list[Line]:
    """Return the lines of the log that say `text`. Each one must be JSON."""
    found = [json.loads(line) for line in driver.program.errors().splitlines()]
    return [line for line in found if text in line["message"]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    add_plugin(site, "nnfmq_logger", SOURCE, {"logger": "nnfmq_logger:Logger"}, "nnfmq.devices")
    return site


@pytest.fixture(scope="module", params=["fork", "exec"])
def driver(request: pytest.FixtureRequest, site: Path) -> Iterator[Daemon]:
    options = ["--worker-start", request.param]
    with (
        short_folder() as folder,
        running_daemon(folder / "d.sock", environment={**path_with(site), **ALL_JSON}, options=options) as daemon,
    ):
        yield daemon


@pytest.fixture
def client(driver: Daemon, site: Path) -> Iterator[nnfmq.Client]:
    """Yield a client whose worker is compromised; it knows of the log and of the worker of another client."""
    log = os.stat(f"/proc/{driver.program.pid}/fd/2")
    with driver.connect() as victim, driver.connect() as client:
        forged = {"message": "forged line", "pid": victim.worker_pid, "logger": "nnfmq.supervisor", "level": "info"}
        arguments = {"log": (log.st_dev, log.st_ino), "client": 1, "victim": victim.worker_pid}
        (site / "logger.json").write_text(json.dumps(arguments | {"line": json.dumps(forged)}))
        yield client


def test_a_worker_has_no_descriptor_of_the_log_and_cannot_shorten_it(driver: Daemon, client: nnfmq.Client) -> None:
    before = driver.program.errors()
    assert "done: ['EINVAL', 'EINVAL']" in act(client, "find")  # its stdout and stderr are no files
    assert driver.program.errors().startswith(before) and before


def test_a_worker_signs_as_no_other_process_and_for_no_other_client(driver: Daemon, client: nnfmq.Client) -> None:
    act(client, "forge")
    until(lambda: len(lines(driver, "forged")) == 3, "all three are logged")
    record, *texts = lines(driver, "forged")
    own = {"pid": os.getpid(), "uid": os.getuid(), "program": record["client"]["program"]}
    assert (record["message"], record["pid"], record["client"]) == ("forged record", client.worker_pid, own)
    for line in texts:
        assert (line["logger"], line["pid"]) == ("nnfmq.stderr", driver.program.pid)
        assert line["client"] == own | {"worker": client.worker_pid}
        assert line["message"].startswith("a worker wrote to stderr: ")


def test_NUL_and_escape_sequences_and_what_is_no_record_are_text(driver: Daemon, client: nnfmq.Client) -> None:
    act(client, "odd")
    until(lambda: len(lines(driver, "giant")) == 1, "the second line is logged")
    (nul,) = lines(driver, "\0nul")
    assert "title" in nul["message"] and all(line.isprintable() for line in driver.program.errors().splitlines())
    worker = client.worker_pid
    client.close()
    until(lambda: len(lines(driver, "half")) == 1, "the rest is logged when the worker has ended")
    assert lines(driver, "half")[0]["client"]["worker"] == worker


def test_what_a_worker_has_written_is_logged_before_its_death(driver: Daemon, client: nnfmq.Client) -> None:
    worker = client.worker_pid
    with pytest.raises(nnfmq.DeadObject):
        act(client, "half record and death")
    until(lambda: bool(lines(driver, f"worker {worker} ended with status -6")), "its death is logged")
    words = ("the last words", "a text without its end", "the half of a record", "ended with status -6")
    found = [line["message"] for line in lines(driver)]
    places = [next(place for place, text in enumerate(found) if word in text) for word in words]
    assert places == sorted(places)
    assert lines(driver, "the last words")[-1]["pid"] == worker


def test_a_flood_costs_only_its_own_lines(driver: Daemon, client: nnfmq.Client) -> None:
    worker = client.worker_pid
    act(client, "flood")
    until(lambda: len(lines(driver, "flood")) >= 100, "the flood is logged")
    for _ in range(5):
        with driver.connect() as other:
            act(other, "forge")
            until(lambda pid=other.worker_pid: any(line["pid"] == pid for line in lines(driver)), "others are heard")
    client.close()
    until(lambda: bool(lines(driver, "which are left out")), "the number of lines left out is logged")
    (left,) = lines(driver, "which are left out")
    assert left["client"]["worker"] == worker
    begin = next(place for place, line in enumerate(lines(driver)) if "flood" in line["message"])
    own = [line for line in lines(driver)[begin:] if worker in (line["pid"], line.get("client", {}).get("worker"))]
    assert len(own) < 4 * CHILD_BURST


def test_a_worker_does_not_wait_for_a_supervisor_that_reads_nothing(driver: Daemon, client: nnfmq.Client) -> None:
    device = client.device(DEVICE)
    with driver.process.stopped(), pytest.raises(GeneralFailure, match="done"):
        device.prepare(relu_model((ACTS.index("log much") + 1,)))
    until(lambda: bool(lines(driver, "0 xxx")), "the begin is logged")


def test_a_worker_that_closes_its_streams_changes_nothing(driver: Daemon, client: nnfmq.Client) -> None:
    worker = client.worker_pid
    act(client, "close")
    with Process(worker) as process:
        process.kill()
        process.wait_for_end()
    until(lambda: bool(lines(driver, f"worker {worker} ended with status -9")), "its death is logged")


@pytest.mark.skipif(os.getuid() != 0, reason="only root sees the descriptors of a process that is not dumpable")
def test_no_child_of_a_driver_has_the_log(tmp_path: Path) -> None:
    add_version(tmp_path, "adder", 1, adder(1))
    with (
        short_folder() as folder,
        running_daemon(folder / "d.sock", environment={"NNFMQ_CACHE_MIB": "0"}, models=tmp_path) as driver,
    ):
        log = os.stat(f"/proc/{driver.program.pid}/fd/2")
        with RepositoryPeer(driver.path) as peer, driver.connect() as client:
            peer.wait_for("adder", version=1)
            client.device("compiled").prepare(logistics_model(8)).close()
            assert {name for name, fds in streams(driver) if (log.st_dev, log.st_ino) in fds} == set()
            assert {"nnfmq-worker", "nnfmq-models", "nnfmq-compilers"} <= {name for name, _ in streams(driver)}


def streams(driver: Daemon) -> Iterator[tuple[str, set[tuple[int, int]]]]:
    """Yield the name of each descendant of a driver, and what its descriptors are."""
    for process in opened(driver.process.descendants()):
        with process, suppress(FileNotFoundError):
            folder = Path(f"/proc/{process.pid}")
            found = [os.stat(path) for path in (folder / "fd").iterdir()]
            yield (folder / "comm").read_text().strip(), {(each.st_dev, each.st_ino) for each in found}


OPENS_PROC = """
import os, re, sys

def hook(event, arguments):
    if event != "open" or isinstance(arguments[0], int):
        return
    found = re.fullmatch(r"/proc/(\\d+)/(.+)", os.fsdecode(arguments[0]))
    if found and int(found[1]) != os.getpid():
        os.write(2, f"opens /proc of {found[1]}: {found[2]}.\\n".encode())

sys.addaudithook(hook)
"""
"""A module that Python imports at its start: a process of the driver tells which files of other processes it opens."""


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_no_process_of_a_driver_reads_the_memory_of_a_client(tmp_path: Path, start: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(OPENS_PROC)
    environment = {**path_with(tmp_path), **ALL_JSON, "NNFMQ_CLIENT_CLASSES": "x=batch"}
    options = ["--worker-start", start]
    with (
        short_folder() as folder,
        running_daemon(folder / "d.sock", environment=environment, options=options) as driver,
    ):
        with driver.connect() as client:
            client.device("reference").prepare(nnfmq.example_path("digits.tflite")).close()
        until(lambda: "client left after" in driver.program.errors(), "the client has left")
        # The supervisor writes to the log's descriptor itself, a worker to its pipe.
        found = set(re.findall(rf"opens /proc of {os.getpid()}: (\S+)\.", driver.program.errors()))
        assert "status" in found  # whether it was killed; the kernel has it without the memory
        assert found <= {"status", "stat", "statm", "comm"}
