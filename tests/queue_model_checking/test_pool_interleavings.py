"""Every schedule of a thread pool's caller and workers, one ordered access at a time, over `_thread_pool.h` itself.

Every work item is computed once and its result seen, no two threads race for a plain variable, no wake-up is lost, and
all threads end. With loads of what is newest, then with those that C11 allows.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.pool_explorer import pool_bugs
from support.pool_explorer.pool_memory import DataRaceError, Machine, Uses, Words, World
from support.pool_explorer.pool_search import Launches, PoolScenario, PoolViolation, explore_pool
from support.pool_explorer.replay import Access, SeededBug

ONE, TWO = Launches(1), Launches(2)
AWAKE_ONLY = Launches(2, parallelism=1)
QUICK_TO_SLEEP, SPINNING = (1, 1, 0), (1, 2, 1)

SMALL = [
    (PoolScenario(1, ()), Machine.C11),
    (PoolScenario(1, (TWO,), SPINNING), Machine.C11),
    (PoolScenario(1, (TWO,), QUICK_TO_SLEEP, spurious=1), Machine.C11),
    (PoolScenario(1, (TWO, ONE), QUICK_TO_SLEEP), Machine.C11),
    (PoolScenario(1, (AWAKE_ONLY, TWO), QUICK_TO_SLEEP), Machine.C11),
]
LARGE = [
    (PoolScenario(1, (TWO, AWAKE_ONLY, TWO), SPINNING), Machine.C11),
    (PoolScenario(1, (TWO, TWO), spurious=1), Machine.C11),
    (PoolScenario(1, (Launches(2, count=2),), QUICK_TO_SLEEP), Machine.C11),
    (PoolScenario(2, (TWO,), QUICK_TO_SLEEP), Machine.VALUES),
]

NEXT_RUN = PoolScenario(1, (TWO, ONE), QUICK_TO_SLEEP)
ONE_RUN = PoolScenario(1, (TWO,), QUICK_TO_SLEEP)
RACE, WRONG, NO_END = "data race", "wrong sum", "nothing can end this"
FOUND_IN_ORDER = {
    "OPENED_BEFORE_IT_IS_WRITTEN": (ONE_RUN, WRONG),
    "OPENED_WITHOUT_RELEASE": (NEXT_RUN, RACE),
    "JOINED_WITHOUT_A_SECOND_LOOK": (NEXT_RUN, WRONG),
    "NOT_AWAITED": (ONE_RUN, RACE),
    "LEFT_WITHOUT_RELEASE": (ONE_RUN, RACE),
    "LEFT_WITHOUT_WAKING": (ONE_RUN, NO_END),
    "CHUNKS_TAKEN_TWICE": (ONE_RUN, WRONG),
    "SLEPT_WITHOUT_A_SECOND_LOOK": (ONE_RUN, NO_END),
    "SLEPT_ON_ANY_VALUE": (ONE_RUN, NO_END),
    "STOPPED_WITHOUT_WAKING": (ONE_RUN, NO_END),
}
FOUND_WITH_OLD_VALUES = {
    "JOINED_WITHOUT_TOTAL_ORDER": (ONE_RUN, RACE),
    "SECOND_LOOK_WITHOUT_TOTAL_ORDER": (NEXT_RUN, RACE),
    "COUNTED_WITHOUT_TOTAL_ORDER": (ONE_RUN, NO_END),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where programs cannot be compiled for ThreadSanitizer, whose calls the exploration is made of."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source = tmp_path_factory.mktemp("compiler") / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    command = ["cc", "-fsanitize=thread", "-c", str(source), "-o", str(source.with_suffix(".o"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip("this C compiler has no ThreadSanitizer")


def described(case: PoolScenario | Machine) -> str:
    return case.value if isinstance(case, Machine) else str(case)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("scenario", "machine"), [*SMALL, *(pytest.param(*case, marks=pytest.mark.deep) for case in LARGE)], ids=described
)
def test_the_pool_keeps_its_promises_in_every_schedule(
    tmp_path: Path, record: Callable[[object], None], scenario: PoolScenario, machine: Machine
) -> None:
    record(explore_pool(tmp_path / "build", scenario, machine))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", FOUND_IN_ORDER)
def test_a_seeded_bug_is_found(tmp_path: Path, name: str) -> None:
    scenario, what = FOUND_IN_ORDER[name]
    with pytest.raises(PoolViolation, match=what) as found:
        explore_pool(tmp_path / "build", scenario, Machine.IN_ORDER, [getattr(pool_bugs, name)])
    assert found.value.schedule


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", FOUND_WITH_OLD_VALUES)
def test_a_relaxed_memory_order_is_found_only_if_loads_may_read_old_values(tmp_path: Path, name: str) -> None:
    scenario, what = FOUND_WITH_OLD_VALUES[name]
    bugs = [getattr(pool_bugs, name)]
    explore_pool(tmp_path / "in_order", scenario, Machine.IN_ORDER, bugs)
    with pytest.raises(PoolViolation, match=what):
        explore_pool(tmp_path / "C11", scenario, Machine.C11, bugs)


def test_every_seeded_bug_is_tried() -> None:
    named = {name for name, value in vars(pool_bugs).items() if isinstance(value, SeededBug)}
    assert named == {*FOUND_IN_ORDER, *FOUND_WITH_OLD_VALUES}


# ---- the memory model itself ----

FLAG, OTHER, DATA = 0, 8, 16


def access(kind: str, place: int, order: str = "relaxed", value: int = 0) -> Access:
    return Access(kind, place, 8, value, 0, order)


def world_after(*before: tuple[int, Access]) -> World:
    """Return the world after accesses of two threads; each may load old values of both flags."""
    uses = Uses()
    for thread in (0, 1):
        for place in (FLAG, OTHER):
            uses.add(thread, access("load", place, "acquire"))
        uses.add(thread, access("write", DATA))
    world = World(Words(2, Machine.C11, {}, uses), ((), (), (), ((0, ()), (0, ()))))
    for thread, one in before:
        if one.kind == "write":
            world.store_plain(thread, one)
        else:
            world.store(thread, one)
    return world


def read_values(world: World, thread: int, load: Access) -> list[int]:
    return [value for _, value in world.readable(thread, load)]


@pytest.mark.parametrize(
    ("store", "load", "is_ordered"),
    [
        ("release", "acquire", True),
        ("seq_cst", "seq_cst", True),
        ("relaxed", "acquire", False),
        ("release", "relaxed", False),
    ],
)
def test_a_release_store_and_an_acquire_load_order_plain_accesses(store: str, load: str, is_ordered: bool) -> None:
    world = world_after((0, access("write", DATA, value=5)), (0, access("store", FLAG, store, 1)))
    one = access("load", FLAG, load)
    assert read_values(world, 1, one) in ([0, 1], [1])
    world.read(1, one, 1)
    if is_ordered:
        assert world.load_plain(1, access("read", DATA)) == 5
    else:
        with pytest.raises(DataRaceError):
            world.load_plain(1, access("read", DATA))


@pytest.mark.parametrize(("order", "values"), [("seq_cst", [1]), ("acquire", [0, 1]), ("relaxed", [0, 1])])
def test_a_load_in_the_total_order_reads_no_older_value_than_the_last_store_in_it(
    order: str, values: list[int]
) -> None:
    world = world_after((0, access("store", FLAG, "seq_cst", 1)), (1, access("store", OTHER, "seq_cst", 1)))
    assert read_values(world, 1, access("load", FLAG, order)) == values


def test_a_thread_never_reads_what_is_older_than_what_it_knows() -> None:
    world = world_after(*((0, access("store", FLAG, "release", value)) for value in (1, 2)))
    one = access("load", FLAG)
    assert read_values(world, 1, one) == [0, 1, 2]
    world.read(1, one, 1)
    assert read_values(world, 1, one) == [1, 2]
    assert read_values(world, 0, one) == [2]


def test_two_threads_that_store_to_a_plain_word_race() -> None:
    world = world_after((0, access("write", DATA, value=5)))
    with pytest.raises(DataRaceError):
        world.store_plain(1, access("write", DATA, value=6))
