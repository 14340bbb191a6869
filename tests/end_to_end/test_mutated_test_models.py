"""Mutated models and requests through a worker: after each of them the same worker executes a valid one.

The daemon's fixture checks that they leak nothing and cause no internal error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from support.drivers import LIMIT_S, Daemon, one
from support.fuzzing import corpus
from support.fuzzing.driver_level import decode, through_process
from support.models import null_model
from support.mutated_test_models import MutatedTest, mutated_tests
from support.tiers import IS_DEEP

from nnfmq.hal.errors import ErrorStatus
from nnfmq.operations import HAL_DECLARATIONS

EXAMPLES = 2000 if IS_DEEP else 60


@contextmanager
def same_worker(daemon: Daemon) -> Iterator[Callable[[MutatedTest], ErrorStatus]]:
    """Yield a function that runs a mutated test, and then a valid model, on one worker, which lives in the end."""
    with daemon.connect() as client, client.device("reference").prepare(null_model()) as good:
        device, worker = client.device("reference"), client.worker_pid

        def run(test: MutatedTest) -> ErrorStatus:
            status = through_process(test, device, LIMIT_S)
            assert good.execute(one(7), timeout=LIMIT_S)[0] == one(7)
            return status

        yield run
        assert worker in daemon.process.descendants()


def test_VAL_1_LIFE_8_TST_9_after_each_mutated_model_the_same_worker_executes_a_valid_one(
    daemon: Daemon, data_dir: Path
) -> None:
    outcomes: Counter[ErrorStatus] = Counter()
    with same_worker(daemon) as run:

        @given(mutated_tests(list(HAL_DECLARATIONS)))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=not IS_DEEP,  # the deep run searches at random
            suppress_health_check=[HealthCheck.too_slow],
        )
        def run_mutated(test: MutatedTest) -> None:
            outcomes[run(test)] += 1

        run_mutated()
    assert {ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE} <= set(outcomes)


def test_TST_9_LIFE_8_the_corpus_of_the_fuzzer_is_answered_by_one_worker(daemon: Daemon, data_dir: Path) -> None:
    inputs = corpus.read("driver")
    with same_worker(daemon) as run:
        outcomes = Counter(run(decode(data)) for data in inputs)
    assert len(inputs) > 100
    assert {ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE} <= set(outcomes)
