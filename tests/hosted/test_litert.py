"""The device `litert`: what a driver computes with LiteRT is, bit for bit, what LiteRT computes in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.drivers import Daemon, running_daemon, short_folder
from support.stateful_models import handle, moving, stream, streaming_window, two_rnns
from support.tflite_files import Operator, Tensor, writer

import nnfmq
from nnfmq.hal.hosted import call_of
from nnfmq.importers import hosted
from nnfmq.importers.file_format import read_source
from nnfmq.importers.hosted import read_hosted

litert: Any = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
Array = npt.NDArray[Any]
PLAIN = {"FusedActivationFunction": 0}
ONE_THREAD = {"threads": 1}


@pytest.fixture(scope="module")
def _daemon() -> Iterator[Daemon]:
    with short_folder() as made, running_daemon(made / "d.sock") as daemon:
        yield daemon


@pytest.fixture
def device(_daemon: Daemon) -> Iterator[nnfmq.Device]:
    with _daemon.connect(recover=False) as client:
        yield client.device("litert")


class InProcess:
    """A file in LiteRT in this process, with one thread and the shapes of the first inputs."""

    def __init__(self, content: bytes, **arguments: Any) -> None:
        self.interpreter = litert.Interpreter(model_content=content, num_threads=1, **arguments)
        self.shapes: list[Any] = []

    def __call__(self, *arrays: Array) -> list[Array]:
        interpreter, inputs = self.interpreter, self.interpreter.get_input_details()
        if self.shapes != [array.shape for array in arrays]:
            for detail, array in zip(inputs, arrays, strict=True):
                interpreter.resize_tensor_input(detail["index"], array.shape)
            interpreter.allocate_tensors()
            self.shapes = [array.shape for array in arrays]
        for detail, array in zip(inputs, arrays, strict=True):
            interpreter.set_tensor(detail["index"], array)
        interpreter.invoke()
        return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


def assert_same(found: Sequence[Array], expected: Sequence[Array]) -> None:
    """Check shapes, element types and bits."""
    assert len(found) == len(expected)
    for one, other in zip(found, map(np.asarray, expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.tobytes() == other.tobytes()


def random_array(shape: Sequence[int], dtype: str = "float32", seed: int = 1) -> Array:
    """Return numbers: in [0, 1] for floats, in [0, 127] for integers."""
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return random.uniform(0, 1, shape).astype(dtype)
    return random.integers(0, 128, shape).astype(dtype)


def random_inputs(model: nnfmq.PreparedModel, seed: int = 1) -> list[Array]:
    return [random_array(info.shape, info.dtype, seed) for info in model.inputs]


def one_operator(x: Any, y: Any, operator: Any, *more: Any) -> bytes:
    """Return a file whose operator reads tensor 0 and writes tensor 1."""
    data: bytes = writer.write([x, y, *more], [operator], (0,), (1,))
    return data


FILES = ["mobilenet_v1_0.25_128.tflite", "mobilenet_v1_0.25_128_quant.tflite"]


@pytest.mark.parametrize("name", ["digits.tflite", "digits_quant.tflite", *FILES])
def test_a_burst_returns_the_bits_that_litert_returns(device: nnfmq.Device, request: Any, name: str) -> None:
    shipped = name.startswith("digits")
    path = Path(nnfmq.example_path(name)) if shipped else request.getfixturevalue("data_dir") / "models" / name
    expected = InProcess(path.read_bytes())
    with device.prepare(path, runtime_options=ONE_THREAD) as model, model.burst() as burst:
        for seed in range(3):
            x = random_inputs(model, seed)
            assert_same(burst.execute(*x), expected(*x))
        assert_same(model.execute(*x), expected(*x))


def test_a_file_that_is_larger_than_an_operand_crosses_in_several(
    device: nnfmq.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Path(nnfmq.example_path("digits.tflite")).read_bytes()
    monkeypatch.setattr(hosted, "MAX_PART_BYTES", len(content) // 3)  # 4 GiB would take as much memory
    loaded = device.load(content, runtime_options=ONE_THREAD)
    (file,) = call_of(loaded.model).files
    assert (file.parts, len(loaded.model.pools)) == (4, 4)
    with device.prepare(loaded) as model:
        x = random_inputs(model)
        assert_same(model.execute(*x), InProcess(content)(*x))


@pytest.mark.deep
@pytest.mark.parametrize("size", [2**32 - 1, 2**32], ids=["one operand", "two operands"])
@pytest.mark.parametrize(
    ("limit_mib", "text"), [("1000", "limit is 1048576000"), ("15000", "litert: .*schema version 0")]
)
def test_a_file_of_4_GiB_is_refused_by_the_driver_s_limit_or_by_litert(
    size: int, limit_mib: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "large.tflite"
    with path.open("wb") as file:
        file.write(b"\x1c\0\0\0TFL3")
        file.truncate(size)
    with (
        short_folder() as folder,
        running_daemon(folder / "d.sock", environment={"NNFMQ_CLIENT_MEMORY_MIB": limit_mib}) as daemon,
        daemon.connect() as neighbour,
        daemon.connect(recover=False) as client,
        neighbour.device("litert").prepare(nnfmq.example_path("digits.tflite")) as model,
    ):
        with pytest.raises((nnfmq.InvalidArgument, nnfmq.ResourceExhausted), match=text):
            client.device("litert").prepare(path, timeout=300)
        assert_same(model.execute(*random_inputs(model)), model.execute(*random_inputs(model)))
        client.device("litert").prepare(nnfmq.example_path("digits.tflite")).close()


@pytest.mark.full
def test_every_file_of_the_data_gives_what_litert_gives(device: nnfmq.Device, data_dir: Path) -> None:
    for path in sorted((data_dir / "models").rglob("*.tflite")):
        try:
            expected = InProcess(path.read_bytes())
        except ValueError as refusal:  # a file with invalid quantization
            with pytest.raises(nnfmq.InvalidArgument, match=re.escape(f"litert: {refusal}"[:200])):
                device.prepare(path)
            continue
        with device.prepare(path, runtime_options=ONE_THREAD) as model:
            x = [random_array([size or 1 for size in info.shape], info.dtype) for info in model.inputs]
            assert_same(model.execute(*x), expected(*x))


def two_signatures() -> bytes:
    """Return a file whose second subgraph is x - y; the signature "minus" lists its inputs in another order."""
    tensors = [Tensor(name, (1, 2), "INT8", scales=(0.5,), zero_points=(3,)) for name in "xyz"]
    add, sub = (Operator(name, (0, 1), (2,), f"{name.title()}Options", PLAIN) for name in ("ADD", "SUB"))
    signatures = [
        writer.Signature("plus", {"x": 0, "y": 1}, {"sum": 2}, 0),
        writer.Signature("minus", {"second": 1, "first": 0}, {"difference": 2}, 1),
    ]
    second = writer.Subgraph(tensors, [sub], (0, 1), (2,))
    data: bytes = writer.write(tensors, [add], (0, 1), (2,), more=[second], signatures=signatures)
    return data


@pytest.mark.parametrize("key", [None, "plus", "minus"])
def test_inputs_and_outputs_are_those_of_the_importer_and_signatures_are_chosen(
    device: nnfmq.Device, key: str | None
) -> None:
    content, own = two_signatures(), nnfmq.load(two_signatures(), signature=key)
    runner = litert.Interpreter(model_content=content).get_signature_runner(key or "plus")
    with device.prepare(content, signature=key, runtime_options=ONE_THREAD) as model:
        assert (model.inputs, model.outputs) == (own.inputs, own.outputs)
        x = dict(zip([info.name for info in model.inputs], np.int8([[[4, -6]], [[9, 60]]]), strict=True))
        assert_same(model.execute(*x.values()), list(runner(**x).values()))


def test_a_signature_that_is_not_in_the_file_is_refused_with_those_that_are(device: nnfmq.Device) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=r"no signature 'times'; those of the file: 'plus', 'minus'"):
        device.prepare(two_signatures(), signature="times")


def softmax_rows() -> bytes:
    """Return a softmax over 3 values for any number of rows."""
    open_rows = {"shape": (1, 3), "signature": (-1, 3)}
    return one_operator(
        Tensor("x", **open_rows),
        Tensor("y", **open_rows),
        Operator("SOFTMAX", (0,), (1,), "SoftmaxOptions", {"Beta": 1.0}),
    )


def test_executions_of_one_model_with_different_shapes_do_not_mix(device: nnfmq.Device) -> None:
    expected, arrays = InProcess(softmax_rows()), [random_array((rows, 3)) for rows in (1, 5, 2)]
    with device.prepare(softmax_rows(), runtime_options=ONE_THREAD) as model:
        assert [info.shape for info in (*model.inputs, *model.outputs)] == [(0, 3), (0, 3)]
        for x in (*arrays, *arrays):
            assert_same(model.execute(x), expected(x))
        with model.burst() as one, model.burst() as other:
            for first, second in zip(arrays, (*arrays[1:], arrays[0]), strict=True):
                assert_same(one.execute(first), expected(first))
                assert_same(other.execute(second), expected(second))
        with pytest.raises(nnfmq.InvalidArgument, match="x"):
            model.execute(random_array((2, 4)))
        assert_same(model.execute(arrays[1]), expected(arrays[1]))


def test_sizes_that_are_chosen_decide_those_of_the_outputs(device: nnfmq.Device) -> None:
    expected, x = InProcess(softmax_rows()), random_array((4, 3))
    with device.prepare(softmax_rows(), shapes={"x": (4, 3)}, runtime_options=ONE_THREAD) as model:
        assert [info.shape for info in (*model.inputs, *model.outputs)] == [(4, 3), (4, 3)]
        with model.burst() as burst:
            assert_same(burst.execute(x), expected(x))


def test_sizes_that_the_file_states_are_changed_as_litert_changes_them(device: nnfmq.Device) -> None:
    path = Path(nnfmq.example_path("digits.tflite"))
    expected, x = InProcess(path.read_bytes()), random_array((3, 8, 8, 1))
    with device.prepare(path, shapes={"image": x.shape}, runtime_options=ONE_THREAD) as model, model.burst() as burst:
        assert_same(burst.execute(x), expected(x))
    source = read_hosted(read_source(path))
    device.load(source, shapes={"image": x.shape}, runtime_options=ONE_THREAD)
    with device.prepare(device.load(source, runtime_options=ONE_THREAD)) as model:  # finds the file open, with 3 images
        assert_same(model.execute(x[:1]), expected(x[:1]))


def matrix_product() -> bytes:
    """Return x @ x, for an x of any size."""
    sizes = {"shape": (1, 1), "signature": (-1, -1)}
    product = Operator("BATCH_MATMUL", (0, 0), (1,), "BatchMatMulOptions")
    return one_operator(Tensor("x", **sizes), Tensor("y", **sizes), product)


def test_sizes_that_an_operator_refuses_are_refused_with_its_text(device: nnfmq.Device) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=r"litert: inputs of \(2, 3\): .*failed to prepare"):
        device.prepare(matrix_product(), shapes={"x": (2, 3)})
    with device.prepare(matrix_product()) as model:
        with pytest.raises(nnfmq.InvalidArgument, match="failed to prepare"):
            model.execute(random_array((2, 3)))
        assert model.execute(np.eye(3, dtype=np.float32))[0].tolist() == np.eye(3).tolist()


@pytest.mark.parametrize("stated", [{"shape": (1, 1), "signature": (-1, 1)}, {"shape": (4, 1)}, {"shape": (0, 1)}])
def test_an_output_of_unknown_size_comes_in_its_size(device: nnfmq.Device, stated: Mapping[str, Any]) -> None:
    where = Operator("WHERE", (0,), (1,))
    content = one_operator(Tensor("x", (4,), "BOOL"), Tensor("y", type="INT64", **stated), where)
    expected = InProcess(content)
    with device.prepare(content, runtime_options=ONE_THREAD) as model:
        for x in np.bool_([[0, 0, 0, 1], [1, 0, 1, 1]]):
            assert_same(model.execute(x), expected(x))
            with model.burst() as burst:
                assert_same(burst.execute(x), expected(x))
                assert_same(burst.execute(~x), expected(~x))
        assert_same(model.execute(np.zeros(4, bool)), [np.zeros((0, 1), np.int64)])


KINDS = ["float16", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]


@pytest.mark.parametrize("kind", [*KINDS, "complex64"])
def test_elements_cross_as_they_are_also_of_rank_0_and_empty_tensors(device: nnfmq.Device, kind: str) -> None:
    for shape in ((2, 3), (), (0, 3)):
        x, y = (Tensor(name, shape, kind.upper()) for name in "xy")
        content = one_operator(x, y, Operator("RESHAPE", (0,), (1,), "ReshapeOptions", {"NewShape": list(shape)}))
        value = np.arange(-3, 3).astype(kind)[: int(np.prod(shape))].reshape(shape)
        with device.prepare(content) as model:
            assert (model.inputs[0].shape, model.inputs[0].dtype) == (shape, kind)
            assert_same(model.execute(value), [value])


@pytest.mark.parametrize("kind", ["STRING", "INT4", "BFLOAT16", "COMPLEX128", "RESOURCE", "VARIANT"])
def test_elements_that_do_not_cross_are_refused_with_the_tensor_s_name(device: nnfmq.Device, kind: str) -> None:
    x, y = (Tensor(name, (2,), kind) for name in ("sound", "words"))
    content = one_operator(x, y, Operator("RESHAPE", (0,), (1,), "ReshapeOptions", {"NewShape": [2]}))
    with pytest.raises(nnfmq.InvalidArgument, match=f"(?i)sound.*{kind}"):
        device.prepare(content)


def unset_variable() -> bytes:
    """Return a file of the resource variable v = v + x, which nothing initializes."""
    tensors = [Tensor("a", (), "RESOURCE"), *(Tensor(name, (2,), "INT32") for name in ("x", "old", "y"))]
    operators = [
        handle("a"),
        Operator("READ_VARIABLE", (0,), (2,)),
        Operator("ADD", (1, 2), (3,), "AddOptions", PLAIN),
        Operator("ASSIGN_VARIABLE", (0, 3), ()),
    ]
    data: bytes = writer.write(tensors, operators, (1,), (3,))
    return data


STATES = {
    "variable tensors": (two_rnns, ["early", "late"]),
    "variable tensors of different sizes": (stream, ["hidden", "window"]),
    "resource variables": (streaming_window, ["a", "b"]),
}


@pytest.mark.parametrize("case", STATES.values(), ids=STATES.keys())
def test_each_burst_has_states_of_its_own(device: nnfmq.Device, case: Any) -> None:
    make, names = case
    one, other = InProcess(make()), InProcess(make())
    with device.prepare(make(), runtime_options=ONE_THREAD) as model:
        assert [state.tensor.name for state in model.states] == names
        assert [state.tensor for state in model.states] == [state.tensor for state in nnfmq.load(make()).states]
        with model.burst() as first, model.burst() as second:
            for seed in range(4):
                x, z = random_inputs(model, seed), random_inputs(model, seed + 10)
                assert_same(first.execute(*x), one(*x))
                assert_same(second.execute(*z), other(*z))
                assert_same(first.execute(*z), one(*z))


def test_an_execution_moves_the_states(device: nnfmq.Device) -> None:
    resolver = "BUILTIN_WITHOUT_DEFAULT_DELEGATES"
    one = InProcess(moving(), experimental_op_resolver_type=litert.OpResolverType[resolver])
    options = {**ONE_THREAD, "experimental_op_resolver_type": resolver}
    with device.prepare(moving(), runtime_options=options) as model, model.burst() as burst:
        for seed in range(4):
            x, sizes = random_array((1, 2), seed=seed), np.int32([1, 2])
            assert_same(burst.execute(x, sizes), one(x, sizes))
            assert_same(burst.state, [one.interpreter.get_tensor(2)])


def test_a_state_begins_anew_and_is_set(device: nnfmq.Device) -> None:
    x, z = np.int32([3, 4]), np.int32([0, 0])
    with device.prepare(unset_variable()) as model, model.burst() as burst, model.burst() as other:
        assert [burst.execute(x)[0].tolist() for _ in range(2)] == [[3, 4], [6, 8]]
        other.state = burst.state
        burst.reset_state()
        assert [each.execute(z)[0].tolist() for each in (burst, other)] == [[0, 0], [6, 8]]


def custom() -> bytes:
    return one_operator(Tensor("x", (2,)), Tensor("y", (2,)), Operator("FlexErf", (0,), (1,), custom=b"\0"))


BAD = {
    "truncated": (
        lambda: Path(nnfmq.example_path("digits.tflite")).read_bytes()[:9000],
        "litert: The model is not a valid Flatbuffer",
    ),
    "a TensorFlow operator": (custom, "litert: .*Flex"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_what_litert_says_of_a_file_that_it_refuses_reaches_the_caller(device: nnfmq.Device, case: Any) -> None:
    make, text = case
    with device.prepare(nnfmq.example_path("digits.tflite")) as neighbour:
        with pytest.raises(nnfmq.InvalidArgument, match=text):
            device.prepare(make())
        assert neighbour.execute(*random_inputs(neighbour))[0].shape == (1, 10)


def test_options_of_the_interpreter_are_those_of_litert(device: nnfmq.Device, data_dir: Path) -> None:
    content = (data_dir / "models" / "mobilenet_v1_0.25_128.tflite").read_bytes()
    plain = InProcess(content, experimental_op_resolver_type=litert.OpResolverType.BUILTIN_REF)
    options = {"threads": 1, "experimental_op_resolver_type": "BUILTIN_REF"}
    with device.prepare(content, runtime_options=options) as model:
        x = random_inputs(model)
        assert_same(model.execute(*x), plain(*x))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"experimental_delegates": ["/tmp/delegate.so"]},
            "'experimental_delegates': allowed are threads, ",
        ),
        ({"experimental_op_resolver_type": "FAST"}, "'FAST': allowed are AUTO, BUILTIN, BUILTIN_REF"),
        ({"experimental_disable_delegate_clustering": 1}, "1: allowed are True, False"),
    ],
)
def test_other_options_are_refused(device: nnfmq.Device, options: Mapping[str, Any], text: str) -> None:
    with pytest.raises(nnfmq.InvalidArgument, match=text):
        device.prepare(nnfmq.example_path("digits.tflite"), runtime_options=options)


def test_a_count_that_data_decide_is_computed_by_nnfmq_or_the_import_chooses_litert(_daemon: Daemon) -> None:  # noqa: PT019
    """The file states 2 true elements. nnfmq's own engine finds any number; what reads them is LiteRT's."""
    values = np.float32([10, 11, 12, 13])
    tensors = [Tensor("x", (4,), "BOOL"), Tensor("values", (4,), data=values.tobytes()),
               Tensor("places", (2, 1), "INT64"), Tensor("y", (2,))]  # fmt: skip
    where, gather = Operator("WHERE", (0,), (2,)), Operator("GATHER_ND", (1, 2), (3,))
    for operators, output, chosen in (([where], 2, "compiled"), ([where, gather], 3, "litert")):
        content = writer.write(tensors, operators, (0,), (output,))
        expected = InProcess(content)
        with _daemon.connect() as client, client.prepare(content) as model, model.burst() as burst:
            assert model.device == chosen
            for x in np.bool_([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]]):
                for execute in (model.execute, burst.execute):
                    assert [each.tolist() for each in execute(x)] == [each.tolist() for each in expected(x)]
