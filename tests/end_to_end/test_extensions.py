"""A vendor's operation from end to end: a plug-in beside a driver, models that use it, synchronous and burst."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.control_flow_models import TRUTH, Parts, inputs, named, output
from support.drivers import LIMIT_S, Daemon, one, running_daemon, short_folder
from support.models import null_model
from support.places import ROOT
from support.plugins import (
    EXAMPLE,
    FLOAT_N,
    FLOATS,
    NAME,
    QUANTIZED,
    Fibonacci,
    add_fibonacci,
    add_plugin,
    path_with,
)
from support.small_models import F32, I32, one_operation

import nnfmq
from nnfmq.base.memory import Memory
from nnfmq.hal.extensions import NAME as BUILTIN
from nnfmq.hal.extensions import ExtensionCodes, extension_code
from nnfmq.hal.types import (
    DataLocation,
    ExecutionConfig,
    ExtensionNameAndPrefix,
    Model,
    Operand,
    Operation,
    OperationType,
    OutputShape,
    Request,
    RequestArgument,
    TokenValuePair,
)

DOCUMENT = (ROOT / "docs" / "how-to" / "write-an-operation.md").read_text()
NUMBERS = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]
CODES = [12, 12, 14, 16, 20, 26, 36, 52, 78, 120, 188, 298]  # of scale 0.5 and zero point 10

FAULTY_NAME = "com.example.faulty"
FAULTY = """
from nnfmq.operations.extensions import ExtensionType, VendorExtension, define_operation, define_type
from nnfmq.operations.declaration import F32, V1_2, Declaration, Variant, attribute, data, overload

class Surprise(Exception): pass

def surprised(*_, **__): raise Surprise("by a client's data")
def late(*_, **__): return surprised
def odd_shape(shape, n): return surprised() if n == 1 else shape

EXTENSION = VendorExtension("com.example.faulty", (), (
    Declaration(define_operation(0, "SHAPE"), V1_2, (overload(data("x"), attribute("n")),),
        (Variant({"T": F32}, V1_2, late),), odd_shape),
    Declaration(define_operation(1, "PLAN"), V1_2, (overload(data("x")),), (Variant({"T": F32}, V1_2, surprised),),
        lambda shape: shape),
))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two plug-ins, as pip would leave them."""
    folder = tmp_path_factory.mktemp("site")
    add_fibonacci(folder)
    add_plugin(folder, "faulty", FAULTY, {FAULTY_NAME: "faulty:EXTENSION"})
    return folder


@pytest.fixture(scope="module")
def extended(site: Path) -> Iterator[Daemon]:
    """Return a driver that finds them."""
    with short_folder() as made, running_daemon(made / "d.sock", environment=path_with(site)) as daemon:
        yield daemon


@pytest.fixture
def device(extended: Daemon) -> Iterator[nnfmq.Device]:
    """Return its device; after each test the same worker must execute a valid model."""
    with extended.connect() as client:
        device = client.device("reference")
        yield device
        with device.prepare(null_model()) as model:
            assert model.execute(one(4.5)) == (one(4.5),)


def rejection(device: nnfmq.Device, model: Model) -> nnfmq.NnfmqError:
    with pytest.raises(nnfmq.NnfmqError) as caught, device.prepare(model):
        pass
    return caught.value


# -- reported operations ----------------------------------------------------------------------------------------------


def test_DEV_5_EXT_1_a_device_lists_its_extensions_with_their_types(device: nnfmq.Device) -> None:
    faulty, fibonacci, _ = device.info.extensions
    types = [(kind.type, kind.is_tensor, kind.byte_size, kind.dtype) for kind in fibonacci.operand_types]
    assert (fibonacci.name, types) == (NAME, [(0, False, 8, "int64"), (1, True, 8, "int64")])
    assert (faulty.name, faulty.operand_types) == (FAULTY_NAME, ())


ONE_TYPE = """
from nnfmq.operations.extensions import ExtensionType, VendorExtension, define_type
EXTENSION = VendorExtension("com.example.one", (ExtensionType(define_type(0, "T"), "{dtype}"),), ())
"""


@pytest.mark.parametrize(("second", "offered"), [("int8", ["com.example.one"]), ("int16", [])])
def test_EXT_2_a_driver_offers_an_extension_only_if_all_plug_ins_agree_on_its_types(
    second: str, offered: list[str], folder: Path, tmp_path: Path
) -> None:
    for module, dtype in (("plugin_one", "int8"), ("plugin_two", second)):
        add_plugin(tmp_path, module, ONE_TYPE.format(dtype=dtype), {"com.example.one": f"{module}:EXTENSION"})
    with running_daemon(folder / "d.sock", environment=path_with(tmp_path)) as daemon, daemon.connect() as client:
        found = [one.name for one in client.device("reference").info.extensions]
        assert found == [*offered, BUILTIN]


def test_EXT_8_the_device_supports_the_operation(device: nnfmq.Device) -> None:
    assert device.supported_operations(Fibonacci().model()) == [True]


def test_EXT_8_an_operation_with_another_code_is_unsupported(device: nnfmq.Device) -> None:
    model = Fibonacci().model(operation=1)
    assert device.supported_operations(model) == [False]
    error = rejection(device, model)
    assert isinstance(error, nnfmq.GeneralFailure)
    assert "com.example.fibonacci.1" in str(error)


def test_EXT_5_VAL_5_a_driver_without_the_plug_in_reports_the_operation_as_unsupported(daemon: Daemon) -> None:
    with daemon.connect() as client:
        device = client.device("reference")
        assert [one.name for one in device.info.extensions] == [BUILTIN]
        assert device.supported_operations(Fibonacci().model()) == [False]
        error = rejection(device, Fibonacci().model())
        assert isinstance(error, nnfmq.GeneralFailure)
        assert f"has no type 0 of extension {NAME}" in str(error)
        error = rejection(device, Fibonacci().model(FLOAT_N, FLOATS))
        assert isinstance(error, nnfmq.GeneralFailure)
        assert f"does not support operation 0 ({NAME}.0)" in str(error)


# -- synchronous path -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_EXT_8_an_INT64_input_yields_quantized_values(device: nnfmq.Device, count: int) -> None:
    with device.prepare(Fibonacci().model()) as model:
        (codes,) = model.execute(np.int64(count))
        assert (codes.dtype, codes.tolist()) == (np.int64, CODES[:count])


def test_EXT_8_a_float_tensor_yields_floats(device: nnfmq.Device) -> None:
    with device.prepare(Fibonacci().model(FLOAT_N, FLOATS)) as model:
        (numbers,) = model.execute(np.float32([12]))
        assert (numbers.dtype, numbers.tolist()) == (np.float32, NUMBERS)


def test_EXT_8_an_INT64_yields_floats_and_a_float_tensor_quantized_values(device: nnfmq.Device) -> None:
    build = Fibonacci()
    with device.prepare(build.model(None, FLOATS)) as to_floats, device.prepare(build.model(FLOAT_N)) as to_codes:
        assert to_floats.execute(np.int64(4))[0].tolist() == NUMBERS[:4]
        assert to_codes.execute(np.float32([4]))[0].tolist() == CODES[:4]


def test_EXT_8_quantized_values_are_exact_in_64_bits(device: nnfmq.Device) -> None:
    build = Fibonacci()
    wide = build.codes(data=struct.pack("<dq", 1.0, 0))
    with device.prepare(build.model(output=wide)) as model:
        assert model.execute(np.int64(78))[0][-1] == 8944394323791464  # below 2^53: exact as a double, too
    with device.prepare(build.model(None, replace(wide, extension_data=struct.pack("<dq", 2.0, -7)))) as model:
        assert model.execute(np.int64(6))[0].tolist() == [-7, -7, -6, -5, -5, -3]  # halves go to the even one


def test_EXT_4_the_bytes_of_a_constant_model_are_read_when_it_is_prepared(device: nnfmq.Device) -> None:
    build = Fibonacci()
    with device.prepare(build.model(build.constant(5))) as model:
        assert model.execute()[0].tolist() == CODES[:5]


def test_MOD_15_each_model_has_its_own_prefixes(device: nnfmq.Device) -> None:
    numbers = ExtensionCodes()
    numbers.prefix("org.example.unknown")  # gets prefix 1, which is FIBONACCI's in other models
    first, second = Fibonacci(), Fibonacci(numbers)
    assert first.int64 != second.int64
    with device.prepare(first.model()) as one_model, device.prepare(second.model()) as other:
        assert one_model.execute(np.int64(3))[0].tolist() == other.execute(np.int64(3))[0].tolist() == CODES[:3]


def test_MOD_15_a_prefix_of_16_bits_is_accepted_over_hidl(extended: Daemon) -> None:
    code = extension_code(0xFFFF, 0, prefix_bits=16)
    model = Fibonacci().model(FLOAT_N, FLOATS)
    operation = replace(model.main.operations[0], type=OperationType(code))
    model = replace(model, main=replace(model.main, operations=(operation,)))
    model = replace(model, extensions=(ExtensionNameAndPrefix(NAME, 0xFFFF),))
    with (
        nnfmq.connect(extended.path, interface="HIDL 1.3") as client,
        client.device("reference").prepare(model) as prepared,
    ):
        assert prepared.execute(np.float32([3]))[0].tolist() == NUMBERS[:3]
    with extended.connect() as client, pytest.raises(nnfmq.InvalidArgument, match="N-VAL-12"):
        client.device("reference").prepare(model)


def test_MOD_15_an_operation_within_a_subgraph_is_the_extensions_too(device: nnfmq.Device) -> None:
    build, parts = Fibonacci(), Parts()
    n, codes = Operand(build.int64), build.codes((4,))
    fibonacci = Operation(build.numbers.operation_type(NAME, 0), (0,), (1,))
    graphs = [parts.add([*inputs(n), output(codes)], [fibonacci]) for _ in range(2)]
    operands = [*inputs(TRUTH), *map(named, graphs), *inputs(n), output(codes)]
    model = parts.model(operands, [Operation(OperationType.IF, (0, 1, 2, 3), (4,))])
    with device.prepare(replace(model, extensions=build.numbers.extensions)) as prepared:
        assert prepared.execute([True], np.int64(4))[0].tolist() == CODES[:4]


# -- bursts -----------------------------------------------------------------------------------------------------------


def test_EXT_8_a_burst_accepts_a_scalar_and_continues_after_a_rejection(device: nnfmq.Device) -> None:
    build = Fibonacci()
    with device.prepare(build.model(output=build.codes((5,)))) as model, model.burst() as burst:
        assert burst.execute(np.int64(5))[0].tolist() == CODES[:5]
        for wrong, said in ((0, r"n is 0, .*\(C1\)"), (6, r"the output has shape .*\(R4\)")):
            with pytest.raises(nnfmq.GeneralFailure, match=said):
                burst.execute(np.int64(wrong))
        assert burst.execute(np.int64(5))[0].tolist() == CODES[:5]


def test_EXT_8_a_burst_accepts_a_float_tensor(device: nnfmq.Device) -> None:
    with device.prepare(Fibonacci().model(FLOAT_N, replace(FLOATS, dimensions=(3,)))) as model, model.burst() as burst:
        assert burst.execute(np.float32([3]))[0].tolist() == NUMBERS[:3]


def test_EXT_8_a_burst_reports_the_output_shape(device: nnfmq.Device) -> None:
    with (
        device.prepare(Fibonacci().model()) as model,
        model.request_burst() as burst,
        Memory.create(8, "n") as source,
        Memory.create(64, "codes") as sink,
    ):
        request = Request((place(0, 8),), (place(1, 64),), (source, sink))
        for count in (3, 8):
            source.view[:8] = struct.pack("<q", count)
            assert burst.execute_request(request).shapes == (OutputShape((count,)),)
            assert np.frombuffer(sink.view, np.int64, count).tolist() == CODES[:count]
        source.view[:8] = struct.pack("<q", 9)
        with pytest.raises(nnfmq.OutputInsufficientSize) as caught:
            burst.execute_request(request)
        assert caught.value.output_shapes == (OutputShape((9,), False),)


def place(pool: int, length: int) -> RequestArgument:
    return RequestArgument(location=DataLocation(pool, 0, length))


@pytest.mark.parametrize("length", [4, 7, 9])
def test_EXT_8_a_scalar_of_another_size_is_rejected(device: nnfmq.Device, length: int) -> None:
    with (
        device.prepare(Fibonacci().model()) as model,
        Memory.create(64, "n") as source,
        Memory.create(64, "codes") as sink,
        pytest.raises(nnfmq.InvalidArgument, match="N-RQX-5"),
    ):
        model.execute_request(Request((place(0, length),), (place(1, 64),), (source, sink)))


# -- arguments that are wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1, 187, 2**62, -(2**63)])
def test_EXT_8_C1_an_n_out_of_range_fails_the_execution(device: nnfmq.Device, n: int) -> None:
    with device.prepare(Fibonacci().model()) as model:
        with pytest.raises(nnfmq.GeneralFailure, match=rf"{NAME}\.FIBONACCI\): n is {n}, .*\(C1\)$"):
            model.execute(np.int64(n))
        assert model.execute(np.int64(2))[0].tolist() == CODES[:2]


@pytest.mark.parametrize("n", [0.0, 2.5, np.nan, np.inf, -np.inf])
def test_EXT_8_C1_a_float_that_is_not_an_integer_fails_the_execution(device: nnfmq.Device, n: float) -> None:
    with (
        device.prepare(Fibonacci().model(FLOAT_N)) as model,
        pytest.raises(nnfmq.GeneralFailure, match=r"n is .*\(C1\)$"),
    ):
        model.execute(np.float32([n]))


def test_EXT_8_C1_a_constant_out_of_range_fails_the_preparation(device: nnfmq.Device) -> None:
    build = Fibonacci()
    error = rejection(device, build.model(build.constant(0)))
    assert isinstance(error, nnfmq.GeneralFailure)
    assert "n is 0" in str(error) and str(error).endswith("(C1)")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        QUANTIZED[:-1],
        QUANTIZED + b"\0",
        struct.pack("<dq", 0.0, 0),
        struct.pack("<dq", -1.0, 0),
        struct.pack("<dq", np.nan, 0),
        struct.pack("<dq", np.inf, 0),
    ],
    ids=["none", "15", "17", "scale 0", "negative", "nan", "inf"],
)
def test_EXT_4_EXT_8_C2_wrong_extension_bytes_fail_the_preparation(device: nnfmq.Device, data: bytes) -> None:
    build = Fibonacci()
    error = rejection(device, build.model(build.constant(3), build.codes(data=data)))
    assert isinstance(error, nnfmq.GeneralFailure)
    assert "(C2)" in str(error)


@pytest.mark.parametrize(("scale", "zero_point"), [(1e-300, 0), (5e-324, 0), (1.0, 2**63 - 1)])
def test_EXT_8_C3_a_value_beyond_64_bits_fails(device: nnfmq.Device, scale: float, zero_point: int) -> None:
    build = Fibonacci()
    error = rejection(device, build.model(build.constant(50), build.codes(data=struct.pack("<dq", scale, zero_point))))
    assert isinstance(error, nnfmq.GeneralFailure)
    assert "(C3)" in str(error)


def invalid_models() -> dict[str, tuple[str, Model]]:
    """Return models that the extension's plug-in rejects, each with the violated rule."""
    build = Fibonacci()
    int64, data = build.constant(3)
    codes = build.codes()
    return {
        "int32 as n": ("S2", build.model(Operand(I32, (1,)))),
        "codes as n": ("S2", build.model(replace(codes, dimensions=(1,)))),
        "two arguments": ("S1", with_inputs(build.model(), (0, 0))),
        "int32 as output": ("S4", build.model(output=Operand(I32, (0,)))),
        "a scalar as output": ("S4", build.model(output=int64)),
        "n has dimensions": ("N-MOD-3", build.model(replace(int64, dimensions=(1,)))),
        "n has 4 bytes": ("N-VAL-3", build.model((int64, data[:4]))),
        "codes too large": ("N-VAL-3", build.model(output=replace(codes, dimensions=(2**30,)))),
        "scale": ("N-VAL-10", build.model(output=replace(codes, scale=0.5))),
        "zero point": ("N-VAL-10", build.model(output=replace(codes, zero_point=1))),
        "bytes on a base type": ("N-VAL-10", build.model(output=replace(FLOATS, extension_data=b"\0"))),
        "no name": ("N-VAL-11", replace(build.model(FLOAT_N, FLOATS), extensions=())),
        "another prefix": ("N-VAL-11", replace(build.model(FLOAT_N, FLOATS), extensions=under(2))),
        "prefix 0": ("N-VAL-12", replace(build.model(FLOAT_N, FLOATS), extensions=under(1) + under(0))),
        "named twice": ("N-VAL-12", replace(build.model(FLOAT_N, FLOATS), extensions=under(1) + under(2))),
        "one prefix for two": (
            "N-VAL-12",
            replace(build.model(FLOAT_N, FLOATS), extensions=under(1) + under(1, "com.example.other")),
        ),
        "malformed name": ("N-VAL-12", replace(build.model(FLOAT_N, FLOATS), extensions=under(1, "Fibonacci"))),
    }


def under(prefix: int, name: str = NAME) -> tuple[ExtensionNameAndPrefix, ...]:
    return (ExtensionNameAndPrefix(name, prefix),)


def with_inputs(model: Model, indexes: tuple[int, ...]) -> Model:
    operation = replace(model.main.operations[0], inputs=indexes)
    return replace(model, main=replace(model.main, operations=(operation,)))


@pytest.mark.parametrize("what", invalid_models())
def test_VAL_5_N_VAL_10_11_12_the_plug_in_validates_its_extension_s_operands(device: nnfmq.Device, what: str) -> None:
    rule, model = invalid_models()[what]
    error = rejection(device, model)
    assert isinstance(error, nnfmq.InvalidArgument)
    assert f"({rule})" in str(error)


def test_N_VAL_11_a_client_cannot_use_the_driver_s_internal_prefixes(device: nnfmq.Device) -> None:
    """The driver gives its extensions prefixes from 1 up: a client that guesses them gets nothing."""
    model = Fibonacci().model(FLOAT_N, FLOATS)
    for prefix in (1, 2):
        guess = replace(model.main.operations[0], type=OperationType(extension_code(prefix, 0)))
        guessing = replace(model, main=replace(model.main, operations=(guess,)))
        error = rejection(device, replace(guessing, extensions=under(7)))
        assert isinstance(error, nnfmq.InvalidArgument)
        assert "N-VAL-11" in str(error)


@pytest.mark.parametrize("array", [np.int64([3]), np.int64([[3]]), np.int64([])])
def test_EXT_8_an_array_is_rejected_as_a_scalar(device: nnfmq.Device, array: Any) -> None:
    with (
        device.prepare(Fibonacci().model()) as model,
        pytest.raises(nnfmq.InvalidArgument, match="has shape scalar"),
    ):
        model.execute(array)


@pytest.mark.parametrize(("operation", "extra"), [(0, [1]), (0, [2]), (1, [])], ids=["shape", "run", "plan"])
def test_LIFE_8_any_exception_of_a_plug_in_is_a_general_failure(
    site: Path, monkeypatch: pytest.MonkeyPatch, operation: int, extra: list[int]
) -> None:
    monkeypatch.setenv("PYTHONPATH", path_with(site)["PYTHONPATH"])
    numbers = ExtensionCodes()
    code = numbers.operation_type(FAULTY_NAME, operation)
    model = one_operation(code, [Operand(F32, (1,)), *extra], Operand(F32, (1,)))
    model = replace(model, extensions=numbers.extensions)
    with nnfmq.connect(embedded=True) as client:
        device = client.device("reference")
        with (
            pytest.raises(nnfmq.GeneralFailure, match=r"the plug-in of com\.example\.faulty\.\w+ failed: Surprise"),
            device.prepare(model) as prepared,
        ):
            prepared.execute(one(1.0))
        with device.prepare(null_model()) as prepared:
            assert prepared.execute(one(4.5)) == (one(4.5),)


# -- which extensions a driver offers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "offered"),
    [([], []), ([NAME], [NAME]), ([FAULTY_NAME, NAME], [FAULTY_NAME, NAME])],
    ids=["none", "one", "both"],
)
def test_EXT_7_a_driver_offers_only_allowed_extensions(
    folder: Path, site: Path, words: list[str], offered: list[str]
) -> None:
    path = folder / "d.sock"
    command: list[str | Path] = ["-P", "-m", "nnfmq", "serve", "--socket", path, "--extensions", *words]
    with running_daemon(path, environment=path_with(site), arguments=command) as daemon, daemon.connect() as client:
        assert [extension.name for extension in client.devices()[0].extensions] == [*offered, BUILTIN]


@pytest.mark.parametrize(("allowed", "offered"), [(None, 3), ("", 1), (f" {NAME} ,", 2)])
def test_EXT_7_the_environment_configures_an_embedded_driver(
    site: Path, monkeypatch: pytest.MonkeyPatch, allowed: str | None, offered: int
) -> None:
    for name, value in path_with(site).items():
        monkeypatch.setenv(name, value)
    if allowed is not None:
        monkeypatch.setenv("NNFMQ_EXTENSIONS", allowed)
    with nnfmq.connect(embedded=True) as client:
        assert len(client.devices()[0].extensions) == offered


# -- the documents ----------------------------------------------------------------------------------------------------


def run(site: Path, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the example's folder, beside what is installed in `site`."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=EXAMPLE,
        env={**os.environ, **path_with(site), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S * 2,
        check=False,
    )


def test_EXT_3_EXT_8_the_documented_application_prints_the_documented_output(extended: Daemon, site: Path) -> None:
    done = run(site, "ask_fibonacci.py", "10", NNFMQ_SOCKET=str(extended.path))
    assert (done.stdout, done.stderr) == (" ".join(map(str, CODES[:10])) + "\n", "")
    assert f"    $ python ask_fibonacci.py 10\n    {done.stdout}" in DOCUMENT


def test_EXT_8_the_documented_tests_pass(site: Path) -> None:
    done = run(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", EXAMPLE, "test_fibonacci.py")
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


@pytest.mark.parametrize("name", ["nnfmq_fibonacci.py", "pyproject.toml", "ask_fibonacci.py", "test_fibonacci.py"])
def test_EXT_8_the_documents_contain_the_example_s_files(name: str) -> None:
    shown = re.findall(r"^```(?:python|toml)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert (EXAMPLE / name).read_text() in shown


def test_EXT_6_hints_are_those_of_extensions_that_the_device_supports(device: nnfmq.Device) -> None:
    """An unknown hint of a supported extension is ignored (PREP-10); one of another extension is rejected."""
    hints, prefix = (TokenValuePair(3 << 16 | 7, b"any"),), 3
    known, unknown = ((ExtensionNameAndPrefix(name, prefix),) for name in (NAME, "com.example.none"))
    refused = pytest.raises(nnfmq.InvalidArgument, match=r"'com\.example\.none', which device reference lacks")
    with refused:
        device.prepare(null_model(), hints=hints, extensions=unknown)
    with ExitStack() as stack:
        model = stack.enter_context(device.prepare(null_model(), hints=hints, extensions=known))
        burst, aidl_burst = stack.enter_context(model.request_burst()), stack.enter_context(model.aidl_burst())
        memory = stack.enter_context(Memory.create(128))
        source, sink = (RequestArgument(location=DataLocation(0, at, 4)) for at in (0, 64))
        request = Request((source,), (sink,), (memory,))
        modes: list[Callable[[ExecutionConfig], object]] = [
            lambda config: model.execute_request(request, config),
            lambda config: model.execute_request_async(request, config).result(LIMIT_S),
            lambda config: stack.enter_context(model.execute_request_fenced(request, config)).result(LIMIT_S),
            lambda config: stack.enter_context(model.create_reusable_request(request, config)).compute(),
            lambda config: burst.execute_request(request, config),
            lambda config: aidl_burst.execute_synchronously(request, config),
        ]
        for execute in modes:
            execute(ExecutionConfig(hints=hints, extensions=known))
            with refused:
                execute(ExecutionConfig(hints=hints, extensions=unknown))
