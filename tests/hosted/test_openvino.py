"""The device `openvino`, against what OpenVINO computes in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.drivers import Daemon
from support.hosted_files import assert_equal, examples, made

import nnfmq
from nnfmq.hosted.adapter import HostedFile, OpenOptions
from nnfmq.hosted.openvino import OpenVinoDevice

if find_spec("openvino") is None:
    pytest.skip("openvino is not installed", allow_module_level=True)

ONE_THREAD = {"threads": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("openvino_models", tmp_path_factory.mktemp("openvino"))


@pytest.fixture(scope="module")
def device(shared_client: nnfmq.Client) -> nnfmq.Device:
    return shared_client.device("openvino")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("vision.xml", "vision"), ("transformer.xml", "transformer"), ("transformer.xml", "transformer1"),
        ("types.xml", "types"), ("found.xml", "found"), ("net.onnx", "onnx"),
    ],
)  # fmt: skip
def test_a_file_computes_what_openvino_does_bit_for_bit(
    device: nnfmq.Device, files: Path, name: str, case: str
) -> None:
    inputs, outputs = examples(files, case)
    with device.prepare(files / name, runtime_options=ONE_THREAD) as model:
        assert_equal(model.execute(*inputs), outputs)
        assert_equal(model.execute(*inputs), outputs)


@pytest.mark.parametrize("name", ["vision", "types"])
def test_a_burst_computes_the_same(device: nnfmq.Device, files: Path, name: str) -> None:
    inputs, outputs = examples(files, name)
    with device.prepare(files / f"{name}.xml", runtime_options=ONE_THREAD) as model, model.burst() as burst:
        burst.execute(*(np.zeros_like(array) for array in inputs))
        for _ in range(3):
            assert_equal(burst.execute(*inputs), outputs)


def test_bfloat16_crosses_as_words(device: nnfmq.Device, files: Path) -> None:
    with device.prepare(files / "half.xml") as model:
        assert model.execute(np.uint16([0x3F80, 0xBF80, 0, 0x4000]))[0].tolist() == [0x3F80, 0, 0, 0x4000]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("text", "input 'words' has elements of type string"),
        ("started", "the first value of variable 'memory' depends on inputs"),
        ("growing", "variable 'memory' has no first value, or not one size"),
    ],
)
def test_what_does_not_cross_is_refused_by_name(device: nnfmq.Device, files: Path, name: str, reason: str) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=reason):
        device.prepare(files / f"{name}.xml")


def test_variables_are_states_of_each_burst(device: nnfmq.Device, files: Path) -> None:
    with device.prepare(files / "stateful.xml") as model, model.burst() as first, model.burst() as second:
        for burst, sums in ((first, [6, 9]), (first, [7, 11]), (second, [6, 9]), (first, [8, 13])):
            assert burst.execute(np.float32([1, 2]))[0].tolist() == sums


def test_a_deadline_cancels_the_execution_and_the_worker_stays(shared_daemon: Daemon, files: Path) -> None:
    with shared_daemon.connect() as client:
        device = client.device("openvino")
        inputs, outputs = examples(files, "vision")
        with (
            device.prepare(files / "long.xml") as long,
            device.prepare(files / "vision.xml", runtime_options=ONE_THREAD) as short,
        ):
            with pytest.raises(nnfmq.MissedDeadline):
                long.execute(np.zeros((1200, 1200), np.float32), timeout=0.2)
            assert_equal(short.execute(*inputs), outputs)
            with pytest.raises(nnfmq.MissedDeadline):
                long.execute(np.zeros((1200, 1200), np.float32), timeout=0.2)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_execution_that_fails_has_no_results_of_an_earlier_one(
    device: nnfmq.Device, files: Path, threads: int
) -> None:
    x = np.ones(4, np.float32)
    with device.prepare(files / "reshaped.xml", runtime_options={"threads": threads}) as model:
        assert model.execute(x, np.array([2, 2]))[0].shape == (2, 2)
        with pytest.raises(nnfmq.GeneralFailure, match="conflicts with the reshape pattern"):
            model.execute(x, np.array([5, 5]))


def test_two_clients_of_a_daemon_run_the_same_file(shared_daemon: Daemon, files: Path) -> None:
    inputs, outputs = examples(files, "vision")
    with shared_daemon.connect() as a, shared_daemon.connect() as b:
        models = [
            client.device("openvino").prepare(files / "vision.xml", runtime_options=ONE_THREAD) for client in (a, b)
        ]
        for model in models:
            assert_equal(model.execute(*inputs), outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"CACHE_DIR": "/tmp"}}, "config 'CACHE_DIR': allowed are PERFORMANCE_HINT, "),
        ({"config": {"EXECUTION_MODE_HINT": ["x"]}}, "EXECUTION_MODE_HINT ..x.. is no string"),
        ({"config": "LATENCY"}, "'config' has settings by name, not 'LATENCY'"),
        ({"device": "NO_SUCH"}, "openvino: .*NO_SUCH"),
        ({"extension": "a.so"}, "runtime option 'extension': allowed are threads, device, config, custom_op_libraries"),
    ],
)
def test_an_option_that_is_not_allowed_is_refused(
    device: nnfmq.Device, files: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=f"(?s){message}"):
        device.prepare(files / "vision.xml", runtime_options=options)


def test_allowed_properties_reach_openvino(device: nnfmq.Device, files: Path) -> None:
    options = {"config": {"EXECUTION_MODE_HINT": "ACCURACY", "PERFORMANCE_HINT": "LATENCY"}}
    with device.prepare(files / "vision.xml", runtime_options=options) as model:
        assert model.execute(*examples(files, "vision")[0])[0].shape == (1, 5)
    options["config"]["EXECUTION_MODE_HINT"] = "NONSENSE"
    with pytest.raises(nnfmq.InvalidArgument, match="NONSENSE"):
        device.prepare(files / "vision.xml", runtime_options=options)


def test_a_truncated_file_and_missing_weights_get_openvino_s_own_text(
    device: nnfmq.Device, files: Path, tmp_path: Path
) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=r"(?s)openvino: .*weights"):
        device.prepare((files / "vision.xml").read_bytes())
    cut = tmp_path / "vision.xml"
    cut.write_bytes((files / "vision.xml").read_bytes()[:900])
    (tmp_path / "vision.bin").write_bytes((files / "vision.bin").read_bytes())
    with pytest.raises(nnfmq.InvalidArgument, match=r"openvino: "):
        device.prepare(cut)


@pytest.mark.parametrize("name", ["external.onnx", "external_in_branch.onnx"])
def test_external_data_cross_with_the_model(device: nnfmq.Device, files: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "pyproject.toml").write_bytes(np.float32([1, 2, 3]).tobytes())  # the name in the file
    (tmp_path / name).write_bytes((files / name).read_bytes())
    with device.prepare(tmp_path / name) as model:
        given = {"x": np.ones((2, 3), np.float32), "b": np.array(True)}
        found = model.execute(*(given[info.name] for info in model.inputs))
        assert_equal(found, [np.float32([[2, 3, 4], [2, 3, 4]])])


@pytest.mark.parametrize("name", ["external.onnx", "external_in_branch.onnx"])
def test_external_data_in_the_driver_s_folder_are_never_opened(
    device: nnfmq.Device, files: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("nnfmq.importers.hosted.companion_files", lambda *_: {})  # a client that gives no files
    with pytest.raises(nnfmq.InvalidArgument, match="which is not one of the files given"):
        device.prepare((files / name).read_bytes())


def test_a_burst_of_open_sizes_takes_those_of_each_request(device: nnfmq.Device, files: Path) -> None:
    cases = [examples(files, case) for case in ("transformer", "transformer1", "transformer")]
    path = files / "transformer.xml"
    with device.prepare(path, runtime_options=ONE_THREAD) as model, model.burst() as burst:
        for inputs, outputs in cases:
            assert_equal(burst.execute(*inputs), outputs)


def test_outputs_have_sizes_as_soon_as_those_of_the_inputs_are_known(device: nnfmq.Device, files: Path) -> None:
    inputs, outputs = examples(files, "transformer")
    path, shapes = files / "transformer.xml", {"tokens": inputs[0].shape}
    with device.prepare(path, shapes=shapes, runtime_options=ONE_THREAD) as model, model.burst() as burst:
        assert [output.shape for output in model.outputs] == [array.shape for array in outputs]
        assert_equal(burst.execute(*inputs), outputs)


def test_outputs_that_are_inputs_or_there_twice_are_right(device: nnfmq.Device) -> None:
    helper = pytest.importorskip("onnx.helper")
    x, y, z = (helper.make_tensor_value_info(name, 1, [2]) for name in "xyz")
    nodes = [helper.make_node("Dropout", ["x"], ["z"]), helper.make_node("Neg", ["x"], ["y"])]  # z is x
    for outputs, signs in (([x], [1]), ([z], [1]), ([y, y], [-1, -1]), ([y, x, z, y], [-1, 1, 1, -1])):
        graph = helper.make_graph(nodes, "outputs", [x], outputs)
        content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
        with device.prepare(content, runtime_options=ONE_THREAD) as model, model.burst() as burst:
            for value in np.float32([[1, 2], [3, 4]]):
                assert_equal(model.execute(value), [value * sign for sign in signs])
                assert_equal(burst.execute(value), [value * sign for sign in signs])


def test_floats_and_outputs_are_where_the_client_has_them(files: Path) -> None:
    given = {name: memoryview((files / name).read_bytes()) for name in ("vision.xml", "vision.bin")}
    inputs, outputs = examples(files, "vision")
    assert {array.dtype for array in (*inputs, *outputs)} == {np.dtype(np.float32)}
    own, found = [np.zeros_like(array) for array in inputs], [np.zeros_like(array) for array in outputs]
    run = OpenVinoDevice().open(HostedFile("openvino", given), OpenOptions()).bind(own, found)
    for array, values in zip(own, inputs, strict=True):
        array[...] = values
    assert run() is None
    assert_equal(found, outputs)


def test_the_package_that_reports_to_openvino_s_makers_is_not_imported() -> None:
    code = (
        "import sys\nfrom nnfmq.hosted.openvino import OpenVinoDevice\n"
        "from nnfmq.hosted.adapter import HostedFile, OpenOptions\n"
        "content = memoryview(sys.stdin.buffer.read())\n"
        "OpenVinoDevice().open(HostedFile('tflite', {'a.tflite': content}), OpenOptions())\n"
        "import openvino.tools.ovc\n"
        "print([name for name, module in sys.modules.items() if 'openvino_telemetry' in name and module])"
    )
    content = Path(nnfmq.example_path("digits.tflite")).read_bytes()
    found = subprocess.run([sys.executable, "-c", code], input=content, stdout=subprocess.PIPE, timeout=60, check=True)
    assert found.stdout.decode().strip() == "[]"


def test_a_tflite_file_runs(device: nnfmq.Device, shared_device: nnfmq.Device, data_dir: Path) -> None:
    path, shapes = data_dir / "models/micro/hello_world_float.tflite", {0: (3, 1)}
    x, options = np.float32([[0.5], [1], [3]]), {"config": {"INFERENCE_PRECISION_HINT": "f32"}}
    with (
        shared_device.prepare(path, shapes=shapes) as expected,
        device.prepare(path, shapes=shapes, runtime_options=options) as model,
    ):
        assert np.allclose(model.execute(x)[0], expected.execute(x)[0], atol=1e-5)


def test_what_openvino_saved_computes_the_same_without_the_file(files: Path) -> None:
    made("openvino_saved", files)
