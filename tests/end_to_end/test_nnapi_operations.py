"""Every operation through NNAPI's objects: the HAL's test models, built, compiled and executed in each mode."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
from support.drivers import Daemon
from support.nnapi_objects import MODES, UNFENCED, Mode
from support.rebuilt import rebuilt
from support.vts_models import one_of_each_type

import nnfmq
from nnfmq.hal.types import OperationType, OutputShape, is_scalar
from nnfmq.lab.conformance.criteria import compare_outputs
from nnfmq.lab.conformance.testmodels import TestModel, operation_types
from nnfmq.nnapi import CompilationBuilder, ExecutionBuilder
from nnfmq.nnapi.compilation import ChosenDevice


def has_known_shapes(test: TestModel) -> bool:
    """Return whether a fenced execution may compute the model (FEN-7)."""
    operands = [test.model.main.operands[index] for index in test.model.main.output_indexes]
    return all(is_scalar(operand.type) or (operand.dimensions and 0 not in operand.dimensions) for operand in operands)


def mismatches(test: TestModel, device: ChosenDevice, mode: Mode) -> list[str]:
    """Build, compile and execute a model; return what is wrong with its outputs."""
    with ExitStack() as stack:
        builder = stack.enter_context(rebuilt(test.model))
        compilation = stack.enter_context(CompilationBuilder(builder, [device]))
        compilation.finish()
        execution = stack.enter_context(ExecutionBuilder(compilation))
        for index, array in enumerate(test.inputs):
            execution.set_input(index, array)
        found = [np.zeros(max(expected.nbytes, 1), np.uint8) for expected in test.expected]
        for index, output in enumerate(found):
            execution.set_output(index, output)
        mode(execution, compilation)
        shapes = [OutputShape(dimensions_of(execution, index)) for index in range(len(found))]
        outputs = [typed(output, expected) for output, expected in zip(found, test.expected, strict=True)]
        return [f"{test.name}, {mode.__name__}: {mismatch}" for mismatch in compare_outputs(test, shapes, outputs)]


def dimensions_of(execution: ExecutionBuilder, index: int) -> tuple[int, ...]:
    return execution.get_output_operand_dimensions(index) if execution.get_output_operand_rank(index) else ()


def typed(output: npt.NDArray[np.uint8], expected: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the bytes of an output as elements of the expected array's type and shape."""
    return np.frombuffer(output, expected.dtype, expected.size).reshape(expected.shape)


def test_TST_2_every_operation_is_executed_in_each_mode(data_dir: Path, daemon: Daemon) -> None:
    tests, modes, wrong = one_of_each_type(), cycle(MODES), list[str]()
    with nnfmq.Runtime([daemon.path]) as runtime:
        device = runtime.device("reference")
        for test, mode in zip(tests, modes, strict=False):
            wrong += mismatches(test, device, mode if has_known_shapes(test) else UNFENCED[0])
    assert wrong == []
    covered = {type for test in tests for type in operation_types(test.line)}
    assert covered >= set(OperationType) - {OperationType.OEM_OPERATION}
