"""`nnfmq doctor` on machines where something is missing or limited."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nnfmq
from nnfmq.cli import doctor, main
from nnfmq.cli.doctor import Finding, FindingState
from nnfmq.hal.errors import DeviceUnavailable, InvalidArgument
from nnfmq.hal.types import DeviceStatus


def named(name: str) -> Finding:
    return next(finding for finding in doctor.examine() if finding.name == name)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reject(path: Path, **_: object) -> None:
        raise DeviceUnavailable(f"no driver listens at {path}")

    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "nnfmq.sock"))
    monkeypatch.setattr(nnfmq, "connect", reject, raising=False)


@pytest.mark.usefixtures("no_driver")
class TestReport:
    def test_this_machine_is_usable(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["usable"] is True
        assert {finding["part"] for finding in report["findings"]} == {
            "settings", "core", "python", "kernel", "limits", "numpy", "optional", "runtimes", "driver",
        }  # fmt: skip

    def test_a_complete_sandbox_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("nnfmq.base.sandbox.kernel.landlock_version", lambda: 6)
        monkeypatch.setattr("nnfmq.base.sandbox.kernel.supports_filter", lambda: True)
        finding = named("sandbox of workers")
        assert (finding.value, finding.state) == ("complete", FindingState.OK)

    def test_what_the_kernel_lacks_of_the_sandbox_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("nnfmq.base.sandbox.kernel.landlock_version", lambda: 0)
        finding = named("sandbox of workers")
        assert finding.state is FindingState.LIMITED
        assert "without Landlock (Linux 5.13)" in finding.value

    def test_a_limit_of_descriptors_below_what_a_driver_s_clients_may_take_is_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("resource.getrlimit", lambda _resource: (300, 300))
        finding = named("open files")
        assert (finding.value, finding.state) == ("300", FindingState.LIMITED)
        assert "the limit is 300: some clients may be rejected" in finding.remedy

    def test_a_sandbox_that_is_off_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NNFMQ_SANDBOX", "off")
        finding = named("sandbox of workers")
        assert finding.state is FindingState.LIMITED
        assert "$NNFMQ_SANDBOX" in finding.remedy

    def test_an_installation_that_the_uids_of_workers_cannot_read_is_reported(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("NNFMQ_WORKER_UIDS", "60000-60063")
        (tmp_path / "python").touch()
        tmp_path.chmod(0o700)
        monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
        finding = named("uids of workers")
        assert finding.state is FindingState.LIMITED and "may not enter or read /" in finding.value

    def test_the_active_core_is_named(self) -> None:
        from nnfmq.queue import core

        assert named("queue core").value == core.core_name

    def test_the_active_codec_is_named(self) -> None:
        from nnfmq.serialize import codec

        assert named("packet codec").value == codec.codec_name
        assert named("codec from").value == codec.codec_path

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_the_python_codec_is_limited_on_any_machine(self, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
        from nnfmq.serialize import codec

        monkeypatch.setattr(codec, "codec_name", "python")
        monkeypatch.setattr(platform, "machine", lambda: machine)
        assert named("packet codec").state is FindingState.LIMITED
        assert "pip install" in named("packet codec").remedy

    def test_the_table_ends_with_usable(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "--no-color"]) == 0
        printed = capsys.readouterr().out
        assert "nnfmq is usable here." in printed
        assert "\x1b[" not in printed

    def test_a_missing_feature_is_status_1(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def reject(**_: object) -> None:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(doctor, "_try_memory", reject)
        assert main(["doctor"]) == 1
        assert "nnfmq is not usable here" in capsys.readouterr().out
        assert named("memfd with seals").state is FindingState.MISSING

    @pytest.mark.parametrize(
        ("release", "limited"),
        [
            ("6.5.0-1-amd64", set()),
            ("6.4.12", {"SO_PEERPIDFD"}),
            ("5.15.0-91-generic", {"SO_PEERPIDFD", "futex_waitv"}),
            ("5.15.0+", {"SO_PEERPIDFD", "futex_waitv"}),
        ],
    )
    def test_features_missing_in_an_older_kernel_are_limited(
        self, monkeypatch: pytest.MonkeyPatch, release: str, limited: set[str]
    ) -> None:
        monkeypatch.setattr(platform, "release", lambda: release)
        found = {
            name
            for name in ("SO_PEERPIDFD", "futex_waitv", "FUTEX_WAKE_OP")
            if named(name).state is FindingState.LIMITED
        }
        assert found == limited

    @pytest.mark.parametrize(
        ("content", "state"), [("1\n", FindingState.LIMITED), ("0\n", FindingState.OK), (None, FindingState.OK)]
    )
    def test_groups_of_the_scheduler_for_each_session_are_limited(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, state: FindingState
    ) -> None:
        path = tmp_path / "enabled"
        if content is not None:
            path.write_text(content)
        monkeypatch.setattr(doctor, "AUTOGROUPS", str(path))
        assert named("autogroups").state is state

    @pytest.mark.parametrize(
        ("machine", "state"), [("x86_64", FindingState.LIMITED), ("aarch64", FindingState.MISSING)]
    )
    def test_the_python_core_is_enough_on_x86_64_only(
        self, monkeypatch: pytest.MonkeyPatch, machine: str, state: FindingState
    ) -> None:
        from nnfmq.queue import core

        monkeypatch.setattr(core, "core_name", "python")
        monkeypatch.setattr(platform, "machine", lambda: machine)
        assert named("queue core").state is state

    def test_without_the_compiled_core_a_model_has_one_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from nnfmq.engines.compiled import thread_pool

        monkeypatch.setattr(thread_pool, "core_name", "python")
        finding = named("thread pool")
        assert (finding.state, finding.value) == (FindingState.LIMITED, "python, 1 thread for a model")
        assert "compiled core" in finding.remedy

    def test_one_cpu_is_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
        finding = named("CPUs allowed")
        assert (finding.state, finding.value.endswith(": 3")) == (FindingState.LIMITED, True)

    def test_the_threads_of_a_model_are_the_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from nnfmq.engines.compiled import thread_pool

        monkeypatch.setattr(doctor, "allowed_cores", lambda: 3)
        assert named("cores allowed").value == "3"
        if thread_pool.core_name == "compiled":
            assert named("thread pool").value == "compiled, 3 threads for a model"

    def test_a_missing_optional_package_names_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "installed_version", lambda package: None)
        assert named("Pillow").remedy.endswith("`pip install 'nnfmq[images]'`")
        assert named("Pillow").state is FindingState.OK

    def test_a_missing_llvmlite_is_limited_and_names_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "installed_version", lambda package: None)
        finding = named("llvmlite")
        assert (finding.state, finding.value) == (FindingState.LIMITED, "not installed")
        assert finding.remedy.endswith("`pip install 'nnfmq[compiled]'`")

    def test_no_running_driver_is_ok(self, tmp_path: Path) -> None:
        finding = named("running driver")
        assert (finding.state, finding.value) == (FindingState.OK, f"none at {tmp_path / 'nnfmq.sock'}")

    def test_the_driver_s_cache_is_counted(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("NNFMQ_CACHE_MIB", "7")
        assert named("cached programs and kernels").value == "0, 0.0 MiB of 7 MiB at most"
        (tmp_path / "nnfmq").mkdir(mode=0o700)
        (tmp_path / "nnfmq" / "entry").write_bytes(bytes(3 << 20))
        assert named("cached programs and kernels").value == "1, 3.0 MiB of 7 MiB at most"

    def test_a_cache_that_others_can_access_is_limited_and_has_a_remedy(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (tmp_path / "nnfmq").mkdir(mode=0o755)
        finding = named("cached programs and kernels")
        assert (finding.state, "mode 0755" in finding.value) == (FindingState.LIMITED, True)
        monkeypatch.setenv("NNFMQ_CACHE_MIB", "0")
        assert named("cached programs and kernels").state is FindingState.OK


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("variable", ["XDG_STATE_HOME", "XDG_CACHE_HOME"])
def test_a_cache_that_cannot_be_created_is_limited_and_has_a_remedy(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A home that cannot be written to: here a file is in its place, which stops root as well."""
    (tmp_path / "home").write_text("")
    monkeypatch.setenv(variable, str(tmp_path / "home"))
    finding = named("cached programs and kernels")
    assert (finding.state, finding.value) == (
        FindingState.LIMITED, f"none are kept: {tmp_path / 'home'} is not a directory",
    )  # fmt: skip
    assert variable in finding.remedy


@pytest.mark.usefixtures("no_driver")
def test_a_socket_that_no_driver_could_have_is_limited_and_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("")
    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "run" / "nnfmq.sock"))
    finding = named("running driver")
    assert finding.state is FindingState.LIMITED and "XDG_RUNTIME_DIR" in finding.remedy
    assert finding.value.endswith(f"; {tmp_path / 'run'} is not a directory")


def test_a_running_driver_is_listed_with_its_devices(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "nnfmq.sock"))
    assert named("running driver").value == f"at {tmp_path / 'nnfmq.sock'}, devices: reference"


def test_an_offline_device_is_limited_and_its_reason_is_reported(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "nnfmq.sock"))
    fake.known[0].status = DeviceStatus.OFFLINE
    fake.unavailable = "device 'reference' is OFFLINE: llvmlite is not installed: pip install 'nnfmq[compiled]'"
    finding = named("device reference")
    assert (finding.state, finding.remedy) == (
        FindingState.LIMITED, "llvmlite is not installed: pip install 'nnfmq[compiled]'",
    )  # fmt: skip


def test_a_driver_that_lacks_capabilities_for_several_users_is_limited(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "nnfmq.sock"))
    fake.lacks_capabilities = True
    finding = named("users")
    assert finding.state is FindingState.LIMITED and "--user" in finding.remedy


def test_a_driver_under_which_nnfmq_was_upgraded_is_limited(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "nnfmq.sock"))
    fake.was_upgraded = True
    finding = next(each for each in doctor.examine() if (each.part, each.name) == ("driver", "version"))
    assert finding.state is FindingState.LIMITED and "--replace" in finding.remedy


def test_a_socket_that_other_users_could_replace_is_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("NNFMQ_SOCKET", str(tmp_path / "d.sock"))
    finding = named("running driver")
    assert finding.state is FindingState.LIMITED
    assert "every user can replace files" in finding.value and "NNFMQ_SOCKET" in finding.remedy


# ---- settings ----


def test_the_configuration_files_in_use_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert next(doctor._settings()) == Finding("settings", "files", "none")
    (tmp_path / "lab.toml").write_text("cache_mib = 3")
    monkeypatch.setenv("NNFMQ_CONFIG", str(tmp_path / "lab.toml"))
    assert list(doctor._settings()) == [Finding("settings", "files", str(tmp_path / "lab.toml"))]


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("variable", ["NNFMQ_MEMORY_MIB", "NNFMQ_CACHE_MIB"])
def test_an_invalid_setting_is_a_finding_beside_the_others(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "lots")
    assert main(["doctor", "--json"]) == 1
    first, *others = json.loads(capsys.readouterr().out)["findings"]
    assert (first["part"], first["state"]) == ("settings", "missing")
    assert first["value"].startswith(f"${variable} is 'lots'; allowed: 0 to ")
    assert {"core", "python", "kernel", "limits", "numpy", "optional", "driver"} <= {one["part"] for one in others}


def test_an_invalid_file_is_one_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text("cach_mib = 3")
    monkeypatch.setenv("NNFMQ_CONFIG", str(tmp_path / "lab.toml"))
    (finding,) = doctor._settings()
    assert (finding.name, finding.state) == ("invalid", FindingState.MISSING)


def test_another_error_of_a_check_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Iterator[Finding]:
        raise InvalidArgument("a bug")

    monkeypatch.setattr(doctor, "_numpy", fail)
    with pytest.raises(InvalidArgument, match="a bug"):
        doctor.examine()


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_no_word_and_no_command_is_divided(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/opt/" + "a-long-folder/" * 9 + "core.so"
    command = "`pip install 'nnfmq[images]'`"
    found = [
        Finding("core", "from", path),
        Finding("optional", "Pillow", "not installed", remedy=f"{'for photos, ' * 5}pictures and films: {command}"),
        Finding("kernel", "sandbox of workers", "one two three " * 6, FindingState.LIMITED, "a newer Linux"),
    ]
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(doctor, "examine", lambda _progress: found)
    assert main(["doctor", "--no-color"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.strip() == path for line in lines)
    assert any(command in line for line in lines)
    assert all(len(line) <= columns for line in lines if path not in line)
    assert " ".join(" ".join(lines).split()).count("one two three") == 6
