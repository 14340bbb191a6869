"""NNAPI's compilation through a driver process: its options, its states, its errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.drivers import LIMIT_S, Daemon
from support.hints import with_extension
from support.models import add_model, invalid_model, null_model, unsized_relu_model
from support.nnapi_objects import SUM, adding, finished

import nnfmq
from nnfmq.client.connection.device import Device
from nnfmq.hal.types import ExecutionPreference, Model, Priority
from nnfmq.nnapi import BurstBuilder, CompilationBuilder, ExecutionBuilder, PriorityCode

TOKEN = bytes(range(32))
EXTENSION = "com.example.hints"
SETTERS: dict[str, Callable[[CompilationBuilder], None]] = {
    "set_preference": lambda builder: builder.set_preference(ExecutionPreference.LOW_POWER),
    "set_priority": lambda builder: builder.set_priority(PriorityCode.HIGH),
    "set_timeout": lambda builder: builder.set_timeout(LIMIT_S),
    "set_caching": lambda builder: builder.set_caching("/", TOKEN),
    "set_caching_from_fds": lambda builder: builder.set_caching_from_fds([], [], TOKEN),
    "add_extension_attribute": lambda builder: builder.add_extension_attribute(EXTENSION, 1, b"x"),
    "finish": CompilationBuilder.finish,
}
PREFERENCES = {
    name: getattr(CompilationBuilder, f"get_preferred_memory_{name}")
    for name in ("alignment_for_input", "padding_for_input", "alignment_for_output", "padding_for_output")
}


@pytest.fixture
def device(client: nnfmq.Client) -> Device:
    """Return a device that supports an extension for hints."""
    return with_extension(client.device("reference"), EXTENSION)


@pytest.fixture
def other(client: nnfmq.Client) -> Device:
    return client.device("compiled")


def failed(stack: ExitStack, device: Device) -> CompilationBuilder:
    """Return a compilation that has failed."""
    compilation = stack.enter_context(CompilationBuilder(invalid_model(), [device]))
    with pytest.raises(nnfmq.InvalidArgument):
        compilation.finish()
    return compilation


def test_API_5_all_options_together_give_a_model_that_computes(
    resources: ExitStack, device: Device, tmp_path: Path
) -> None:
    compilation = resources.enter_context(CompilationBuilder(add_model(), [device]))
    compilation.set_preference(ExecutionPreference.SUSTAINED_SPEED)
    compilation.set_priority(PriorityCode.LOW)
    compilation.set_timeout(LIMIT_S)
    compilation.set_caching(tmp_path, TOKEN)
    compilation.add_extension_attribute(EXTENSION, 1, b"ignored")
    compilation.finish()
    execution, output = adding(resources, compilation)
    execution.compute()
    assert output.tolist() == SUM


def test_API_5_the_options_reach_the_driver(
    resources: ExitStack, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []
    prepare = Device.prepare

    def recording(self: Device, model: Model, **options: object) -> nnfmq.PreparedModel:
        given.append(options)
        return prepare(self, model, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Device, "prepare", recording)
    compilation = resources.enter_context(CompilationBuilder(add_model(), [device]))
    compilation.set_preference(ExecutionPreference.LOW_POWER)
    compilation.set_priority(PriorityCode.HIGH)
    compilation.set_timeout(LIMIT_S)
    compilation.add_extension_attribute(EXTENSION, 3, b"three")
    compilation.finish()
    (options,) = given
    assert options["preference"] is ExecutionPreference.LOW_POWER
    assert options["priority"] is Priority.HIGH
    assert options["timeout"] == LIMIT_S
    (hint,), (extension,) = options["hints"], options["extensions"]  # type: ignore[misc]
    assert (hint.token, hint.value, extension.name) == (extension.prefix << 16 | 3, b"three", EXTENSION)


def test_API_5_a_timeout_that_has_passed_ends_the_compilation(resources: ExitStack, device: Device) -> None:
    compilation = resources.enter_context(CompilationBuilder(add_model(), [device]))
    compilation.set_timeout(0)
    with pytest.raises(nnfmq.MissedDeadline):
        compilation.finish()
    with pytest.raises(nnfmq.BadState, match="has failed"):
        ExecutionBuilder(compilation)


def test_API_5_a_directory_of_caches_is_used_a_second_time(
    resources: ExitStack, other: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    from_cache = Device._prepare_from_cache
    monkeypatch.setattr(
        Device, "_prepare_from_cache", lambda self, *given: (loaded.append(given), from_cache(self, *given))[1]
    )
    for uses_cache in (False, True):
        compilation = resources.enter_context(CompilationBuilder(add_model(), [other]))
        compilation.set_caching(tmp_path, TOKEN)
        compilation.finish()
        assert bool(loaded) is uses_cache
        execution, output = adding(resources, compilation)
        execution.compute()
        assert output.tolist() == SUM


def test_API_17_open_cache_files_are_filled_and_then_used(
    resources: ExitStack, other: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = (other.info.model_cache_files, other.info.data_cache_files)
    paths = [[tmp_path / f"{kind}{i}" for i in range(count)] for kind, count in zip("md", counts, strict=True)]
    fds = [[os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in part] for part in paths]
    for fd in [*fds[0], *fds[1]]:
        resources.callback(os.close, fd)
    for is_filled in (False, True):
        compilation = resources.enter_context(CompilationBuilder(add_model(), [other]))
        compilation.set_caching_from_fds(*fds, TOKEN)
        if is_filled:
            monkeypatch.setattr(Device, "prepare", lambda *_, **__: pytest.fail("compiled again"))
        compilation.finish()
        execution, output = adding(resources, compilation)
        execution.compute()
        assert output.tolist() == SUM
        assert all(path.stat().st_size for part in paths for path in part)


def test_API_17_files_that_the_driver_did_not_write_are_written_again(
    resources: ExitStack, other: Device, tmp_path: Path
) -> None:
    counts = (other.info.model_cache_files, other.info.data_cache_files)
    paths = [[tmp_path / f"{kind}{i}" for i in range(count)] for kind, count in zip("md", counts, strict=True)]
    for path in [*paths[0], *paths[1]]:
        path.write_bytes(b"not a cache")
    fds = [[os.open(path, os.O_RDWR) for path in part] for part in paths]
    for fd in [*fds[0], *fds[1]]:
        resources.callback(os.close, fd)
    compilation = resources.enter_context(CompilationBuilder(add_model(), [other]))
    compilation.set_caching_from_fds(*fds, TOKEN)
    compilation.finish()
    assert all(path.read_bytes()[:11] != b"not a cache" for part in paths for path in part)


def test_API_17_a_cache_file_that_is_not_open_is_invalid(resources: ExitStack, device: Device) -> None:
    compilation = resources.enter_context(CompilationBuilder(add_model(), [device]))
    compilation.set_caching_from_fds([-1], [], TOKEN)
    with pytest.raises(nnfmq.InvalidArgument, match="not open"):
        compilation.finish()


def test_N_API_13_the_list_of_devices_has_each_once(device: Device) -> None:
    for devices, text in (([], "empty"), ([device, device], "twice"), ([None], "None"), (None, "None")):
        with pytest.raises(nnfmq.InvalidArgument, match=text):
            CompilationBuilder(add_model(), devices)  # type: ignore[arg-type]
    with pytest.raises(nnfmq.InvalidArgument, match="the model is None"):
        CompilationBuilder(None, [device])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [40, -1, 3])
def test_N_API_14_unknown_preferences_and_priorities_are_rejected(device: Device, value: int) -> None:
    with CompilationBuilder(add_model(), [device]) as compilation:
        with pytest.raises(nnfmq.InvalidArgument, match="LOW_POWER"):
            compilation.set_preference(value)  # type: ignore[arg-type]
        with pytest.raises(nnfmq.InvalidArgument, match="MEDIUM"):
            compilation.set_priority(value)  # type: ignore[arg-type]


def test_N_API_15_a_negative_timeout_is_rejected(device: Device) -> None:
    with CompilationBuilder(add_model(), [device]) as compilation, pytest.raises(nnfmq.InvalidArgument, match="-1"):
        compilation.set_timeout(-1)


@pytest.mark.parametrize("setter", SETTERS.values(), ids=SETTERS)
@pytest.mark.parametrize("state", [finished, failed], ids=["finished", "failed"])
def test_API_5_N_API_16_nothing_is_set_after_finish(
    resources: ExitStack, device: Device, setter: Callable[[CompilationBuilder], None], state: Callable[..., object]
) -> None:
    compilation = failed(resources, device) if state is failed else finished(resources, null_model(), device)
    with pytest.raises(nnfmq.BadState, match="is finished"):
        setter(compilation)


@pytest.mark.parametrize("query", PREFERENCES.values(), ids=PREFERENCES)
def test_N_API_17_memory_preferences_are_known_after_success_alone(
    resources: ExitStack, device: Device, query: Callable[[CompilationBuilder, int], int]
) -> None:
    with CompilationBuilder(add_model(), [device]) as compilation:
        with pytest.raises(nnfmq.BadState, match="is not finished"):
            query(compilation, 0)
        compilation.finish()
        assert query(compilation, 0) == 64
        for index in (-1, 2):
            with pytest.raises(nnfmq.InvalidArgument, match=f"there is no (in|out)put {index}"):
                query(compilation, index)
    with pytest.raises(nnfmq.BadState, match="has failed"):
        query(failed(resources, device), 0)


def test_N_API_17_a_hidl_driver_has_no_padding(daemon: Daemon) -> None:
    with nnfmq.connect(daemon.path, interface="HIDL 1.3", timeout=LIMIT_S) as client, ExitStack() as stack:
        compilation = finished(stack, add_model(), client.device("reference"))
        assert compilation.get_preferred_memory_alignment_for_input(0) == 64
        assert compilation.get_preferred_memory_padding_for_input(0) == 1
        assert compilation.get_preferred_memory_padding_for_output(0) == 1


@pytest.mark.parametrize("made", [ExecutionBuilder, BurstBuilder])
def test_N_API_18_nothing_is_made_of_an_unfinished_or_failed_compilation(
    resources: ExitStack, device: Device, made: Callable[[CompilationBuilder], object]
) -> None:
    with CompilationBuilder(add_model(), [device]) as compilation, pytest.raises(nnfmq.BadState, match="call finish"):
        made(compilation)
    with pytest.raises(nnfmq.BadState, match="has failed, or is closed"):
        made(compilation)
    with pytest.raises(nnfmq.BadState, match="has failed"):
        made(failed(resources, device))
    with pytest.raises(nnfmq.InvalidArgument, match="None"):
        made(None)  # type: ignore[arg-type]


def test_EXT_6_N_API_37_attributes_of_a_compilation_need_a_device_with_the_extension(
    device: Device, other: Device
) -> None:
    unsupported = pytest.raises(nnfmq.InvalidArgument, match=r"'compiled' does not support 'com\.example\.hints'")
    with CompilationBuilder(add_model(), [other]) as compilation, unsupported:
        compilation.add_extension_attribute(EXTENSION, 1, b"")
    with CompilationBuilder(add_model(), [device]) as compilation:
        for name, code, value in (
            (None, 1, b""),
            (EXTENSION, 1, None),
            (EXTENSION, 1 << 16, b""),
            (EXTENSION, -1, b""),
        ):
            with pytest.raises(nnfmq.InvalidArgument):
                compilation.add_extension_attribute(name, code, value)  # type: ignore[arg-type]
        compilation.add_extension_attribute(EXTENSION, 1, b"")
        with pytest.raises(nnfmq.InvalidArgument, match="added before"):
            compilation.add_extension_attribute(EXTENSION, 1, b"again")


def test_API_16_a_compilation_is_closed_before_what_was_made_of_it(resources: ExitStack, device: Device) -> None:
    compilation = finished(resources, add_model(), device)
    execution, output = adding(resources, compilation)
    burst = resources.enter_context(BurstBuilder(compilation))
    for _ in range(2):
        compilation.close()
    execution.burst_compute(burst)
    assert output.tolist() == SUM
    execution.close()
    burst.close()
    with CompilationBuilder(unsized_relu_model(), [device]):
        pass  # closed without being finished
