"""States of a model: kept by each execution object of the client, whatever happens to executions and drivers.

The expected outputs are LiteRT's, step after step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.both_runners import Theirs
from support.drivers import Daemon, Process
from support.models import null_model
from support.stateful_models import stream, streaming_window

import nnfmq

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")

Array = npt.NDArray[Any]
STEPS = 50
INPUTS = np.random.default_rng(3).uniform(-1, 1, (STEPS, 1, 3)).astype(np.float32)
SOON_S = 0.02
CONTENT = stream()
INITIAL = [(1, 5), (1, 28)]  # the shapes of the states, which are 0 at first


@pytest.fixture(scope="module")
def expected() -> list[Array]:
    theirs = Theirs(CONTENT)
    return [theirs([x])[0] for x in INPUTS]


@pytest.fixture(params=["reference", "compiled"])
def model(client: nnfmq.Client, request: pytest.FixtureRequest) -> Iterator[nnfmq.PreparedModel]:
    if request.param == "compiled":
        pytest.importorskip("llvmlite", exc_type=ImportError)
    with client.device(request.param).prepare(nnfmq.load(CONTENT)) as prepared:
        yield prepared


@pytest.fixture(params=["execute", "burst", "reusable", "pool"])
def run(model: nnfmq.PreparedModel, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield an object with states and how to execute it."""
    with ExitStack() as stack:
        match request.param:
            case "execute":
                yield model, model.execute
            case "burst":
                burst = stack.enter_context(model.burst())
                yield burst, burst.execute
            case "reusable":
                execution = stack.enter_context(model.create_reusable_execution())
                yield execution, execution.compute
            case _:
                pool = stack.enter_context(model.burst_pool(1))
                loan = stack.enter_context(pool.acquire())
                yield loan, loan.execute


def steps(execute: Callable[..., tuple[Array, ...]], begin: int = 0, end: int = STEPS) -> list[Array]:
    return [execute(x)[0] for x in INPUTS[begin:end]]


def assert_close(found: list[Array], theirs: list[Array]) -> None:
    limit = 1e-5 * max(np.abs(array).max() for array in theirs)
    np.testing.assert_allclose(found, theirs, rtol=0, atol=limit)


def is_initial(state: tuple[Array, ...]) -> bool:
    return [array.shape for array in state] == INITIAL and not any(array.any() for array in state)


def test_a_stream_gives_the_results_of_litert_step_after_step(run: Any, expected: list[Array]) -> None:
    holder, execute = run
    assert is_initial(holder.state)
    assert_close(steps(execute), expected)


def test_a_reset_begins_the_stream_again(run: Any, expected: list[Array]) -> None:
    holder, execute = run
    steps(execute, 0, 5)
    assert not is_initial(holder.state)
    holder.reset_state()
    assert is_initial(holder.state)
    assert_close(steps(execute, 0, 5), expected[:5])


def test_a_state_that_was_read_can_be_set_later(run: Any, expected: list[Array]) -> None:
    holder, execute = run
    steps(execute, 0, 5)
    read = holder.state
    steps(execute, 0, 3)
    holder.state = read
    assert all(np.array_equal(one, two) for one, two in zip(holder.state, read, strict=True))
    assert_close(steps(execute, 5, 9), expected[5:9])


@pytest.mark.parametrize("timeout", [SOON_S, 0])
def test_an_execution_that_misses_its_deadline_changes_no_state(
    client: nnfmq.Client, run: Any, expected: list[Array], timeout: float
) -> None:
    _, execute = run
    steps(execute, 0, 3)
    with Process(client.worker_pid) as worker, worker.stopped(), pytest.raises(nnfmq.MissedDeadline):
        execute(INPUTS[7], timeout=timeout)
    for attempt in range(1000):  # a reusable execution is rejected while the abandoned one runs
        try:
            fourth = execute(INPUTS[3])[0]
            break
        except nnfmq.NnfmqError:
            assert attempt < 999
    assert_close([fourth, *steps(execute, 4, 6)], expected[3:6])


def test_an_execution_with_invalid_inputs_changes_no_state(run: Any, expected: list[Array]) -> None:
    _, execute = run
    steps(execute, 0, 3)
    for wrong in ((), (INPUTS[0],) * 3, (np.zeros((2, 3), np.float32),)):
        if wrong:
            with pytest.raises(nnfmq.InvalidArgument):
                execute(*wrong)
    assert_close(steps(execute, 3, 6), expected[3:6])


def test_a_stream_goes_on_in_another_driver_after_the_first_has_died(
    client: nnfmq.Client, run: Any, expected: list[Array], daemon: Daemon
) -> None:
    holder, execute = run
    steps(execute, 0, 5)
    with Process(client.worker_pid) as worker:
        worker.kill()
        worker.wait_for_end()
    with pytest.raises(nnfmq.DeadObject):
        execute(INPUTS[5])
    with (
        daemon.connect() as again,
        again.device("reference").prepare(nnfmq.load(CONTENT)) as model,
        model.burst() as burst,
    ):
        burst.state = holder.state
        assert_close(steps(burst.execute, 5, 12), expected[5:12])


def test_outputs_can_be_read_in_place(model: nnfmq.PreparedModel, expected: list[Array]) -> None:
    with model.burst() as burst:
        assert ([a.shape for a in burst.inputs], [a.shape for a in burst.outputs]) == ([(1, 3)], [(1, 2)])
        for x, theirs in zip(INPUTS, expected, strict=True):
            burst.inputs[0][...] = x
            (found,) = burst.execute(out=burst.outputs)
            assert_close([found], [theirs])
        out = np.zeros((1, 2), np.float32)
        burst.reset_state()
        assert burst.execute(INPUTS[0], out=[out]) == (out,)
        assert_close([out], expected[:1])
    assert not is_initial(burst.state)  # it can still be read


def test_clients_bursts_and_executions_of_one_program_share_no_state(daemon: Daemon, expected: list[Array]) -> None:
    """The second client finds the first one's program, in memory that both workers map."""
    with ExitStack() as stack:
        executes = []
        for _ in range(2):
            client = stack.enter_context(daemon.connect())
            model = stack.enter_context(client.prepare(nnfmq.load(CONTENT), preference="sustained_speed"))
            executes += [stack.enter_context(model.burst()).execute for _ in range(2)]
            executes += [stack.enter_context(model.create_reusable_execution()).compute, model.execute]
        found: list[list[Array]] = [[] for _ in executes]
        for turn in range(STEPS + len(executes)):  # each is one step behind the one before it
            for number, execute in enumerate(executes):
                if 0 <= turn - number < STEPS:
                    found[number] += execute(INPUTS[turn - number])
        for results in found:
            assert_close(results, expected)


def test_a_borrowed_burst_begins_with_the_initial_states(model: nnfmq.PreparedModel, expected: list[Array]) -> None:
    with model.burst_pool(1) as pool:
        for _ in range(2):
            with pool.acquire() as burst:
                assert_close(steps(burst.execute, 0, 4), expected[:4])
        assert_close([pool.execute(INPUTS[0])[0]], expected[:1])


def test_executions_that_end_later_are_rejected(model: nnfmq.PreparedModel) -> None:
    for start in (model.execute_async, model.execute_fenced):
        with pytest.raises(nnfmq.InvalidArgument, match=r"the model has 2 states.*call execute\(\)"):
            start(INPUTS[0])
    with (
        model.create_reusable_execution() as execution,
        pytest.raises(nnfmq.InvalidArgument, match=r"call compute\(\)"),
    ):
        execution.compute_fenced(INPUTS[0])


def test_states_of_other_shapes_are_rejected(model: nnfmq.PreparedModel) -> None:
    with model.burst() as burst:
        for wrong in ([], [np.zeros(5, np.float32)], [np.zeros((1, 5), np.float32), np.zeros((1, 5), np.float32)]):
            with pytest.raises(nnfmq.InvalidArgument):
                burst.state = wrong
        assert is_initial(burst.state)


def test_a_model_without_states_takes_none(client: nnfmq.Client) -> None:
    with client.device("reference").prepare(null_model()) as model, model.burst() as burst:
        burst.state = []
        with pytest.raises(nnfmq.InvalidArgument, match="the model has no states; 1 were given"):
            burst.state = [np.zeros(1, np.float32)]
        assert burst.state == ()


def test_states_are_set_by_name_and_errors_name_them(model: nnfmq.PreparedModel) -> None:
    names = [state.tensor.name for state in model.states]
    values = [np.full(shape, 0.5, np.float32) for shape in INITIAL]
    with model.burst() as burst:
        burst.state = dict(zip(names, values, strict=True))
        assert all(np.array_equal(one, two) for one, two in zip(burst.state, values, strict=True))
        for wrong, text in (
            ({}, r"of the model's 2 states .* are missing"),
            ({"x": values[0]}, r"no state is called 'x'"),
            (values[:1], r"the model has 2 states \(.*\); 1 was given"),
            ([*values[:1], np.zeros(7, np.float32)], f"state {names[1]!r} has shape .*; the given array has 7$"),
        ):
            with pytest.raises(nnfmq.InvalidArgument, match=text):
                burst.state = wrong


@pytest.mark.parametrize("device", ["reference", "compiled"])
def test_resource_variables_give_litert_s_results_step_after_step(client: nnfmq.Client, device: str) -> None:
    if device == "compiled":
        pytest.importorskip("llvmlite", exc_type=ImportError)
    theirs, random = Theirs(streaming_window()), np.random.default_rng(1)
    with client.device(device).prepare(nnfmq.load(streaming_window())) as model, model.burst() as burst:
        for _ in range(STEPS):
            x = random.integers(-128, 127, (1, 1, 3)).astype(np.int8)
            np.testing.assert_array_equal(burst.execute(x), theirs([x]))
        burst.reset_state()
        window, count = burst.state
        assert (window == 2).all()
        assert count == 10


def test_a_model_without_states_has_an_empty_state(client: nnfmq.Client) -> None:
    with client.prepare(nnfmq.load(nnfmq.example_path("digits.tflite"))) as model:
        assert (model.states, model.state) == ((), ())
        model.reset_state()
        with pytest.raises(nnfmq.InvalidArgument, match="no states; 1 were given"):
            model.state = [np.zeros(1)]


def test_the_hal_s_model_is_a_function_of_its_states(client: nnfmq.Client, expected: list[Array]) -> None:
    loaded = nnfmq.load(CONTENT)
    with client.device("reference").prepare(loaded.model) as model:
        state = [np.zeros(shape, np.float32) for shape in INITIAL]
        for x, theirs in zip(INPUTS[:5], expected, strict=False):
            found, *state = model.execute(x, *state)
            assert_close([found], [theirs])
