"""How `nnfmq.compat.onnxruntime` loads models, beside ONNX Runtime: initializers, providers, files, and errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drivers import Daemon, running_daemon, short_folder, wait_for_closers
from support.onnx_files import IR_VERSION, OPSET, file_of
from support.onnx_runtime import onnx, runtime
from support.ort_scripts import Script, answer, assert_same, outcome, session, symbolic_model

import nnfmq.compat.onnxruntime as ours
from nnfmq.compat.onnxruntime import providers as our_providers

NODE, INFO = onnx.helper.make_node, onnx.helper.make_tensor_value_info
X, W = np.float32([[1, 2, 3, 4]]), np.float32([[10, 20, 30, 40]])


@pytest.fixture(autouse=True)
def _use_daemon(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("NNFMQ_SOCKET", str(daemon.path))
    monkeypatch.chdir(tmp_path)
    yield
    wait_for_closers()


def default_model(*nodes: Any, ir_version: int = IR_VERSION, bias: Any = W) -> bytes:
    """Return a model of x and w, which has a default value; y = x + w unless there are other nodes."""
    inputs = [INFO(name, 1, array.shape) for name, array in (("x", X), ("w", bias))]
    made = nodes or (NODE("Add", ["x", "w"], ["y"]),)
    graph = onnx.helper.make_graph(
        made, "graph", inputs, [INFO("y", 1, None)], [onnx.numpy_helper.from_array(bias, "w")]
    )
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    content: bytes = onnx.helper.make_model(graph, ir_version=ir_version, opset_imports=opsets).SerializeToString()
    return content


# ----------------------------------------------------------------------------------------------------------------------
# Initializers that are inputs, too.


def overriding(**changed: Any) -> Script:
    return lambda ort: [
        made.run(None, {"x": X, **fed})[0] for made in [session(ort, default_model())] for fed in ({}, changed, {})
    ]


def _bound_default(ort: Any, name: str = "w") -> Any:
    made = session(ort, default_model())
    binding = made.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(X))
    binding.bind_output("y")
    made.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()


def _old(ort: Any) -> Any:
    made = session(ort, default_model(ir_version=3))
    return [len(made.get_overridable_initializers()), outcome(lambda _: made.run(None, {"x": X, "w": X}), ort)]


OVERRIDES: dict[str, Script] = {
    "their names": lambda ort: [
        [node.name, node.type, list(node.shape)]
        for node in session(ort, default_model()).get_overridable_initializers()
    ],
    "another value": overriding(w=X),
    "another shape": overriding(w=np.resize(X, (2, 4))),
    "another type": overriding(w=X.astype(np.int32)),
    "another name": overriding(q=X),
    "only another value": lambda ort: session(ort, default_model()).run(None, {"w": X}),
    "OrtValues": lambda ort: (
        session(ort, default_model())
        .run_with_ort_values(["y"], {name: ort.OrtValue.ortvalue_from_numpy(X) for name in "xw"})[0]
        .numpy()
    ),
    "a binding": _bound_default,
    "a binding of another name": lambda ort: _bound_default(ort, "q"),
    "a file of version 3": _old,
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_initializer_gets_another_value_as_with_onnx_runtime(name: str) -> None:
    assert_same(*(outcome(OVERRIDES[name], ort) for ort in (ours, runtime)))


def test_a_hosted_session_gives_an_initializer_another_value() -> None:
    content = default_model(NODE("Unique", ["w"], ["unique"]), NODE("Add", ["x", "unique"], ["y"]))
    made = {ort: session(ort, content) for ort in (ours, runtime)}
    for fed in ({"x": X}, {"x": X, "w": X}, {"x": X, "w": np.full((1, 4), 7, np.float32)}):
        assert_same(*(made[ort].run(None, fed) for ort in (ours, runtime)))
    ((names, variant),) = made[ours]._overriding.items()
    assert names == ("w",) and variant._hosted is not None


# ----------------------------------------------------------------------------------------------------------------------
# Execution providers.


def test_the_providers_are_those_of_onnx_runtime_in_the_driver() -> None:
    assert ours.get_available_providers() == runtime.get_available_providers()
    assert ours.get_all_providers() == runtime.get_all_providers()


def test_a_driver_that_hosts_no_onnx_runtime_has_the_cpu_s_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_folder() as folder, running_daemon(folder / "d.sock", options=["--runtimes", "litert"]) as bare:
        monkeypatch.setenv("NNFMQ_SOCKET", str(bare.path))
        assert ours.get_available_providers() == [our_providers.CPU]
        wait_for_closers()


def _made_with(*providers: Any, options: Any = None, has_fallback: bool = True) -> Script:
    """Return the session's providers, and what is warned of and printed, if these are given."""

    def run(ort: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()) as printed:
            warnings.simplefilter("always")
            made = ort.InferenceSession(
                symbolic_model(), None, list(providers), options, enable_fallback=int(has_fallback)
            )
        return [made.get_providers(), [str(warning.message) for warning in caught], printed.getvalue()]

    return run


def _in_options(name: str) -> Script:
    def run(ort: Any) -> Any:
        options = ort.SessionOptions()
        before = options.has_providers()
        options.add_provider(name, {})
        return [before, options.has_providers(), ort.InferenceSession(symbolic_model(), options).get_providers()]

    return run


def _with_providers(*providers: Any, options: Any = None) -> Script:
    def run(ort: Any) -> Any:
        made = session(ort)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made.set_providers(*([list(providers)] if providers else []), *([options] if options else []))
        texts = [str(warning.message) for warning in caught]
        feed = {"x": np.ones((1, 3, 2), np.float32), "s": np.array(2, np.float32)}
        return [made.get_providers(), sorted(made.get_provider_options().items()), texts, made.run(["z"], feed)]

    return run


CPU, CUDA, AZURE = (f"{name}ExecutionProvider" for name in ("CPU", "CUDA", "Azure"))
PROVIDERS: dict[str, Script] = {
    "none": _with_providers(),
    "the CPU's": _with_providers(CPU),
    "the CPU's with options": _with_providers((CPU, {"use_arena": 1})),
    "options beside it": _with_providers(CPU, options=[{"use_arena": "1"}]),
    "one twice": _with_providers(CPU, CPU),
    "one that is not there": _with_providers(CUDA, CPU),
    "one without operators of its own": _with_providers(AZURE, CPU),
    "options of another length": _with_providers(CPU, options=[{}, {}]),
    "a number": _with_providers(7),
    "a name of none": _with_providers("FooExecutionProvider"),
    "made with a name of none": _made_with("FooExecutionProvider", CPU),
    "made with a name of none alone": _made_with("cpu"),
    "made with a name of none, without fallback": _made_with("FooExecutionProvider", has_fallback=False),
    "made with one that is not there": _made_with(CUDA, CPU),
    "made with the CPU's": _made_with(CPU),
    "made with a number": _made_with(7),
    "made with options of another length": _made_with(CPU, options=[{}, {}]),
    "made with options of another length, without fallback": _made_with(CPU, options=[{}, {}], has_fallback=False),
    "added to the options": _in_options(CPU),
    "a name of none in the options": _in_options("FooExecutionProvider"),
}


@pytest.mark.parametrize("name", PROVIDERS)
def test_providers_are_set_as_with_onnx_runtime(name: str) -> None:
    assert_same(*(outcome(PROVIDERS[name], ort) for ort in (ours, runtime)))


def test_a_session_changes_to_an_accelerator_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = {"x": np.ones((1, 3, 2), np.float32), "s": np.array(2, np.float32)}
    made = session(ours)
    own = made.run(["z"], feed)
    with monkeypatch.context() as patched:  # nothing else here is one
        patched.setattr("nnfmq.compat.onnxruntime.hosting.is_accelerator", lambda provider: provider[0] != CPU)
        made.set_providers([AZURE, CPU])
        assert made._hosted is not None and made.get_providers() == [AZURE, CPU]
        assert_same(made.run(["z"], feed), own)
    made.set_providers([CPU])
    assert made._hosted is None
    assert_same(made.run(["z"], feed), own)


# ----------------------------------------------------------------------------------------------------------------------
# Models that are given as bytes, with tensors in other files.


WIDE = np.arange(1024, dtype=np.float32)[None]


def write_external(folder: Path, operator: str, place: str = "weights.bin") -> bytes:
    """Write the tensors of a model into a file, and return the model, which says that they are in `place`."""
    folder.mkdir()
    content = file_of([NODE(operator, ["w"], ["z"]), NODE("Add", ["x", "z"], ["y"])], {"x": WIDE}, ["y"], {"w": WIDE})
    model = onnx.ModelProto.FromString(content)
    onnx.save_model(model, folder / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    written = onnx.load(folder / "m.onnx", load_external_data=False)
    for entry in written.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = place
    found: bytes = written.SerializeToString()
    return found


def _external(content: bytes, folder: str = "") -> Script:
    def run(ort: Any) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        if folder:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        return ort.InferenceSession(content, options).run(None, {"x": WIDE})

    return run


@pytest.mark.parametrize("operator", ["Neg", "Unique"])  # nnfmq's engine has the first
def test_a_model_given_as_bytes_finds_its_tensors_where_onnx_runtime_does(
    tmp_path: Path, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = write_external(tmp_path / "data", operator)
    escaping = write_external(tmp_path / "other", operator, "../data/weights.bin")
    for script in (_external(content), _external(content, "none"), _external(escaping, "other"), _external(escaping)):
        kinds = [outcome(script, ort) for ort in (ours, runtime)]
        assert kinds[0] == kinds[1] and kinds[0][0] == "Fail"
    assert_same(*(_external(content, "data")(ort) for ort in (ours, runtime)))
    monkeypatch.chdir(tmp_path / "data")
    assert_same(*(_external(content)(ort) for ort in (ours, runtime)))


PLACES = {"another folder": "../other/weights.bin", "none": "none.bin", "nothing": "", "a folder": "sub"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operator", ["Neg", "Unique"])
def test_a_model_given_by_path_reads_tensors_of_its_own_folder_only(tmp_path: Path, operator: str, place: str) -> None:
    write_external(tmp_path / "other", operator)
    content = write_external(tmp_path / "data", operator, PLACES[place])
    (tmp_path / "data" / "sub").mkdir()
    for path in (tmp_path / "data" / "escaping.onnx", Path("data/escaping.onnx")):
        path.write_bytes(content)
        kinds = [outcome(lambda ort, path=path: ort.InferenceSession(path), ort) for ort in (ours, runtime)]
        assert kinds[0] == kinds[1] and kinds[0][0] == "Fail"
    absolute = write_external(tmp_path / "more", operator, str(tmp_path / "other" / "weights.bin"))
    (tmp_path / "more" / "absolute.onnx").write_bytes(absolute)
    kinds = [outcome(lambda ort: ort.InferenceSession("more/absolute.onnx"), ort) for ort in (ours, runtime)]
    assert kinds[0] == kinds[1] and kinds[0][0] == "Fail"


# ----------------------------------------------------------------------------------------------------------------------
# Initializers that the application gives in place of the file's.


def constant_model(operator: str = "Neg") -> bytes:
    """Return a model with y = z + w, z = -x (or another operator's result); w is a constant.

    A constant that only constants are computed with keeps its value in ONNX Runtime, which has folded it before.
    """
    return file_of([NODE(operator, ["x"], ["z"]), NODE("Add", ["z", "w"], ["y"])], {"x": W}, ["y"], {"w": W})


def given(name: str, array: Any, *, operator: str = "Neg", is_twice: bool = False) -> Script:
    def run(ort: Any) -> Any:
        options, value = ort.SessionOptions(), ort.OrtValue.ortvalue_from_numpy(array)
        for _ in range(1 + is_twice):
            options.add_initializer(name, value)
        return ort.InferenceSession(constant_model(operator), options).run(None, {"x": X})

    return run


def in_place_of_files(
    name: str, array: Any, place: str = "weights.bin", *, operator: str = "Neg", more: tuple[str, ...] = ()
) -> Script:
    """Return the result with a tensor in place of one that the file says is elsewhere."""

    def run(ort: Any) -> Any:
        content = write_external(Path(f"data-{ort.__name__}"), operator, place)
        options, value = ort.SessionOptions(), ort.OrtValue.ortvalue_from_numpy(array)
        options.add_external_initializers([name, *more], [value])
        return ort.InferenceSession(content, options).run(None, {"x": WIDE})

    return run


def in_memory(operator: str, *, length: int = WIDE.nbytes) -> Script:
    def run(ort: Any) -> Any:
        content = write_external(Path(f"data-{ort.__name__}"), operator)
        options, data = ort.SessionOptions(), (3 * WIDE).tobytes()
        options.add_external_initializers_from_files_in_memory(["weights.bin"], [data], [length])
        return ort.InferenceSession(content, options).run(None, {"x": WIDE})

    return run


def _not_external(ort: Any) -> Any:
    options, value = ort.SessionOptions(), ort.OrtValue.ortvalue_from_numpy(X)
    options.add_external_initializers(["w"], [value])
    return ort.InferenceSession(constant_model(), options)


INITIALIZERS: dict[str, Script] = {
    "another value": given("w", X),
    "another value on a hosted runtime": given("w", X, operator="Unique"),
    "another value twice": given("w", X, is_twice=True),
    "of no initializer": given("q", X),
    "an array": lambda ort: ort.SessionOptions().add_initializer("w", X),
    "in place of a file": in_place_of_files("w", 2 * WIDE),
    "in place of a file that is not there": in_place_of_files("w", 2 * WIDE, "none.bin"),
    "in place of a file on a hosted runtime": in_place_of_files("w", 2 * WIDE, "none.bin", operator="Unique"),
    "in place of no file": _not_external,
    "in place of a tensor that is not there": in_place_of_files("q", WIDE),
    "of another shape": in_place_of_files("w", WIDE[0]),
    "of another type": in_place_of_files("w", WIDE.astype(np.float64)),
    "names without tensors": in_place_of_files("w", WIDE, more=("v",)),
    "a file in memory": in_memory("Neg"),
    "a file in memory on a hosted runtime": in_memory("Unique"),
    "a file in memory that is too short": in_memory("Neg", length=8),
}


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers_are_replaced_as_with_onnx_runtime(name: str) -> None:
    assert_same(*(outcome(INITIALIZERS[name], ort) for ort in (ours, runtime)))


@pytest.mark.parametrize("array", [X[0], X.astype(np.float64)])
def test_an_initializer_of_another_shape_or_type_is_an_error(array: Any) -> None:
    """ONNX Runtime 1.32 computes with memory that it reads as if it had the file's."""
    with pytest.raises(ours.onnxruntime_pybind11_state.InvalidArgument, match=r"do(es)? not match"):
        given("w", array)(ours)


# ----------------------------------------------------------------------------------------------------------------------
# The file of the optimized model.


@pytest.mark.parametrize("operator", ["Neg", "Unique"])
def test_the_file_of_the_optimized_model_computes_the_same_without_other_files(
    tmp_path: Path, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_external(tmp_path / "data", operator)
    found = []
    for ort in (ours, runtime):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = f"{ort.__name__}.onnx"
        ort.InferenceSession("data/m.onnx", options)
        (tmp_path / ort.__name__).mkdir()
        monkeypatch.chdir(tmp_path / ort.__name__)
        found.append(runtime.InferenceSession(f"../{ort.__name__}.onnx").run(None, {"x": WIDE}))
        monkeypatch.chdir(tmp_path)
    assert_same(*found)


def _in_no_folder(ort: Any) -> Any:
    options = ort.SessionOptions()
    options.optimized_model_filepath = "none/optimized.onnx"
    return ort.InferenceSession(symbolic_model(), options)


def test_an_optimized_model_that_cannot_be_written_has_onnx_runtime_s_error() -> None:
    assert outcome(_in_no_folder, ours) == outcome(_in_no_folder, runtime)


# ----------------------------------------------------------------------------------------------------------------------
# Errors.


def model_of(*nodes: Any, opset: int = OPSET) -> bytes:
    graph = onnx.helper.make_graph(nodes, "g", [INFO("x", 1, [1, 4])], [INFO("y", 1, [1, 4])])
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("acme", 1)]
    content: bytes = onnx.helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets).SerializeToString()
    return content


def proto_of(**fields: Any) -> bytes:
    content: bytes = onnx.ModelProto(**fields).SerializeToString()
    return content


FILES = {
    "empty": b"",
    "a version alone": proto_of(ir_version=IR_VERSION),
    "a producer alone": proto_of(producer_name="someone"),
    "no graph": proto_of(ir_version=99, opset_import=[onnx.helper.make_opsetid("", OPSET)]),
    "zeros": bytes(4),
    "a TensorFlow Lite file": b"\x1c\0\0\0TFL3" + bytes(40),
    "complex numbers": file_of([NODE("Identity", ["x"], ["y"])], {"x": np.zeros(2, np.complex64)}, ["y"]),
    "text": b"garbage" * 100,
    "cut": symbolic_model()[:-20],
    "an unknown operator": model_of(NODE("Nonesuch", ["x"], ["y"])),
    "another domain": model_of(NODE("Double", ["x"], ["y"], domain="acme")),
    "a later opset": model_of(NODE("Neg", ["x"], ["y"]), opset=99),
    "no such tensor": model_of(NODE("Add", ["x", "none"], ["y"])),
    "a cycle": model_of(NODE("Add", ["x", "a"], ["b"]), NODE("Neg", ["b"], ["a"]), NODE("Neg", ["b"], ["y"])),
    "a wrong attribute": model_of(NODE("Softmax", ["x"], ["y"], axis=7)),
    "an unknown attribute": model_of(NODE("Softmax", ["x"], ["y"], extent=7)),
    "no such output": model_of(NODE("Neg", ["x"], ["z"])),
    "a later version of the format": default_model(ir_version=99),
    "two nodes with one output": model_of(NODE("Neg", ["x"], ["y"]), NODE("Abs", ["x"], ["y"])),
    "one node with one output twice": model_of(NODE("Split", ["x"], ["y", "y"], axis=1, num_outputs=2)),
    "an output that is an input": model_of(NODE("Neg", ["x"], ["x"]), NODE("Abs", ["x"], ["y"])),
    "an output that is a constant": default_model(NODE("Add", ["x", "w"], ["w"]), NODE("Neg", ["w"], ["y"])),
    "two nodes of one name": model_of(NODE("Neg", ["x"], ["a"], name="n"), NODE("Abs", ["a"], ["y"], name="n")),
    "an output of another type": model_of(NODE("Cast", ["x"], ["y"], to=7)),
}


@pytest.mark.parametrize("name", FILES)
def test_errors_at_load_have_onnx_runtime_s_class_and_text(name: str) -> None:
    Path("model.onnx").write_bytes(FILES[name])
    Path("sub").mkdir()
    Path("sub/m failed:.onnx").write_bytes(FILES[name])
    for given in (FILES[name], "./model.onnx", "sub/m failed:.onnx", Path("model.onnx")):
        texts = [answer(lambda ort=ort, given=given: ort.InferenceSession(given)) for ort in (ours, runtime)]
        assert texts[0].rstrip() == texts[1].rstrip(), given


def test_a_missing_file_has_onnx_runtime_s_text() -> None:
    assert answer(lambda: ours.InferenceSession("none.onnx")) == answer(lambda: runtime.InferenceSession("none.onnx"))
