"""The choice of a hosted runtime for files that nnfmq's own engine does not support, in real drivers."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, kill_worker, running_daemon, short_folder

import nnfmq
from nnfmq.client.connection.hosted_choice import GivenModel, Host, Hosting
from nnfmq.client.partitioned.devices import RuntimeDevice
from nnfmq.hal.hosted import RUNTIMES

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def hosting() -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock", options=["--runtimes", "onnxruntime"]) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def without() -> Iterator[Daemon]:
    """Return a driver in whose environment no runtime is installed."""
    hidden = dict.fromkeys(runtime.package for runtime in RUNTIMES)
    with short_folder() as made:
        (made / "sitecustomize.py").write_text(f"import sys\nsys.modules.update({hidden})\n")
        with running_daemon(made / "d.sock", environment={"PYTHONPATH": str(made)}) as daemon:
            yield daemon


Shape = tuple[int | str, ...]


def write(path: Path, operator: str, shapes: dict[str, Shape], constants: dict[str, Any], domain: str = "") -> Path:
    """Write an ONNX file of one node, whose inputs are floats of these shapes, then constants."""
    helper, kinds = onnx.helper, onnx.TensorProto
    inputs = [helper.make_tensor_value_info(name, kinds.FLOAT, shape) for name, shape in shapes.items()]
    initializers = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    kind = kinds.INT64 if operator == "NonMaxSuppression" else kinds.FLOAT
    output = helper.make_tensor_value_info("y", kind, None)
    node = helper.make_node(operator, [*shapes, *constants], ["y"], domain=domain)
    imports = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    graph = helper.make_graph([node], "g", inputs, [output], initializers)
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=9), path)
    return path


@pytest.fixture
def suppression(tmp_path: Path) -> Path:
    shapes: dict[str, Shape] = {"boxes": (1, 3, 4), "scores": (1, 1, 3)}
    return write(tmp_path / "nms.onnx", "NonMaxSuppression", shapes, {"most": np.int64([2])})


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    return write(tmp_path / "relu.onnx", "Relu", {"x": ("n", 4)}, {})


BOXES = np.float32([[[0, 0, 1, 1], [0, 0, 1, 0.9], [2, 2, 3, 3]]])
SCORES = np.float32([[[0.9, 0.8, 0.7]]])


def test_a_file_with_an_unsupported_operator_runs_on_the_hosted_runtime_and_that_is_logged_once(
    hosting: Daemon, suppression: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = onnxruntime.InferenceSession(suppression).run(None, {"boxes": BOXES, "scores": SCORES})[0]
    with hosting.connect() as client, caplog.at_level(logging.WARNING, "nnfmq.client"):
        for _ in range(2):
            with client.prepare(suppression) as model:
                assert model.device == "onnxruntime" and model.plan is not None
                assert model.execute(BOXES, SCORES)[0].tolist() == expected.tolist()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"{suppression} is executed by device 'onnxruntime', because nnfmq's own engine does not support "
        "NonMaxSuppression as it is used there; client.device('onnxruntime') chooses it at once"
    )


def test_what_nnfmq_supports_stays_on_its_own_engine(hosting: Daemon, relu: Path) -> None:
    with hosting.connect() as client, client.prepare(relu, shapes={"x": (2, 4)}) as model:
        assert model.device == "compiled"


def test_a_file_of_unknown_sizes_takes_any_on_the_hosted_runtime(
    hosting: Daemon, relu: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hosting.connect() as client, client.prepare(relu.read_bytes()) as model:
        assert model.device == "onnxruntime"
        for count in (1, 3):
            assert model.execute(np.full((count, 4), -1, np.float32))[0].tolist() == [[0] * 4] * count
    assert "sizes are not known: input 'x' is (n, 4); with `shapes` nnfmq's own engine may execute it" in caplog.text


def test_options_of_a_runtime_choose_it(hosting: Daemon, relu: Path) -> None:
    with hosting.connect() as client:
        with client.prepare(relu, shapes={"x": (2, 4)}, runtime_options={"threads": 1}) as model:
            assert model.device == "onnxruntime"
        with pytest.raises(nnfmq.InvalidArgument, match=r"threads 0: a number of at least 1"):
            client.prepare(relu, runtime_options={"threads": 0})
        with pytest.raises(nnfmq.InvalidArgument, match="`runtime_options` are for a model file, this is a Loaded"):
            client.prepare(nnfmq.load(relu, shapes={"x": (2, 4)}), runtime_options={"threads": 1})


def test_a_file_that_all_reject_is_refused_with_the_operators_and_the_text_of_each(
    hosting: Daemon, tmp_path: Path
) -> None:
    unknown = write(tmp_path / "net.onnx", "Foo", {"x": (2, 4)}, {}, "my.domain")
    with hosting.connect() as client, pytest.raises(nnfmq.UnsupportedModel) as caught:
        client.prepare(unknown)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{unknown}: operator 0 (my.domain.Foo): is not supported")
    assert re.match(r"device 'onnxruntime' rejects it: \[ONNXRuntimeError\].*my\.domain:Foo", second)
    assert [problem.operator for problem in caught.value.problems] == ["my.domain.Foo"]


def test_without_the_runtime_the_error_says_how_to_install_it_in_the_driver_s_environment(
    without: Daemon, suppression: Path, relu: Path
) -> None:
    install = f"its runtime is not installed in the driver's environment: {sys.executable} -m pip install 'nnfmq["
    with without.connect() as client:
        with pytest.raises(nnfmq.UnsupportedModel, match="NonMaxSuppression") as caught:
            client.prepare(suppression)
        assert f"device 'onnxruntime': {install}onnxruntime]'" in caught.value.advice in str(caught.value)
        assert len(caught.value.problems) == 1
        with pytest.raises(nnfmq.InvalidArgument, match=r"shapes=\{'x': \(1, 4\)\}") as open_sizes:
            client.prepare(relu)
        assert install in str(open_sizes.value)
        with pytest.raises(nnfmq.InvalidArgument, match=re.escape(install)):
            client.device("onnxruntime")
    with nnfmq.Runtime([without.path]) as runtime, pytest.raises(nnfmq.UnsupportedModel, match=re.escape(install)):
        runtime.prepare(suppression)


def test_an_error_says_that_a_runtime_is_installed_but_not_hosted(
    suppression: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNFMQ_RUNTIMES", "")
    refused = pytest.raises(nnfmq.UnsupportedModel, match=r"installed, but \$NNFMQ_RUNTIMES does not allow")
    with nnfmq.connect(embedded=True) as client, refused:
        client.prepare(suppression)


@pytest.mark.parametrize("setting", [("NNFMQ_CPU_ONLY", "1"), ("NNFMQ_ENABLED_DEVICES", "compiled|reference")])
def test_settings_of_the_client_keep_it_from_choosing_a_runtime_but_not_from_forcing_one(
    hosting: Daemon, suppression: Path, setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*setting)
    with hosting.connect() as client:
        with pytest.raises(nnfmq.UnsupportedModel) as caught:
            client.prepare(suppression)
        assert caught.value.advice == ""
        with client.device("onnxruntime").prepare(suppression) as model:
            assert model.device == "onnxruntime"


def test_a_corrupt_file_is_no_unsupported_one_and_no_runtime_is_asked(hosting: Daemon, suppression: Path) -> None:
    content = suppression.read_bytes()
    with hosting.connect() as client, pytest.raises(nnfmq.InvalidArgument, match="truncated or corrupt") as caught:
        client.prepare(content[: len(content) // 2])
    assert not isinstance(caught.value, nnfmq.UnsupportedModel)


def test_a_hosted_model_goes_to_its_runtime_and_its_error_to_the_caller(
    hosting: Daemon, without: Daemon, tmp_path: Path
) -> None:
    path = write(tmp_path / "gather.onnx", "Gather", {"x": (3,)}, {"i": np.int64([5])})
    with hosting.connect() as client:
        loaded = client.device("onnxruntime").load(path)
        with client.prepare(loaded) as model:
            assert model.device == "onnxruntime" and model.plan is not None
            with pytest.raises(nnfmq.GeneralFailure, match=r"onnxruntime: .*indices element out of data bounds"):
                model.execute(np.zeros(3, np.float32))
            assert model.cpu_executions == 0
    with nnfmq.Runtime([hosting.path]) as runtime, runtime.prepare(loaded) as model:
        assert model.device == "onnxruntime"
        with pytest.raises(nnfmq.GeneralFailure, match="out of data bounds"):
            model.execute(np.zeros(3, np.float32))
    with without.connect() as client, pytest.raises(nnfmq.UnsupportedModel, match="hosted model, of the format 'onnx'"):
        client.prepare(loaded)


def test_after_the_death_of_the_worker_a_hosted_model_is_dead_or_prepared_again_and_never_executed_by_the_cpu(
    hosting: Daemon, suppression: Path
) -> None:
    with hosting.connect() as client, client.prepare(suppression) as model:
        kill_worker(client)
        with pytest.raises(nnfmq.DeadObject):
            model.execute(BOXES, SCORES)
        assert model.cpu_executions == 0
    with hosting.connect(recover=True) as client, client.prepare(suppression) as model:
        before = model.execute(BOXES, SCORES)[0].tolist()
        kill_worker(client)
        assert model.execute(BOXES, SCORES)[0].tolist() == before
        assert (model.device, model.cpu_executions) == ("onnxruntime", 0)


def test_a_runtime_of_all_drivers_chooses_alike_and_asks_hosting_devices_only_about_what_they_host(
    hosting: Daemon, suppression: Path, relu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = RuntimeDevice.supported_operations

    def supported(device: RuntimeDevice, model: Any) -> Any:
        asked.append(device.name)
        return ask(device, model)

    monkeypatch.setattr(RuntimeDevice, "supported_operations", supported)
    with nnfmq.Runtime([hosting.path]) as runtime:
        with runtime.prepare(relu, shapes={"x": (2, 4)}) as model:
            assert model.device == "compiled"
        assert "compiled" in asked and "onnxruntime" not in asked
        with runtime.prepare(suppression) as model:
            assert model.device == "onnxruntime"
        assert runtime.plan(suppression).devices == ("onnxruntime",)
        with runtime.prepare(relu, ["onnxruntime"]) as model:
            assert model.execute(np.float32([[-1, 2, -3, 4]]))[0].tolist() == [[0, 2, 0, 4]]
        with runtime.prepare(suppression, ["compiled", "onnxruntime"]) as model:
            assert model.device == "onnxruntime"
        with pytest.raises(nnfmq.UnsupportedModel, match="NonMaxSuppression"):
            runtime.prepare(suppression, ["compiled"])


def test_a_file_that_nnfmq_s_devices_refuse_after_the_import_is_hosted(hosting: Daemon, relu: Path) -> None:
    def refuse(_model: object, _options: object) -> Any:
        raise nnfmq.GeneralFailure("RELU of these types is not supported")

    with hosting.connect() as client:
        devices = Hosting([Host.of(client.device("onnxruntime"))], client.why_absent)
        given = GivenModel.of(relu, {"shapes": {"x": (1, 4)}})
        assert given.model is not None
        with devices.prepare(given, {}, refuse) as model:
            assert (model.device, model.inputs[0].shape) == ("onnxruntime", (1, 4))
        built = GivenModel.of(nnfmq.load(relu, shapes={"x": (1, 4)}), {})
        with pytest.raises(nnfmq.GeneralFailure, match="RELU of these types"):
            devices.prepare(built, {}, refuse)
