"""Extraction of Android's test models: the lines of a checkout whose generator has the interface of Android's."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnfmq.cli import main
from nnfmq.lab.conformance import testmodels
from nnfmq.lab.conformance.specifications import extract_all

HALFWAY = 1 + 2.0**-24  # as text 1.0000000596046448, which is above the middle of two floats

GENERATOR = """
class Type:
    def __init__(self, type, dimensions, scale=0.0, zeroPoint=0, extraParams=None):
        self.type, self.dimensions, self.scale, self.zeroPoint = type, dimensions, scale, zeroPoint
        self.extraParams = extraParams
    def IsBool(self):
        return self.type in ("BOOL", "TENSOR_BOOL8")

class Operand:
    def __init__(self, name, type, lifetime, value):
        self.name, self.type, self.lifetime, self.value, self.outs = name, type, lifetime, value, []

class IgnoredOutput(Operand):
    pass

class Operation:
    def __init__(self, optype, ins, outs):
        self.optype, self.ins, self.outs = optype, ins, outs
        for operand in ins:
            operand.outs.append(self)

class Model:
    name = version = None
    isRelaxed = False
    def __init__(self, operands, operations):
        self.operands, self.operations = operands, operations
        for index, operand in enumerate(operands):
            operand.model_index = index
    def GetInputs(self):
        return [operand for operand in self.operands if operand.lifetime == "SUBGRAPH_INPUT"]
    def GetOutputs(self):
        return [operand for operand in self.operands if operand.lifetime == "SUBGRAPH_OUTPUT"]
    def GetReferencedModels(self):
        return []

class Example:
    examples = []
    expectFailure, expectedMultinomialDistributionTolerance = False, 0
    def __init__(self, testName, model):
        self.testName, self.model = testName, model
        Example.examples.append(self)
    @staticmethod
    def DumpAllExamples(DumpExample, example_fd):
        for example in Example.examples:
            DumpExample(example, example_fd)

class FileNames:
    @staticmethod
    def InitializeFileLists(spec, example):
        assert spec.endswith(".mod.py")
    @staticmethod
    def NextFile():
        return True

def GetExecScope():
    return dict(globals())
"""

ADD = f"""
number = Type("TENSOR_FLOAT32", [2])
a = Operand("a", number, "SUBGRAPH_INPUT", [1.0, {HALFWAY!r}])
b = Operand("b", number, "CONSTANT_COPY", [0.1, -2])
none = Operand("act", Type("INT32", []), "CONSTANT_COPY", [0])
c = Operand("c", number, "SUBGRAPH_OUTPUT", [1.1, -1.0])
Example("add", Model([a, b, none, c], [Operation("ADD", [a, b, none], [c])]))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "NeuralNetworks"
    (root / "tools" / "test_generator").mkdir(parents=True)
    (root / "tools" / "test_generator" / "test_generator.py").write_text(GENERATOR)
    write(root, "V1_0/add", ADD)
    write(root, "experimental/other", ADD)
    return root


def write(checkout: Path, spec: str, text: str) -> None:
    path = checkout / "runtime" / "test" / "specs" / f"{spec}.mod.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def floats(operand: Any) -> Any:
    return np.frombuffer(base64.b64decode(operand["data"]), "<f4")


def test_a_specification_becomes_lines_with_the_values_of_the_generated_source(checkout: Path, tmp_path: Path) -> None:
    [outcome] = extract_all(checkout, tmp_path / "vts", jobs=2)
    assert (outcome.models, outcome.reason) == (1, "")
    [text] = gzip.decompress((tmp_path / "vts" / "V1_0" / "add.jsonl.gz").read_bytes()).decode().splitlines()
    line = json.loads(text)
    a, b, _, c = line["main"]["operands"]
    assert (line["name"], line["spec"], line["minSupportedVersion"]) == ("add", "V1_0/add", "UNKNOWN")
    assert floats(a).tolist() == [1.0, 1 + 2.0**-23]  # the text is rounded, not the float64
    assert floats(b).tolist() == [np.float32(0.1), -2.0]
    assert (a["numberOfConsumers"], c["numberOfConsumers"]) == (1, 0)
    assert line["main"]["operations"] == [{"type": "ADD", "inputs": [0, 1, 2], "outputs": [3]}]


def test_an_extracted_model_runs(checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vts"
    assert main(["conformance", "--extract", str(checkout), str(folder)]) == 0
    assert [path.name for path in testmodels.find_files([folder])] == ["add.jsonl.gz"]
    assert main(["conformance", str(folder)]) == 0


def test_a_specification_that_fails_is_named(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(checkout, "V1_1/broken", "raise ValueError('no such layer')")
    assert main(["conformance", "--extract", str(checkout), str(tmp_path / "vts")]) == 1
    output = capsys.readouterr()
    assert "broken.mod.py: ValueError: no such layer" in output.err
    assert output.out == f"test models: 1, from 1 of 2 specifications, in {tmp_path / 'vts'}\n"


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--extract", str(tmp_path), str(tmp_path / "vts")]) == 2
    assert "no checkout of Android's NeuralNetworks module" in capsys.readouterr().err


@pytest.mark.parametrize("paths", [[], ["a", "b"]])
def test_extraction_needs_one_folder(checkout: Path, paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--extract", str(checkout), *paths]) == 2
    assert "the folder that the test models are written to" in capsys.readouterr().err


def test_the_error_without_test_models_names_the_extraction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", str(tmp_path)]) == 2
    assert "--extract CHECKOUT PATH" in capsys.readouterr().err
    assert main(["conformance"]) == 2
    assert "--extract CHECKOUT PATH" in capsys.readouterr().err
