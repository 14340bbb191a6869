"""`nnfmq serve --print-unit`: units that systemd accepts, and that start the driver with the options of the command."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nnfmq import cli
from nnfmq.cli.service_units import UNITS, unit_text
from nnfmq.hal.errors import InvalidArgument

OF_THE_SYSTEM = ["--worker-uids", "60000-60063", "--allow-group", "video"]
COMMANDS = {
    "user": [],
    "models": ["--models", "/srv/my models", "--runtimes", "--memory", "512"],
    "socket": ["--socket", "/srv/100%/lab.sock"],
    "system": OF_THE_SYSTEM,
    "account": ["--user", "daemon"],
}
NOT_IN_UNITS = {"--help", "--no-color", "--socket", "--user", "--replace", "--restart", "--exit-with", "--print-unit"}


def unit(name: str, *options: str) -> str:
    return unit_text(name, cli.command_parser("serve").parse_args(list(options)))


def words(*options: str) -> list[str]:
    """Return the words of the command line of a driver with these options."""
    (line,) = (line for line in unit("service", *options).splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart="))


def of(text: str, name: str) -> list[str]:
    """Return the values of a variable of a unit."""
    return [line.removeprefix(f"{name}=") for line in text.splitlines() if line.startswith(f"{name}=")]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("options", COMMANDS.values(), ids=COMMANDS)
def test_systemd_accepts_the_units(options: list[str], tmp_path: Path) -> None:
    paths = [tmp_path / f"nnfmq.{name}" for name in UNITS]
    for path in paths:
        path.write_text(unit(path.suffix[1:], *options))
    kind = "--system" if "/etc/systemd/system" in paths[0].read_text() else "--user"
    command = ["systemd-analyze", kind, "--recursive-errors=no", "verify", *map(str, paths)]
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_option_is_one_of_the_unit_or_is_not_for_a_driver_of_systemd() -> None:
    given = {
        "--models": "/models", "--devices": "/devices.toml", "--extensions": "com.example.one", "--runtimes": "litert",
        "--memory": "77", "--sandbox": "required", "--worker-start": "exec", "--worker-uids": "60000-60063",
        "--allow-user": "ann", "--allow-group": "video", "--log-level": "debug", "--log-format": "text",
        "--allow-device-status": "",
    }  # fmt: skip
    options = {action.option_strings[-1] for action in cli.command_parser("serve")._actions}
    assert options == {*given, *NOT_IN_UNITS}
    command = [word for option, value in given.items() for word in (option, value) if word]
    assert sorted(words(*command)[-len(command) :]) == sorted(command)


def test_the_program_is_the_one_that_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/nnfmq/bin/nnfmq", "serve"])
    assert words() == ["/opt/nnfmq/bin/nnfmq", "serve"]
    monkeypatch.setattr(sys, "argv", ["/opt/nnfmq/lib/nnfmq/__main__.py", "serve"])
    assert words() == [sys.executable, "-P", "-m", "nnfmq", "serve"]


def test_words_are_quoted_as_systemd_reads_them() -> None:
    assert words("--models", '/a b/"c"/\\d')[-1] == '/a b/"c"/\\d'
    assert words("--models", "/100%/$HOME")[-1] == "/100%%/$$HOME"


@pytest.mark.parametrize("options", COMMANDS.values(), ids=COMMANDS)
def test_a_reload_is_a_request_to_the_driver_at_the_path_of_its_socket(options: list[str]) -> None:
    (line,) = of(unit("service", *options), "ExecReload")
    start, _ = of(unit("service", *options), "ExecStart")[0].split(" serve", 1)
    paths = of(unit("socket", *options), "ListenSequentialPacket")
    assert line == f"{start} serve --restart --socket {paths[0]}"


def test_the_path_of_a_reload_is_quoted_as_systemd_reads_it() -> None:
    assert shlex.split(of(unit("service", "--socket", "/a b/100%/$x"), "ExecReload")[0])[-1] == "/a b/100%%/$$x"


def test_a_driver_of_a_user_listens_in_his_runtime_directory_and_one_of_the_system_in_run() -> None:
    assert of(unit("socket"), "ListenSequentialPacket") == ["%t/nnfmq/nnfmq.sock"]
    assert of(unit("socket"), "SocketMode") == ["0600"]
    system = unit("socket", *OF_THE_SYSTEM, "--models", "/srv/models")
    assert of(system, "ListenSequentialPacket") == ["/run/nnfmq/nnfmq.sock", "/run/nnfmq/nnfmq.sock.models"]
    assert of(system, "SocketMode") == ["0666"]
    assert of(unit("socket", *COMMANDS["socket"]), "ListenSequentialPacket") == ["/srv/100%%/lab.sock"]


def test_only_a_driver_with_uids_for_workers_has_capabilities() -> None:
    both = "CAP_SETUID CAP_SETGID"
    assert of(unit("service", *OF_THE_SYSTEM), "AmbientCapabilities") == [both]
    assert of(unit("service", *OF_THE_SYSTEM), "CapabilityBoundingSet") == [both]
    assert of(unit("service", *OF_THE_SYSTEM), "User") == ["nnfmq"]
    account = unit("service", "--user", "daemon")
    assert (of(account, "User"), of(account, "AmbientCapabilities")) == (["daemon"], [])
    assert of(account, "CapabilityBoundingSet") == [""]
    assert of(unit("service"), "User") == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--replace"], "--replace is not for a driver of a service manager"),
        (["--restart"], "--restart is not for a driver of a service manager"),
        (["--exit-with", "1"], "--exit-with is not for a driver of a service manager"),
        ([*OF_THE_SYSTEM, "--socket", "/tmp/x"], "a driver of the system listens in /run/nnfmq, not at /tmp/x"),
    ],
)
def test_options_that_contradict_a_manager_are_refused(options: list[str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        unit("socket", *options)
