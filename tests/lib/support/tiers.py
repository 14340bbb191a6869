"""Test tiers: which of the collected tests a run takes.

    quick   every test function that is not marked `full` or `deep`, with at most `CASES` of its parameter sets
    full    every test that is not marked `deep`
    deep    every test; searches take more examples and random seeds

`pytest` without paths runs the quick tier, with paths the full one; `--tier` chooses. Markers alone decide: the tests
of `SLOW` files, and the parameter sets that the quick tier leaves out, are marked `full` when they are collected.
`IS_DEEP` is set before test modules are imported, so that they can size their searches by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

TIERS = ("quick", "full", "deep")
CASES = 2
IS_DEEP = False

_QUICK_END_TO_END = ("golden", "client_death", "driver_death", "malformed_packets", "fences", "connect", "fork")
SLOW = (
    "tests/cli/test_bench_runs.py",
    "tests/cli/test_conformance.py",
    "tests/cli/test_golden_runs.py",
    "tests/cli/test_random_graphs.py",
    "tests/cli/test_serve.py",
    "tests/lab/conformance/test_cases.py",
    "tests/lab/conformance/test_every_path.py",
    "tests/lab/conformance/test_random_graphs.py",
    "tests/lab/conformance/test_runtime_target.py",
    "tests/engines/compiled/test_photos.py",
    "tests/engines/compiled/test_profiling.py",
    "tests/engines/compiled/test_recurrent.py",
    "tests/engines/compiled/test_kernel_dedup.py",
    "tests/engines/compiled/test_steps.py",
    "tests/engines/compiled/test_vts.py",
    "tests/engines/test_micro_models.py",
    "tests/engines/test_mutated_models.py",
    "tests/importers/test_tflite_corrupt.py",
    "tests/lab/bench/test_runner_groups.py",
    "tests/queue/test_asyncio.py",
    "tests/queue_model_checking",
    "tests/client/test_hidl.py",
    "tests/client/test_interfaces.py",
    "tests/driver/test_compilation_cache.py",
    "tests/driver/test_managed_buffers.py",
    "tests/tools/test_constraint_mutants.py",
    "tests/tools/test_driver_bench.py",
    "tests/tools/test_driver_stress.py",
    "tests/tools/test_fuzz.py",
    "tests/tools/test_measure_capabilities.py",
    "tests/tools/test_model_bench.py",
    "tests/tools/test_quantized_models.py",
    "tests/tools/test_queue_bench.py",
    "tests/tools/test_ray_bench.py",
    "tests/tools/test_wheels.py",
    "tests/validation/test_model_mutations.py",
)
"""Files and folders whose tests are all marked `full`, beside most of tests/end_to_end. They take most of the time."""


def is_slow(path: str) -> bool:
    """Return True if all tests of a file, relative to the repository, belong to the full tier."""
    folder, _, name = path.rpartition("/")
    if folder == "tests/end_to_end":
        return name.removeprefix("test_").removesuffix(".py") not in _QUICK_END_TO_END
    return path in SLOW or folder in SLOW


def choose(config: pytest.Config) -> str:
    """Return the tier of this run, and set `IS_DEEP`. Call it before test modules are imported."""
    global IS_DEEP  # noqa: PLW0603  # set once, before anything reads it
    has_paths = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    tier = str(config.getoption("--tier") or ("full" if has_paths else "quick"))
    IS_DEEP = tier == "deep"
    return tier


def excluded_from(items: Sequence[pytest.Item], tier: str) -> list[pytest.Item]:
    """Return the items that are not in `tier`, after marking those of slow files and beyond the sample `full`."""
    slow = [item for item in items if is_slow(item.location[0])]
    for item in [*slow, *_beyond_the_sample(items)]:
        item.add_marker("full")
    excluded = {"quick": ("full", "deep"), "full": ("deep",), "deep": ()}[tier]
    return [item for item in items if any(item.get_closest_marker(name) for name in excluded)]


def _beyond_the_sample(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return all but `CASES` evenly spaced parameter sets of each test function."""
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0]].append(item)
    beyond: list[pytest.Item] = []
    for family in families.values():
        kept = {round(index * (len(family) - 1) / (CASES - 1)) for index in range(CASES)}
        beyond += [item for index, item in enumerate(family) if len(family) > CASES and index not in kept]
    return beyond
