"""What is refused in compile processes, imports and operations of plug-ins; drivers of kernels that lack a part."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.drivers import LIMIT_S, Program, running_daemon, short_folder, until
from support.models import add_model
from support.plugins import FLOAT_N, FLOATS, Fibonacci, add_fibonacci, path_with
from support.sandbox_probe import REFUSED, add_probe, write_arguments

import nnfmq
from nnfmq.base.sandbox.sandbox import missing_parts
from nnfmq.repository.version_import import import_in_process

complete = pytest.mark.skipif(bool(missing_parts()), reason="this kernel lacks a part of the sandbox")

ATTEMPTS = """
import errno, json, os, socket, nnfmq_probe

def reach_abstract_address():
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(nnfmq_probe.ARGUMENTS["abstract"])

nnfmq_probe.ACTS["abstract address from a new socket"] = reach_abstract_address

def attempts(names=nnfmq_probe.ACTS):
    with open(os.path.join(os.path.dirname(__file__), "arguments.json")) as file:
        nnfmq_probe.ARGUMENTS.update(json.load(file))
    found = {}
    for name in names:
        try:
            (nnfmq_probe.ACTS | nnfmq_probe.DEADLY)[name]()
            found[name] = "done"
        except OSError as error:
            found[name] = errno.errorcode[error.errno]
    return json.dumps(found)
"""
SERVE = """
import os, pathlib, sys
from nnfmq_attempts import attempts
from nnfmq.driver.compilation import process
from nnfmq.driver.process import supervisor

def try_acts(_description):
    found = attempts(sys.argv[2:]) if sys.argv[2:] else attempts()
    return process.CompileResult(process.ErrorStatus.GENERAL_FAILURE, found)

process.compile_description = try_acts
supervisor.serve(pathlib.Path(sys.argv[1]), ready=lambda path: print(f"nnfmq: listening on {path}", flush=True))
"""
OPERATION = """
    from nnfmq_attempts import attempts
    from nnfmq.hal.errors import GeneralFailure
    def run():
        raise GeneralFailure(attempts())
    return run
"""
IMPORT = """
import sys
if "--import" in sys.orig_argv:
    from nnfmq.repository import version_import as imports
    from nnfmq_attempts import attempts
    imports._result = lambda _folder, _socket: (imports._failed(imports.ErrorStatus.GENERAL_FAILURE, attempts()), [])
"""
WITHOUT_LANDLOCK = """
import ctypes, os, struct, sys
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
# Load the number; landlock_create_ruleset(2) is unknown, and all others are allowed.
code = b"".join(struct.pack("=HBBI", *each) for each in (
    (0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050026), (0x06, 0, 0, 0x7FFF0000)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == libc.prctl(22, 2, ctypes.byref(Program(4, code)), 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-P", "-m", "nnfmq", *sys.argv[1:]])
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with what tries the acts; a process that may be attacked, and an abstract address, are there."""
    site, home, cache = (tmp_path / name for name in ("site", "home", "cache"))
    for folder in (site, home, cache):
        folder.mkdir()
    add_probe(site)
    (site / "nnfmq_attempts.py").write_text(ATTEMPTS)
    for file in (home / "secret", home / "key", cache / "cached"):
        file.write_text("nobody's business")
    address = f"\0nnfmq-helper-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        write_arguments(
            site, victim=os.getpid(), secret=str(home / "secret"), file=str(home / "new"), key=str(home / "key"),
            cache=str(cache / "new"), cached=str(cache / "cached"), abstract=address,
        )  # fmt: skip
        yield site
    assert sorted(path.name for path in (*home.iterdir(), *cache.iterdir())) == ["cached", "key", "secret"]
    assert {path.read_text() for path in (*home.iterdir(), *cache.iterdir())} == {"nobody's business"}


def not_refused(error: nnfmq.GeneralFailure) -> dict[str, str]:
    text = re.search(r"\{.*\}", str(error))
    assert text is not None, error
    found: dict[str, str] = json.loads(text[0])
    assert set(found) == {*REFUSED, "abstract address from a new socket"}
    return {act: result for act, result in found.items() if result not in ("EPERM", "EACCES")}


def compile_with(site: Path, *acts: str) -> nnfmq.GeneralFailure:
    """Return the error of a model whose compile process tries acts; none: those that are refused."""
    environment = {**path_with(site), "NNFMQ_RUNTIMES": "", "NNFMQ_CACHE_MIB": "0"}
    with ExitStack() as stack:
        path = stack.enter_context(short_folder()) / "d.sock"
        arguments = ["-P", "-c", SERVE, path, *acts]
        driver = stack.enter_context(running_daemon(path, arguments=arguments, environment=environment))
        device = stack.enter_context(driver.connect()).device("compiled")
        with pytest.raises(nnfmq.GeneralFailure) as error:
            device.prepare(add_model())
    return error.value


@complete
def test_a_compile_process_is_refused_what_a_worker_is(site: Path) -> None:
    assert not_refused(compile_with(site)) == {}


@complete
def test_ptrace_ends_a_compile_process_and_the_client_knows_why(site: Path) -> None:
    assert "SIGSYS" in str(compile_with(site, "ptrace"))


@complete
def test_an_operation_of_a_plug_in_is_refused_the_same_while_it_executes(site: Path) -> None:
    add_fibonacci(site)
    (plugin,) = site.glob("*fibonacci.py")
    plugin.write_text(plugin.read_text().replace("    return lambda: numbers\n", OPERATION))
    with (
        short_folder() as folder,
        running_daemon(folder / "d.sock", environment={**path_with(site), "NNFMQ_RUNTIMES": ""}) as driver,
        driver.connect() as client,
        client.device("reference").prepare(Fibonacci().model(FLOAT_N, FLOATS)) as model,
        pytest.raises(nnfmq.GeneralFailure) as error,
    ):
        model.execute(np.float32([5]))
    assert not_refused(error.value) == {}


@complete
@pytest.mark.parametrize("asks_a_driver", [False, True])
def test_an_import_is_refused_what_a_worker_is(
    site: Path, monkeypatch: pytest.MonkeyPatch, asks_a_driver: bool
) -> None:
    """One that may ask a driver makes unix sockets. It reaches no abstract address either: others are connected."""
    (site / "sitecustomize.py").write_text(IMPORT)
    monkeypatch.setenv("PYTHONPATH", str(site))
    version = site.parent / "1"
    version.mkdir()
    with pytest.raises(nnfmq.GeneralFailure) as error:
        import_in_process(version, site.parent / "d.sock" if asks_a_driver else None)
    connected = dict.fromkeys(("abstract address", "abstract address from machine code"), "EISCONN")
    assert not_refused(error.value) == ({"unix socket": "done", **connected} if asks_a_driver else {})


def test_a_driver_of_a_kernel_without_landlock_says_so_and_its_workers_have_the_rest() -> None:
    with short_folder() as folder:
        arguments = ["-P", "-c", WITHOUT_LANDLOCK, "serve", "--socket", folder / "d.sock"]
        with running_daemon(folder / "d.sock", arguments=arguments) as driver:
            until(lambda: "this kernel lacks Landlock (Linux 5.13)" in driver.program.errors(), "the driver says it")
            with driver.connect() as client:
                status = Path(f"/proc/{client.worker_pid}/status").read_text()
            assert re.findall(r"^(?:NoNewPrivs|Seccomp_filters):\t(\d)", status, re.MULTILINE) == ["1", "2"]
        with Program.start([*arguments, "--sandbox", "required"]) as refused:
            assert refused.wait() == 1
            assert "$NNFMQ_SANDBOX requires a complete sandbox, which this kernel lacks: Landlock" in refused.errors()


def test_doctor_says_that_a_kernel_lacks_landlock() -> None:
    words = [sys.executable, "-P", "-c", WITHOUT_LANDLOCK, "doctor", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    (found,) = (each for each in json.loads(done.stdout)["findings"] if each["name"] == "sandbox of workers")
    assert (found["state"], found["value"].startswith("without Landlock (Linux 5.13)")) == ("limited", True)
