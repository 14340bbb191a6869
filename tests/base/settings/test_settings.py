"""Settings: precedence of environment, files and defaults, allowed values, which files are read and which rejected."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.places import ROOT

from nnfmq.base import settings
from nnfmq.cli import command_tree, config
from nnfmq.engines.compiled.target import TARGETS
from nnfmq.hal.errors import InvalidArgument
from nnfmq.hal.hosted import RUNTIMES

ALL = settings.table()

Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unset every setting; the user's and the system's files would be in a new folder."""
    for setting in ALL.values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(settings, "_SYSTEM_FILE", str(tmp_path / "system.toml"))


@pytest.fixture
def user_file(tmp_path: Path) -> Write:
    """A function that writes the user's configuration file, and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "user" / "nnfmq" / "nnfmq.toml"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


# ---- precedence ----


def test_the_default_is_used_if_nothing_is_set() -> None:
    found = settings.CACHE_MIB.effective()
    assert (found.value, found.source, found.path) == (512, "default", None)


def test_the_system_s_file_takes_precedence_over_the_default(tmp_path: Path) -> None:
    (tmp_path / "system.toml").write_text("cache_mib = 1")
    found = settings.CACHE_MIB.effective()
    assert (found.value, found.source, found.path) == (1, "file", str(tmp_path / "system.toml"))


def test_the_user_s_file_replaces_values_of_the_system_s_file_and_keeps_the_others(
    tmp_path: Path, user_file: Write
) -> None:
    (tmp_path / "system.toml").write_text("cache_mib = 1\nmemory_mib = 7")
    path = user_file("cache_mib = 2")
    assert settings.CACHE_MIB.effective().path == str(path)
    assert (settings.CACHE_MIB.value(), settings.MEMORY_MIB.value()) == (2, 7)


def test_the_environment_takes_precedence_over_files(user_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    user_file("cache_mib = 2")
    monkeypatch.setenv("NNFMQ_CACHE_MIB", "3")
    found = settings.CACHE_MIB.effective()
    assert (found.value, found.source, found.origin) == (3, "environment", "$NNFMQ_CACHE_MIB")


def test_an_exported_value_takes_precedence_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_CACHE_MIB", "3")
    with settings.CACHE_MIB.exported("0"):
        assert settings.CACHE_MIB.value() == 0
    assert settings.CACHE_MIB.value() == 3
    with settings.MEMORY_MIB.exported("5"):
        assert settings.MEMORY_MIB.value() == 5
    assert "NNFMQ_MEMORY_MIB" not in os.environ


@pytest.mark.parametrize("setting", [setting for setting in ALL.values() if not setting.type.has_empty_value])
def test_an_empty_variable_counts_as_unset(setting: settings.Setting[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting.variable, "")
    assert setting.effective().source == "default"


def test_an_empty_list_of_extensions_allows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.EXTENSIONS.value() is None
    monkeypatch.setenv("NNFMQ_EXTENSIONS", "")
    assert settings.EXTENSIONS.value() == []


# ---- files ----


def test_a_named_file_is_read_instead_of_the_others(
    user_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_file("cache_mib = 2\nmemory_mib = 9")
    (tmp_path / "lab.toml").write_text("cache_mib = 4")
    monkeypatch.setenv("NNFMQ_CONFIG", str(tmp_path / "lab.toml"))
    assert (settings.CACHE_MIB.value(), settings.MEMORY_MIB.value()) == (4, None)


def test_dev_null_is_no_file(user_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    user_file("cache_mib = 2")
    monkeypatch.setenv("NNFMQ_CONFIG", os.devnull)
    assert settings.CACHE_MIB.value() == 512


def test_a_file_in_the_current_directory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nnfmq.toml").write_text("cache_mib = 2")
    monkeypatch.chdir(tmp_path)
    assert settings.CACHE_MIB.value() == 512


@pytest.mark.parametrize("folder", ["", "relative"])
def test_the_user_s_file_is_in_the_home_directory_by_default(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", folder)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert settings.candidates()[-1] == "/home/somebody/.config/nnfmq/nnfmq.toml"


def test_a_user_without_a_home_directory_has_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a uid without an entry in passwd
    assert settings.candidates() == (str(tmp_path / "system.toml"),)


def test_values_of_every_type_are_read_from_files(user_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    user_file('socket = "~/d.sock"\ncore = "python"\nextensions = ["com.a", "com.b"]\nburst_server_polling_window = 0')
    monkeypatch.setenv("HOME", "/home/somebody")
    assert settings.SOCKET.value() == "/home/somebody/d.sock"
    assert settings.CORE.value() == "python"
    assert settings.EXTENSIONS.value() == ["com.a", "com.b"]
    assert settings.BURST_SERVER_POLLING_WINDOW.value() == 0


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("1", True), ("0", False)])
def test_a_switch_of_a_file_is_a_boolean_or_a_number(text: str, value: bool, user_file: Write) -> None:
    user_file(f"cpu_only = {text}\npartition = 2\nenabled_devices = 'gpu-.*'")
    assert settings.CPU_ONLY.value() is value
    assert (settings.PARTITION.value(), settings.ENABLED_DEVICES.value()) == (2, "gpu-.*")


# ---- rejected values ----


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("NNFMQ_CACHE_MIB", "lots", "0 to 1099511627776"),
        ("NNFMQ_CACHE_MIB", "-1", "0 to 1099511627776"),
        ("NNFMQ_CACHE_MIB", "1.5", "0 to 1099511627776"),
        ("NNFMQ_CACHE_MIB", "²", "0 to 1099511627776"),
        ("NNFMQ_CACHE_MIB", "1099511627777", "0 to 1099511627776"),
        ("NNFMQ_CACHE_MIB", "9" * 5000, "0 to 1099511627776"),
        ("NNFMQ_CORE", "fast", "compiled, python"),
        ("NNFMQ_PARTITION", "3", "0 to 2"),
        ("NNFMQ_CPU_ONLY", "yes", "0 and 1; in files true and false as well"),
        ("NNFMQ_ENABLED_DEVICES", "(", "a regular expression of Python"),
        ("NNFMQ_ENABLED_DEVICES", "x{99999999999}", "a regular expression of Python"),
        ("NNFMQ_TARGET", "sse2", ", ".join(TARGETS)),
        ("NNFMQ_CLIENT_CLASSES", "1000=batch,1001=fast", settings.CLASS_RULES.allowed),
        ("NNFMQ_CLIENT_CLASSES", "=batch", settings.CLASS_RULES.allowed),
        ("NNFMQ_CLIENT_CLASSES", "batch", settings.CLASS_RULES.allowed),
        ("NNFMQ_CLIENT_CLASSES", "1000/=batch", settings.CLASS_RULES.allowed),
        ("NNFMQ_INTERACTIVE_UIDS", "1000,-1", settings.UIDS.allowed),
        ("NNFMQ_INTERACTIVE_UIDS", "1000,١٠٠١", settings.UIDS.allowed),
        ("NNFMQ_INTERACTIVE_UIDS", "root", settings.UIDS.allowed),
    ],
)
def test_a_variable_that_is_not_allowed_is_an_error_with_what_is_allowed(
    variable: str, text: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(InvalidArgument) as raised:
        settings.check_all()
    name = variable.removeprefix("NNFMQ_").lower()
    remedy = f"correct or unset it (`nnfmq config explain {name}`)"
    assert str(raised.value) == f"${variable} is {text!r}; allowed: {allowed}; {remedy}"


def test_the_largest_integers_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_CACHE_MIB", "1099511627776")
    assert settings.CACHE_MIB.value() == 1 << 40


@pytest.mark.parametrize(
    "line",
    [
        'cache_mib = "512"', "cache_mib = true", "cache_mib = 1.0", "cache_mib = -1",
        "cpu_only = 2", 'cpu_only = "1"', "partition = 3", "enabled_devices = 1", 'enabled_devices = "["',
        'core = "fast"', "core = 1", 'core = ""',
        'socket = "d.sock"', "socket = 1", 'extensions = "com.a"', "extensions = [1]", 'extensions = ["com.a,com.b"]',
    ],
)  # fmt: skip
def test_a_value_of_a_file_that_is_not_allowed_is_an_error_that_names_key_and_file(line: str, user_file: Write) -> None:
    path = user_file(line)
    key = line.split()[0]
    with pytest.raises(InvalidArgument, match=rf"^{key} in {path} is .*; allowed: .*; correct or remove it"):
        ALL[key].value()


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("cach_mib = 1", "did you mean 'cache_mib'"),
        ("MEMORY_MIB = 1", "did you mean 'memory_mib'"),
        ("colour = 1", "`nnfmq config show` lists the known ones"),
        ("no_color = 1", "`nnfmq config show` lists the known ones"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_known_one(line: str, hint: str, user_file: Write) -> None:
    path = user_file(line)
    with pytest.raises(InvalidArgument) as raised:
        settings.check_all()
    message = str(raised.value)
    assert message.startswith(f"the configuration {path} has an unknown key '{line.split()[0]}'; {hint}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"cache_mib =", "Invalid value"),
        (b"\xff", "'utf-8' codec can't decode"),
        (b"cache_mib = " + b"[" * 100_000, "nested too deep"),
    ],
    ids=["syntax", "encoding", "nesting"],
)
def test_a_file_that_is_not_toml_is_an_error_with_the_reason(content: bytes, reason: str, user_file: Write) -> None:
    path = user_file("")
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=rf"^the configuration {path} is not valid TOML: .*{reason}"):
        settings.check_all()


# ---- rejected files ----


def test_a_named_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNFMQ_CONFIG", str(tmp_path / "gone.toml"))
    with pytest.raises(InvalidArgument, match=r"gone.toml cannot be read: No such file.*; correct \$NNFMQ_CONFIG"):
        settings.check_all()


def test_a_file_that_everybody_can_write_to_is_rejected(user_file: Write) -> None:
    path = user_file("cache_mib = 2")
    path.chmod(0o646)
    with pytest.raises(InvalidArgument, match=rf"every user can write to it \(mode 0646\); run chmod o-w {path}"):
        settings.check_all()


def test_a_file_of_another_user_is_rejected(user_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = user_file("cache_mib = 2")
    if os.getuid() == 0:
        os.chown(path, 4711, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(InvalidArgument, match=rf"belongs to uid {path.stat().st_uid}, not to {os.getuid()} or root"):
        settings.check_all()


def test_a_file_of_root_is_accepted(user_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = user_file("cache_mib = 2")
    owned_by_root = os.stat_result([*path.stat()[:4], 0, *path.stat()[5:]])
    monkeypatch.setattr(os, "fstat", lambda _descriptor: owned_by_root)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert settings.CACHE_MIB.value() == 2


def test_a_fifo_is_rejected_without_waiting_for_a_writer(user_file: Write) -> None:
    path = user_file("")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidArgument, match="is not a regular file"):
        settings.check_all()


def test_a_file_that_may_not_be_read_is_an_error(user_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = user_file("cache_mib = 2")
    refuse_to_open(path, monkeypatch)
    with pytest.raises(InvalidArgument, match="cannot be read: Permission denied; make it readable or remove it"):
        settings.check_all()


def test_a_folder_that_may_not_be_searched_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For instance if HOME is that of another user."""
    refuse_to_open(tmp_path / "user" / "nnfmq" / "nnfmq.toml", monkeypatch)  # does not exist, as far as lstat can see
    assert settings.CACHE_MIB.value() == 512


def refuse_to_open(refused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def fail(path: str, flags: int) -> int:
        if path == str(refused):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", fail)


# ---- the table ----


def test_the_names_of_targets_are_those_of_the_engine() -> None:
    assert settings.TARGET.type.allowed == ", ".join(TARGETS)


def test_the_names_of_runtimes_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(runtime.name for runtime in RUNTIMES) == settings.HOSTED
    monkeypatch.setenv("NNFMQ_RUNTIMES", "jax, litert")
    assert settings.RUNTIMES.value() == ["jax", "litert"]
    monkeypatch.setenv("NNFMQ_RUNTIMES", "onxruntime")
    with pytest.raises(InvalidArgument, match="allowed: some of litert, onnxruntime, openvino, torch, jax"):
        settings.RUNTIMES.value()


def test_every_variable_that_the_package_names_is_in_the_table() -> None:
    """Only strings count: texts for users, and anything that could be a name passed to the environment."""
    variables = {setting.variable for setting in ALL.values()}
    named = {
        (path.name, name)
        for path in (ROOT / "nnfmq").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in re.findall(r"\bNNFMQ_[A-Z_]*[A-Z]\b", node.value)
    }
    missing = sorted(pair for pair in named if pair[1] not in variables)
    assert missing == [], "declare these settings in nnfmq/settings/__init__.py"


def test_every_option_that_the_table_names_exists() -> None:
    options = {
        f"{node.name} {flag}"
        for node in command_tree.nodes(command_tree.command_tree())
        for option in node.options
        for flag in option.flags
    }
    flags = {option.split()[-1] for option in options}
    for setting in ALL.values():
        for named in filter(None, setting.options.split(", ")):
            assert named in (options if named.startswith("nnfmq ") else flags), setting.name


def test_every_default_that_is_not_a_constant_is_computed_or_described() -> None:
    without_constant = {setting.name for setting in ALL.values() if setting.default is None}
    assert without_constant == {*config.COMPUTED, *config.DESCRIBED}
    assert all(setting.default_text != "None" for setting in ALL.values())


# ---- seconds and sinks ----


@pytest.mark.parametrize(("line", "value"), [("2", 2.0), ("2.5", 2.5), ("0", 0.0), ("864e2", 86_400.0)])
def test_seconds_are_integers_or_floats(
    line: str, value: float, user_file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_file(f"telemetry_interval_s = {line}")
    assert settings.TELEMETRY_INTERVAL_S.value() == value
    monkeypatch.setenv("NNFMQ_TELEMETRY_INTERVAL_S", line)
    assert settings.TELEMETRY_INTERVAL_S.effective().source == "environment"
    assert settings.TELEMETRY_INTERVAL_S.value() == value


@pytest.mark.parametrize("line", ["-1", "nan", "inf", "true", "'1'", "86401"])
def test_a_number_of_seconds_that_is_not_allowed_is_an_error(line: str, user_file: Write) -> None:
    user_file(f"telemetry_interval_s = {line}")
    with pytest.raises(InvalidArgument, match=r"^telemetry_interval_s in .*; allowed: 0 to 86400; "):
        settings.TELEMETRY_INTERVAL_S.value()


@pytest.mark.parametrize(("sink", "is_allowed"), [
    ("unix:/run/t.sock", True), ("/var/t.jsonl", True), ("unix:t.sock", False), ("t.jsonl", False),
])  # fmt: skip
def test_a_sink_of_telemetry_in_a_file_has_an_absolute_path(sink: str, is_allowed: bool, user_file: Write) -> None:
    user_file(f'telemetry = "{sink}"')
    if is_allowed:
        assert settings.TELEMETRY.value() == sink
        return
    with pytest.raises(InvalidArgument, match=r"allowed: a path, or unix:PATH; in files with an absolute PATH"):
        settings.TELEMETRY.value()
