"""`nnfmq profile` for users: rows, figures, page, rejected arguments. Times are compared only with each other."""

from __future__ import annotations

import argparse
import io
import json
import math
import xml.etree.ElementTree as xml
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console
from support import commands
from support.control_flow_models import branching
from support.small_models import INPUT, OUTPUT, TEMPORARY, graph, one_operation, scalar

import nnfmq
from nnfmq.base.processes import allowed_cores
from nnfmq.cli import main, profile
from nnfmq.cli.profile_page import arena, colours_of
from nnfmq.cli.profile_report import computed_by, operations_table
from nnfmq.engines import profiling
from nnfmq.hal.tensor_info import TensorInfo, operand_info
from nnfmq.hal.types import Model, Operand, OperandType, Operation, OperationType
from nnfmq.importers import LoadedModel
from nnfmq.lab import roofline

F32, I32 = OperandType.TENSOR_FLOAT32, OperandType.TENSOR_INT32
DIGITS = nnfmq.example_path("digits.tflite")
DIGITS_QUANT = nnfmq.example_path("digits_quant.tflite")
OPERATIONS = ["CONV_2D", "MAX_POOL_2D", "CONV_2D", "MAX_POOL_2D", "FULLY_CONNECTED", "SOFTMAX"]
FIELDS = {
    *("number", "operation", "shapes", "arithmetic", "p50_ns", "min_ns", "share", "multiply_adds", "elements"),
    *("giga_operations_per_s", "share_of_peak", "share_of_bound", "bytes", "gigabytes_per_s"),
    *("computed_by", "fused_into", "threads", "kernels"),
}


@pytest.fixture(autouse=True)
def _peaks_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_LIMITS_NS", (0, 0))


def run(*words: object) -> int:
    return main(["profile", *map(str, words)])


def error(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def made(*words: object) -> dict[str, Any]:
        assert run(*words, "--runs", 3, "--json") == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return made


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model], None]:
    """Let every file hold a model."""

    def hold(model: Model) -> None:
        operands = model.main.operands
        inputs, outputs = (
            tuple(operand_info(operands[index], f"operand {index}") for index in indexes)
            for indexes in (model.main.input_indexes, model.main.output_indexes)
        )
        monkeypatch.setattr(
            nnfmq, "load", lambda path, shapes, signature: LoadedModel(model, inputs, outputs), raising=False
        )

    return hold


# -- what is in the report --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["compiled", "reference"])
@pytest.mark.parametrize("model", [DIGITS, DIGITS_QUANT], ids=["float32", "int8"])
def test_every_operation_has_a_row_with_all_fields(report: Any, model: Path, device: str) -> None:
    rows = report(model, "--device", device)["operations"]

    assert [row["operation"] for row in rows] == OPERATIONS
    assert [row["number"] for row in rows] == list(range(6))
    assert {frozenset(row) for row in rows} == {frozenset(FIELDS)}
    assert {row["computed_by"] for row in rows} == {"kernel" if device == "compiled" else "reference"}


def test_op_cost_follows_from_the_shapes(report: Any) -> None:
    first, pool = report(DIGITS)["operations"][:2]

    assert (first["multiply_adds"], first["elements"]) == (8 * 8 * 12 * 9, 8 * 8 * 12)
    assert first["bytes"] == 4 * (8 * 8 + 12 * 9 + 12 + 8 * 8 * 12)  # image, filters, biases, result
    assert (pool["multiply_adds"], pool["elements"], pool["bytes"]) == (None, 192, 4 * (768 + 192))
    assert (pool["giga_operations_per_s"], pool["share_of_peak"]) == (None, None)


def test_rates_are_those_of_p50_and_shares_of_the_sum(report: Any) -> None:
    found = report(DIGITS, "--device", "reference")
    total_ns = sum(row["p50_ns"] for row in found["operations"])

    for row in found["operations"]:
        assert row["share"] == pytest.approx(row["p50_ns"] / total_ns)
        assert row["gigabytes_per_s"] == pytest.approx(row["bytes"] / row["p50_ns"])
        assert row["min_ns"] > 0
        if row["multiply_adds"] is not None:
            rate = 2 * row["multiply_adds"] / row["p50_ns"]
            peak = found["ceilings"]["float32"]["all_threads"]
            assert (row["giga_operations_per_s"], row["share_of_peak"]) == pytest.approx((rate, rate / peak))
    assert math.fsum(row["share"] for row in found["operations"]) == pytest.approx(1)
    assert sum(one["p50_ns"] for one in found["types"]) == total_ns
    assert found["steps_ns"]["p50"] == total_ns + found["output_copy_ns"]["p50"]
    assert {one["operation"]: one["count"] for one in found["types"]}["CONV_2D"] == 2


def test_quantized_products_are_compared_with_the_8_bit_peak(report: Any) -> None:
    found = report(DIGITS_QUANT, "--device", "reference")
    row = found["operations"][0]

    assert row["arithmetic"] == "quantized"
    assert row["share_of_peak"] == pytest.approx(
        row["giga_operations_per_s"] / found["ceilings"]["quantized"]["all_threads"]
    )


def test_quantized_products_are_compared_with_a_bound_that_includes_their_outputs(report: Any, data_dir: Path) -> None:
    found = report(data_dir / "models" / "mobilenet_v1_0.25_128_quant.tflite")
    peaks = {name: ceiling["all_threads"] for name, ceiling in found["ceilings"].items()}
    products = [row for row in found["operations"] if row["operation"] in ("CONV_2D", "FULLY_CONNECTED")]

    for row in products:
        bound_ns = 2 * row["multiply_adds"] / peaks[row["arithmetic"]] + row["elements"] / peaks["outputs"]
        if row["share_of_bound"] is not None:  # else shorter than the overhead of timing
            assert row["share_of_bound"] == pytest.approx(bound_ns / row["p50_ns"])
    assert products[0]["share_of_bound"] is not None
    others = [row["share_of_bound"] for row in found["operations"] if row not in products]
    assert (len(products), set(others)) == (15, {None})
    assert {row["share_of_bound"] for row in report(DIGITS)["operations"]} == {None}, "float32 is not requantized"


def test_kernels_are_named_with_their_tiles_and_threads(report: Any) -> None:
    kernels = report(DIGITS)["operations"][0]["kernels"]

    assert [(kernel["kind"], len(kernel["tile"]), kernel["threads"]) for kernel in kernels] == [("GemmKernel", 2, 1)]
    assert kernels[0]["name"].startswith("GemmKernel_")


def test_the_arena_holds_every_value_and_is_smaller_than_their_sum(report: Any) -> None:
    (arena,) = report(DIGITS)["arenas"]

    assert [value["producer"] for value in arena["values"]] == OPERATIONS
    assert [value["bytes"] for value in arena["values"]] == [3072, 768, 1536, 384, 40, 40]
    assert arena["values_bytes"] == 5840 > arena["bytes"]
    assert [value["is_read_later"] for value in arena["values"]] == [False] * 5 + [True]
    assert arena["kernels"] == list(range(6))
    assert [(value["from_operation"], value["to_operation"]) for value in arena["values"]] == [
        *((n, n + 1) for n in range(5)),
        (5, 5),
    ]


def test_the_reference_has_no_arena(report: Any) -> None:
    found = report(DIGITS, "--device", "reference")

    assert (found["arenas"], found["threads"], found["target"] is not None) == ([], 1, True)


def test_with_one_thread_every_launch_uses_one(report: Any) -> None:
    found = report(DIGITS, "--threads", 1)

    assert (found["threads"], {row["threads"] for row in found["operations"]}) == (1, {1})
    assert all(peak["one_thread"] == peak["all_threads"] for peak in found["ceilings"].values())


def test_control_flow_is_one_row_without_work(given: Any, report: Any) -> None:
    given(branching())
    (row,) = report(DIGITS)["operations"]

    assert (row["operation"], row["computed_by"], row["multiply_adds"]) == ("IF", "reference", None)
    assert (row["elements"], row["shapes"]) == (2, [[2]])


def test_a_view_takes_no_time_and_moves_nothing(report: Any, data_dir: Path) -> None:
    found = report(data_dir / "models" / "mobilenet_v1_0.25_128_quant.tflite")
    row = next(row for row in found["operations"] if row["operation"] == "RESHAPE")

    assert (row["computed_by"], row["p50_ns"], row["bytes"], row["kernels"]) == ("view", 0, 0, [])
    assert sum(row["multiply_adds"] or 0 for row in found["operations"]) == pytest.approx(14e6, rel=0.05)


def test_a_fused_operation_names_the_one_whose_kernels_compute_it(report: Any, given: Any) -> None:
    value, (none, none_bytes) = Operand(F32, (64,)), scalar(0)
    operands = [replace(value, lifetime=INPUT), replace(value, lifetime=TEMPORARY), replace(value, lifetime=OUTPUT)]
    add = Operation(OperationType.ADD, (0, 0, 3), (1,))
    given(graph([*operands, none], [add, Operation(OperationType.RELU, (1,), (2,))], {3: none_bytes}))

    first, second = report(DIGITS)["operations"]

    assert (first["computed_by"], first["fused_into"]) == ("kernel", None)
    assert (second["computed_by"], second["fused_into"], second["kernels"]) == ("fused", 0, [])
    assert (second["p50_ns"], second["bytes"], second["multiply_adds"]) == (0, 0, None)
    assert computed_by(second) == "with operation 0"


def test_an_operation_whose_epilogue_waits_for_a_later_one_is_drawn_after_it(report: Any, given: Any) -> None:
    """The third operation's sum is computed by the first one's kernel, after the second one's."""
    value, (none, none_bytes) = Operand(F32, (1, 64)), scalar(0)
    weights, bias = Operand(F32, (64, 64)), Operand(F32, (64,))
    lifetimes = [INPUT, TEMPORARY, TEMPORARY, OUTPUT]
    operands = [*(replace(value, lifetime=one) for one in lifetimes), none, weights, bias, Operand(I32, (1,))]
    constants = {4: none_bytes, 5: bytes(4 * 64 * 64), 6: bytes(4 * 64), 7: np.int32([1]).tobytes()}
    operations = [
        Operation(OperationType.FULLY_CONNECTED, (0, 5, 6, 4), (1,)),
        Operation(OperationType.REVERSE, (0, 7), (2,)),
        Operation(OperationType.ADD, (1, 2, 4), (3,)),
    ]
    given(graph(operands, operations, constants))

    found = report(DIGITS)
    (arena,) = found["arenas"]

    assert [row["computed_by"] for row in found["operations"]] == ["kernel", "kernel", "fused"]
    assert arena["kernels"] == [1, 1]
    assert [(value["from_operation"], value["to_operation"]) for value in arena["values"]] == [(1, 1), (1, 1)]


def test_shapes_that_are_given_with_the_request_are_used(given: Any, report: Any, tmp_path: Path) -> None:
    given(one_operation(OperationType.RESHAPE, [Operand(F32, (6,)), Operand(I32, (2,))], Operand(F32, (0, 0))))
    np.save(tmp_path / "values.npy", np.arange(6, dtype=np.float32))
    np.save(tmp_path / "shape.npy", np.int32([3, 2]))

    words = ["--input", tmp_path / "values.npy", "--input", tmp_path / "shape.npy"]
    (row,) = report(DIGITS, *words)["operations"]

    assert (row["shapes"], row["elements"], row["computed_by"]) == ([[3, 2]], 6, "reference")


# -- inputs -----------------------------------------------------------------------------------------------------------


def test_random_inputs_depend_on_the_seed_and_have_each_input_s_type() -> None:
    tensors = [
        TensorInfo("image", (1, 4), "float32"),
        TensorInfo("codes", (500,), "int8", 0.5, 3),
        TensorInfo("indices", (3,), "int32"),
        TensorInfo("count", (), "int32", is_scalar=True),
    ]
    first, again, other = (profile.random_inputs(tensors, seed) for seed in (1, 1, 2))

    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    assert [(array.shape, array.dtype.name) for array in first] == [(t.shape, t.dtype) for t in tensors]
    assert np.abs(first[0]).max() <= 1
    assert first[1].min() < -100
    assert first[1].max() > 100
    assert [array.tolist() for array in first[2:]] == [[0, 0, 0], 0]


def test_inputs_can_be_files(report: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "image.npy", np.zeros((1, 8, 8, 1), np.float32))

    assert report(DIGITS, "--input", tmp_path / "image.npy")["inputs"] == [str(tmp_path / "image.npy")]
    assert report(DIGITS, "--seed", 7)["inputs"] == "random, seed 7"


# -- what is printed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_each_operation_is_one_line_within_the_terminal_s_width(
    columns: int, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(data_dir / "models" / "mobilenet_v1_0.25_128_quant.tflite", "--runs", 1) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [words for line in lines if len(words := line.split()) > 7 and words[0].isdigit() and words[1].isupper()]

    assert max(map(len, lines)) <= columns
    assert [row[0] for row in rows] == [str(number) for number in range(31)]
    assert rows[1][1] == "DEPTHWISE_CONV_2D"
    assert ("min µs" in lines[1]) == (columns == 120)
    assert not any(line.lstrip().startswith("V_2D") for line in lines)


def test_operations_can_be_sorted_by_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DIGITS, "--device", "reference", "--runs", 3, "--sort", "time") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    times = [float(row[2]) for row in rows if len(row) > 3 and row[1] in OPERATIONS]

    assert len(times) == 6
    assert times == sorted(times, reverse=True)


def test_the_report_has_conditions_peaks_and_the_whole_model_s_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DIGITS, "--threads", 1, "--runs", 2, "--arena") == 0
    text = " ".join(capsys.readouterr().out.split())

    assert "in this process, 1 thread, 2 runs; inputs: random, seed 0." in text
    assert "Whole model: " in text
    assert "Measured peaks, 1 thread: float32 " in text
    assert "Arena of operations 0 to 5: " in text
    assert "arena of operations 0 to 5 value producer offset bytes from to" in text


# -- the page ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Reads a page: which tags stay open, what it would load, the cells of its rows."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [tag for name, _ in attrs if name in ("src", "href")]
        self.open += [] if tag == "meta" else [tag]
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [tag for name, _ in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.rows[-1].append(data)


def drawings(content: str) -> list[xml.Element]:
    """Return the pictures, each of which must be well-formed by itself."""
    pieces = content.split("<svg ")[1:]
    return [xml.fromstring("<svg " + piece.split("</svg>")[0] + "</svg>") for piece in pieces]


def test_the_page_is_self_contained_and_has_every_operation(tmp_path: Path) -> None:
    assert run(DIGITS, "--runs", 2, "--html", tmp_path / "page.html") == 0
    content = (tmp_path / "page.html").read_text()
    page = Page(content)

    assert (page.open, page.loads, "http" in content, "<script" in content) == ([], [], False, False)
    assert [row[:2] for row in page.rows if row and row[0].isdigit()] == [[str(n), o] for n, o in enumerate(OPERATIONS)]


def test_what_is_wide_scrolls_by_itself_and_charts_keep_a_readable_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling.Timings, "p50_ns", property(lambda _: 1000))
    assert run(DIGITS, "--device", "compiled", "--runs", 2, "--html", tmp_path / "page.html") == 0
    content = (tmp_path / "page.html").read_text()
    body = content.split("</style>")[1]

    assert body.count('<svg viewBox="0 0 960 ') == body.count('<div class="scroll"><svg viewBox="0 0 960 ') == 2
    assert body.split("<h2>Operations</h2>")[1].lstrip().startswith('<div class="scroll"><table>')
    assert ".scroll { overflow-x: auto; }" in content and ".scroll svg { min-width: 50rem; }" in content


def test_the_page_draws_each_value_and_each_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what two runs take may be nothing more than timing nothing took, and is in no picture then
    monkeypatch.setattr(profiling.Timings, "p50_ns", property(lambda _: 1000))
    assert run(DIGITS, "--device", "compiled", "--runs", 2, "--html", tmp_path / "page.html") == 0
    pictures = drawings((tmp_path / "page.html").read_text())
    values = [picture for picture in pictures if "arena" in picture.get("aria-label", "")]
    roofs = [picture for picture in pictures if "roofline" in picture.get("aria-label", "")]

    assert [len(picture.findall("rect")) for picture in values] == [6]
    assert [len(picture.findall("circle")) for picture in roofs] == [3]
    assert [len(picture.findall("path[@class='roof']")) for picture in roofs] == [3]  # float32, memory, cache


@pytest.mark.parametrize(
    ("kernels", "left", "right"),  # the value is made by the third kernel and read last by the fourth
    [([10, 11, 12, 13, 19], 2, 4), ([10, 12, 12, 13, 13], 2.5, 3.5), ([12, 12, 12, 12, 19], 2.5, 3)],
    ids=["a kernel each", "two kernels each", "within one operation"],
)
def test_a_value_is_drawn_from_its_kernel_to_its_last_reader_at_its_offset(
    kernels: list[int], left: float, right: float
) -> None:
    value = {"operand": 7, "layout": "operand", "producer": "ADD", "bytes": 250, "offset": 500, "is_read_later": False}
    value |= {"from_operation": 12, "to_operation": kernels[3], "from_kernel": 2, "to_kernel": 3}
    one = {"first_operation": 10, "last_operation": 19, "bytes": 1000, "kernels": kernels, "values": [value]}
    (picture,) = drawings(arena(one, colours_of(["ADD"])))
    rect = picture.find("rect")
    assert rect is not None
    x, y, width, height = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
    floor, plot_height, column = 380 - 44, 380 - 12 - 44, (960 - 74 - 16) / 10

    assert (x, width) == pytest.approx((74 + left * column, (right - left) * column), abs=0.1)
    assert (floor - y - height, height) == pytest.approx((plot_height / 2, plot_height / 4), abs=0.11)


def test_a_name_with_markup_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "<b>.tflite"
    path.write_bytes(Path(DIGITS).read_bytes())
    assert run(path, "--runs", 1, "--html", tmp_path / "page.html") == 0
    content = (tmp_path / "page.html").read_text()

    assert "Profile: &lt;b&gt;.tflite" in content
    assert "<b>" not in content


# -- rejected arguments -----------------------------------------------------------------------------------------------


def test_without_llvmlite_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "_is_installed", lambda package: False)
    assert run(DIGITS) == 1
    assert error(capsys) == (
        "nnfmq: error: llvmlite is not installed; run pip install 'nnfmq[compiled]', or profile --device reference"
    )


def test_without_llvmlite_the_reference_has_no_peaks(
    monkeypatch: pytest.MonkeyPatch, report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "_is_installed", lambda package: False)
    found = report(DIGITS, "--device", "reference")
    assert run(DIGITS, "--device", "reference", "--runs", 1, "--html", tmp_path / "page.html") == 0

    assert (found["ceilings"], found["operations"][0]["share_of_peak"]) == (None, None)
    assert found["operations"][0]["giga_operations_per_s"] > 0
    assert "The machine's peaks were not measured" in capsys.readouterr().out
    assert "Roofline" not in (tmp_path / "page.html").read_text()


def test_more_threads_than_processors_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    available = allowed_cores()
    assert run(DIGITS, "--threads", available + 1) == 2
    assert error(capsys) == (
        f"nnfmq: error: --threads {available + 1}: this process may use {available} cores, so give 1 to {available}"
    )


def test_threads_of_the_reference_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DIGITS, "--device", "reference", "--threads", 1) == 2
    assert error(capsys) == (
        "nnfmq: error: --threads applies to the device compiled only; reference uses one thread: omit it"
    )


@pytest.mark.parametrize(
    "words", [["--runs", 0], ["--threads", 0], ["--device", "tpu"], ["--sort", "name"], ["--seed", "x"], ["--seed", -1]]
)
def test_invalid_options_are_wrong_usage(words: list[object]) -> None:
    assert run(DIGITS, *words) == 2


@pytest.mark.parametrize(("dimensions", "shown"), [((0, 3), "?x3"), ((), "unknown")])
def test_an_input_of_unknown_shape_is_rejected(
    dimensions: tuple[int, ...], shown: str, given: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given(one_operation(OperationType.RELU, [Operand(F32, dimensions)], Operand(F32, dimensions)))
    assert run("any.tflite") == 1
    assert f"the shape of input operand 0 is {shown}; measuring needs a known one" in error(capsys)


def test_a_file_that_is_not_a_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(b"no model")
    assert run(path) == 1
    assert str(path) in error(capsys)


def test_an_input_that_does_not_fit_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "image.npy", np.zeros((1, 9), np.float32))
    assert run(DIGITS, "--input", tmp_path / "image.npy") == 1
    assert "an array of 1x9 float32; the input needs 1x8x8x1 float32" in error(capsys)


def test_the_command_prints_one_json_object() -> None:
    with commands.started("profile", str(DIGITS_QUANT), "--runs", "5", "--json") as process:
        out, err = process.communicate(timeout=commands.LIMIT_S)
    found = json.loads(out)

    assert (process.returncode, err) == (0, b"")
    assert [row["operation"] for row in found["operations"]] == OPERATIONS
    assert found["where"] == "in this process"


def test_long_times_do_not_break_a_row() -> None:
    row = {
        **dict.fromkeys(("giga_operations_per_s", "gigabytes_per_s"), 123.4),
        **dict.fromkeys(("p50_ns", "min_ns"), 987_654_321),
        "number": 100,
        "operation": "DEPTHWISE_CONV_2D",
        "share": 1.0,
        "share_of_peak": 1.0,
        "share_of_bound": 1.0,
        "bytes": 10**9,
        "computed_by": "kernel",
        "threads": 16,
        "kernels": [{"kind": "DwConvKernel", "tile": [12, 1]}],
    }
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(operations_table({"operations": [row]}, "order", wide=False))
    (line,) = [line.split() for line in screen.export_text().splitlines() if "CONV" in line]

    assert line == [
        "100",
        "DEPTHWISE_CONV_2D",
        "987,654",
        "100.0",
        "%",
        "123",
        "100.0",
        "%",
        "123",
        "DwConv",
        "12×1",
    ]


def test_integers_of_64_bits_become_those_of_the_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_operation(OperationType.ABS, [Operand(I32, (2,))], Operand(I32, (2,)))
    x, y = (operand_info(operand, name) for operand, name in zip(model.main.operands, "xy", strict=True))
    output = np.zeros(2, np.int32)
    monkeypatch.setattr(profile, "_output", lambda *_: output)
    parser = argparse.ArgumentParser()
    parser.set_defaults(no_color=True)
    profile.add_arguments(parser)
    arguments = parser.parse_args(["x.tflite", "--device", "reference", "--runs", "1"])
    profile.profile_report(arguments, LoadedModel(model, (x,), (y,)), [np.int64([-3, 2])])
    assert output.tolist() == [3, 2]
