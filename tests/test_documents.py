"""Every code block of every page runs, except those whose comment has a reason: see `support.page_blocks`.

What the blocks of a page need is made beforehand: files, and a driver if they do not start one.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from support.drivers import running_daemon, short_folder
from support.model_folders import RepositoryPeer
from support.page_blocks import EXTRAS, PageFolder, blocks, run_blocks, run_page
from support.places import ROOT
from support.ray_cluster import output_of_ray, ray_folder, require_ray

import nnfmq
from nnfmq.cli import command_parser
from nnfmq.hal import errors
from nnfmq.repository.version_import import read_options
from nnfmq.serialize.repository_protocol import ModelState

PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
GUIDES = [page for page in PAGES if page.parent.name in ("tutorial", "how-to")]
EXAMPLE_DATA = ROOT / "docs" / "examples" / "data"
_NOT_CODE = ("text", "toml", "ini", "json", "yaml", "c", "console", "diff", "promql")

_FACES = EXAMPLE_DATA / "face_detection_short_range.tflite"
_DIGITS = Path(nnfmq.example_path("digits.tflite"))
Setup = Callable[[PageFolder], AbstractContextManager[None]]


def copies(**sources: Path) -> Setup:
    """Return what copies files into the folder of a page. `__` in a name is a dot."""

    def copy(folder: PageFolder) -> AbstractContextManager[None]:
        for name, source in sources.items():
            shutil.copy(source, folder.path / name.replace("__", "."))
        return nullcontext()

    return copy


def add_model(folder: PageFolder, name: str, version: int, source: Path) -> None:
    """Add a version of a model to the page's ~/models."""
    directory = folder.path / "models" / name / str(version)
    directory.mkdir(parents=True)
    shutil.copy(source, directory / "model.tflite")


def versions_of_faces(folder: PageFolder) -> AbstractContextManager[None]:
    """Make ~/models with two versions of `faces`, and the file of a third."""
    for version in (1, 2):
        add_model(folder, "faces", version, _FACES)
    return copies(**{"faces-v3.tflite": _FACES})(folder)


def serving(name: str, source: Path) -> Setup:
    """Return what runs a driver that serves a model by name."""

    @contextmanager
    def driver(folder: PageFolder) -> Iterator[None]:
        add_model(folder, name, 1, source)
        with running_daemon(folder.socket, models=folder.path / "models"):
            with RepositoryPeer(folder.socket) as peer:
                peer.wait_for(name, state=ModelState.READY)
            yield

    return driver


@contextmanager
def driver_that_executes(folder: PageFolder) -> Iterator[None]:
    """Run a driver, one of whose clients executes a model again and again."""
    ended = Event()

    def execute() -> None:
        with nnfmq.connect(folder.socket) as client, client.prepare(_DIGITS) as model, model.burst() as burst:
            while not ended.wait(0.002):
                burst.execute(np.zeros(model.inputs[0].shape, np.float32))

    with running_daemon(folder.socket):
        thread = Thread(target=execute)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def serving_digits_to_triton_s_clients(folder: PageFolder) -> Iterator[None]:
    """Run a driver that serves the digits, where its page can serve them to others."""
    for package in ("uvicorn", "grpc", "tritonclient.grpc"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    with serving("digits", _DIGITS)(folder):
        yield


def onnx_classifier_and_photo(folder: PageFolder) -> AbstractContextManager[None]:
    """Make an ONNX file that classifies images of 8 × 8, and one such image."""
    onnx = pytest.importorskip("onnx", reason="ONNX is not installed")
    weights = onnx.numpy_helper.from_array(np.eye(64, 10, dtype=np.float32), "weights")
    nodes = [
        onnx.helper.make_node("Flatten", ["image"], ["flat"]),
        onnx.helper.make_node("MatMul", ["flat", "weights"], ["scores"]),
    ]
    image = onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1, 1, 8, 8])
    scores = onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, [1, 10])
    graph = onnx.helper.make_graph(nodes, "classifier", [image], [scores], [weights])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9),
        folder.path / "classifier.onnx",
    )
    np.save(folder.path / "photo.npy", np.zeros((1, 1, 8, 8), np.float32))
    return nullcontext()


def onnx_detector(folder: PageFolder) -> AbstractContextManager[None]:
    """Make an ONNX file with an operator that nnfmq's engine does not have."""
    onnx = pytest.importorskip("onnx", reason="ONNX is not installed")
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    make, kinds = onnx.helper.make_tensor_value_info, onnx.TensorProto
    nodes = [onnx.helper.make_node("NonMaxSuppression", ["boxes", "scores", "count"], ["found"])]
    inputs = [
        make("boxes", kinds.FLOAT, [1, 6, 4]),
        make("scores", kinds.FLOAT, [1, 2, 6]),
        make("count", kinds.INT64, []),
    ]
    graph = onnx.helper.make_graph(nodes, "detector", inputs, [make("found", kinds.INT64, [None, 3])])
    arrays = {"boxes": np.zeros((1, 6, 4), np.float32), "scores": np.zeros((1, 2, 6), np.float32), "count": np.int64(3)}
    for name, array in arrays.items():
        np.save(folder.path / f"{name}.npy", array)
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9),
        folder.path / "detector.onnx",
    )
    return nullcontext()


def tools(folder: PageFolder) -> AbstractContextManager[None]:
    """Show the page the folder `tools`, as in a source tree."""
    (folder.path / "tools").symlink_to(ROOT / "tools")
    return nullcontext()


def model_and_calibration_inputs(folder: PageFolder) -> AbstractContextManager[None]:
    """Make what the tool `quantize.py` needs."""
    with np.load(nnfmq.example_path("digits.npz")) as digits:
        np.savez(folder.path / "inputs.npz", image=digits["images"][:20, None, :, :, None].astype(np.float32) / 16)
    copies(model__tflite=_DIGITS)(folder)
    return tools(folder)


@contextmanager
def driver(folder: PageFolder) -> Iterator[None]:
    """Run a driver."""
    with running_daemon(folder.socket):
        yield


SETUPS: dict[str, Setup] = {
    "docs/how-to/containers.md": driver,
    "docs/how-to/hosted-runtimes.md": onnx_detector,
    "docs/how-to/models-by-name.md": serving("faces", _FACES),
    "docs/how-to/move-an-onnx-runtime-script.md": onnx_classifier_and_photo,
    "docs/how-to/quantize.md": model_and_calibration_inputs,
    "docs/how-to/serve-models.md": versions_of_faces,
    "docs/how-to/serve-with-ray.md": serving("digits", _DIGITS),
    "docs/how-to/set-up-your-shell.md": tools,
    "docs/how-to/trace.md": driver_that_executes,
    "docs/how-to/tune-latency.md": copies(mobilenet__tflite=_DIGITS, photo__jpg=EXAMPLE_DATA / "astronaut.jpg"),
    "docs/reference/inference-protocol.md": serving_digits_to_triton_s_clients,
    "docs/reference/model-formats.md": copies(voice__tflite=EXAMPLE_DATA / "voice.tflite"),
}


def uses_ray(page: Path) -> bool:
    return any("import ray\n" in block.code for block in run_blocks(blocks(page)))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if run_blocks(blocks(page)) and not uses_ray(page)], ids=name_of
)
def test_the_code_of_a_page_runs(page: Path) -> None:
    with short_folder() as path:
        folder = PageFolder(path)
        with SETUPS.get(name_of(page), lambda _: nullcontext())(folder):
            run_page(folder, run_blocks(blocks(page)))


@pytest.mark.parametrize("page", [page for page in PAGES if uses_ray(page)], ids=name_of)
def test_the_python_of_a_page_about_ray_runs(page: Path) -> None:
    """Ray warns of its own code, and leaves processes for a while."""
    require_ray()
    code = "\n".join(block.code for block in run_blocks(blocks(page)) if block.language == "python")
    with ray_folder() as folder:
        (folder / "ray").mkdir()
        script = folder / "page.py"
        script.write_text(code, encoding="utf-8")
        output_of_ray([sys.executable, str(script)], folder, limit_s=200)


MAY_NOT_RUN = (
    "minute", "hour", "Ray", "source tree", "man-db", "systemd", "podman", "an emulator", "MLTS's models",
    "a library of custom operators", "an account", "perf",
    "a checkout of Android's sources", "a file of docs/examples", "sysctl",
)  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_that_does_not_run_needs_what_a_test_does_not_have(page: Path) -> None:
    for block in blocks(page):
        if block.mark == "not run":
            assert block.language in ("sh", "python", "console"), block
            assert any(reason in block.text for reason in MAY_NOT_RUN), block.text


def commands_of(code: str) -> Iterator[list[str]]:
    """Yield the words of each `nnfmq` command of a shell block, without variables and redirections."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if words[:1] == ["nnfmq"]:
            yield list(itertools.takewhile(lambda word: word[0] not in "<>|&;", words[1:]))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_block_that_does_not_run_have_these_options(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.mark == "not run" and block.language in ("sh", "console"):
            for command, *arguments in commands_of(block.code):
                command_parser(command).parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_that_does_not_run_imports_what_there_is(page: Path) -> None:
    for block in blocks(page):
        if block.mark == "not run" and block.language == "python":
            for node in ast.walk(ast.parse(block.code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nnfmq":
                    module = importlib.import_module(node.module or "")
                    public = {
                        *dir(module),
                        *getattr(module, "__all__", ()),
                    }  # some import what they have when it is used
                    assert {name.name for name in node.names} <= public, block.code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_names_a_language_that_is_run_or_is_not_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    languages = set(re.findall(r"^```([\w-]+)$", text, re.MULTILINE))
    assert languages <= {"python", "sh", *_NOT_CODE}


@pytest.mark.parametrize("page", sorted(GUIDES), ids=name_of)
def test_the_commands_of_tutorials_and_guides_are_in_blocks(page: Path) -> None:
    """Commands that are only indented would not run; one has its output below it, which a test compares."""
    indented = re.findall(r"\n\n    (?:\$ )?((?:nnfmq|pip|python) .*)", page.read_text(encoding="utf-8"))
    assert set(indented) <= {"python ask_fibonacci.py 10"}


def test_the_examples_of_the_options_of_a_version_are_valid(tmp_path: Path) -> None:
    page = blocks(ROOT / "docs/reference/model-options.md")
    own, hosted = (block.code for block in page if block.language == "toml")
    (tmp_path / "model.toml").write_text(own, encoding="utf-8")
    options = read_options(tmp_path)
    assert (options.device, options.batch, options.shapes) == ("compiled", 8, {"image": (1, 224, 224, 3)})
    (tmp_path / "model.toml").write_text(hosted, encoding="utf-8")
    assert read_options(tmp_path).device == "onnxruntime"


def test_the_rows_of_tables_that_are_wider_than_a_page_are_not_broken() -> None:
    """A page has space for some ten columns of numbers."""
    tables = re.compile(r"^```\{csv-table\}[^\n]*\n:file: (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [
        (page.parent / name, ":class: figures" in options)
        for page in PAGES
        for name, options in tables.findall(page.read_text(encoding="utf-8"))
    ]
    assert len(found) >= 10
    for path, is_kept in found:
        assert is_kept == (path.read_text(encoding="utf-8").partition("\n")[0].count(",") >= 12), path


def test_extras_can_be_added_where_nnfmq_is_installed() -> None:
    """`pip install 'nnfmq[compiled]'` takes the extra from the installed package: no index has nnfmq."""
    pytest.importorskip("pip", reason="this environment has no pip")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-input", "nnfmq[compiled]"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Requirement already satisfied: llvmlite" in done.stdout


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_a_page_names_extras_that_exist(page: Path) -> None:
    named = re.findall(r"pip install [^`\n]*'(?:nnfmq|\.)\[([\w,]+)\]'", page.read_text(encoding="utf-8"))
    assert {extra for words in named for extra in words.split(",")} <= EXTRAS


def test_the_texts_of_the_code_name_extras_that_exist() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "nnfmq").rglob("*.py")]
    named = {
        extra
        for text in sources
        for words in re.findall(r"pip install 'nnfmq\[([\w,]+)\]'", text)
        for extra in words.split(",")
    }
    assert named and named <= EXTRAS


def test_the_page_of_tools_has_exactly_the_programs_and_their_parts() -> None:
    page = (ROOT / "docs/contributing/tools.md").read_text(encoding="utf-8")
    programs, parts = (
        set(re.findall(r"`([\w.]+)`", "\n".join(re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE))))
        for table in page.split("| part | content |")
    )
    paths = [path for path in (ROOT / "tools").iterdir() if path.name != "__pycache__"]
    run = {path.name for path in paths if path.is_dir() or '__name__ == "__main__"' in path.read_text(encoding="utf-8")}
    assert programs | parts == {path.name for path in paths}
    assert programs == run - {"chaos_program.py", "memory_client.py", "version_runner.py"}  # which other programs start


def test_the_page_of_the_api_has_every_public_name_that_is_no_error() -> None:
    page = (ROOT / "docs/reference/api/nnfmq.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\.\. auto\w+:: nnfmq\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted(set(nnfmq.__all__) - set(errors.__all__))
