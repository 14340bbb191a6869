"""Count libfmq's tests that have a counterpart of the same name, for each core.

The tables list libfmq's tests with their numbers of instances (typed tests run for AIDL and HIDL, with the ring in one
fd and in two). pytest collects this project's tests without running them. Each parameter set of `test_Suite_Name[...]`,
not counting the core, is an instance of the row Suite_Name. The exit status is 1 if an instance is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "tests/queue/parity"
CORES = ("compiled", "python")

Table = dict[str, int]
"""Names of libfmq's tests and their numbers of instances."""


def _suite(suite: str, names: str, instances: int) -> Table:
    return {f"{suite}_{name}": instances for name in names.split()}


UNIT: Table = {
    **_suite("BadQueueConfig", "QueueSizeTooLarge", 4),
    **_suite("HidlOnlyBadQueueConfig", "SanityCheck BadFdIndex ExtentTooLarge", 1),
    **_suite(
        "AidlOnlyBadQueueConfig",
        "LookForLeakedFds QueueSizeTooLargeForAidl NegativeAidlDescriptor NegativeAidlDescriptorGrantor "
        "MismatchedPayloadSize",
        1,
    ),
    **_suite(
        "Hidl2AidlOperation", "ConvertDescriptorsSync ConvertDescriptorsUnsync ConvertFdIndex1 ConvertMultipleFds", 1
    ),
    **_suite("DoubleFdFailures", "InvalidFd InvalidFdSize LargerFdSize", 1),
    **_suite("BlockingReadWrites", "SmallInputTest1 SmallInputTest2 BlockingTimeOutTest", 4),
    **_suite("QueueSizeOdd", "EventFlagTest", 4),
    **_suite(
        "SynchronizedReadWrites",
        "SmallInputTest1 SmallInputTest2 SmallInputTest3 ReadWhenEmpty1 ReadWhenEmpty2 WriteWhenFull1 WriteWhenFull2 "
        "LargeInputTest1 LargeInputTest2 LargeInputTest3 LargeInputTest4 MultipleRead MultipleWrite "
        "ReadWriteWrapAround1 ReadWriteWrapAround2",
        4,
    ),
    **_suite(
        "UnsynchronizedWriteTest",
        "SmallInputTest1 ReadWhenEmpty WriteWhenFull1 WriteWhenFull2 LargeInputTest1 LargeInputTest2 LargeInputTest3 "
        "MultipleRead MultipleWrite ReadWriteWrapAround",
        4,
    ),
}

PROCESSES: Table = {
    **_suite("UnsynchronizedWriteClientMultiProcess", "MultipleReadersAfterOverflow", 4),
    **_suite(
        "SynchronizedReadWriteClient",
        "BlockingReadWrite1 BlockingReadWrite2 BlockingReadWriteRepeat1 BlockingReadWriteRepeat2 "
        "BlockingReadWriteRepeat3 BlockingReadWriteZeroMessages SmallInputReaderTest1 SmallInputReaderTest2 "
        "SmallInputWriterTest1 SmallInputWriterTest2 MisalignedWriteCounter ReadWhenEmpty WriteWhenFull "
        "LargeInputTest1 LargeInputTest2 LargeInputTest3 MultipleRead MultipleWrite ReadWriteWrapAround "
        "ReadWriteWrapAround2",
        4,
    ),
    **_suite(
        "UnsynchronizedWriteClient",
        "SmallInputReaderTest1 SmallInputWriterTest1 ReadWhenEmpty WriteWhenFull LargeInputTest1 LargeInputTest2 "
        "LargeInputTest3 MultipleRead MultipleWrite ReadWriteWrapAround SmallInputMultipleReaderTest "
        "OverflowNotificationTest",
        4,
    ),
    **_suite("AidlTypeChecks", "FixedSizeParcelableTest", 11),
}

LATER_VERSIONS: Table = {
    **_suite(
        "BlockingReadWrites",
        "ShortEventFlagWaitWithWakeTest ShortEventFlagWaitWithoutWakeTest FmqWriteAndReadWithShortEventFlagWaitTest",
        4,
    ),
    **_suite(
        "UnsynchronizedReadWriteTest",  # the name of UnsynchronizedWriteTest in these versions
        "SmallInputTest1 ReadWhenEmpty WriteWhenFull1 WriteWhenFull2 LargeInputTest1 LargeInputTest2 LargeInputTest3 "
        "MultipleRead MultipleWrite ReadWriteWrapAround ReadMoreThanNumMessagesMaxFails "
        "ReadMoreThanAvailableToReadFails",
        4,
    ),
    **_suite("UnsynchronizedOverflowHistoryTest", "ReadAfterOverflow CommitReadAfterOverflow", 4),
    **_suite("UnsynchronizedOverflowHistoryTestSingleElement", "ReadAfterOverflow", 4),
    **_suite("SynchronizedReadWriteClient", "MisalignedWriteCounterClientSide", 4),
}

TABLES = {"fmq_unit_tests": UNIT, "msgq_test_client": PROCESSES, "later versions": LATER_VERSIONS}

Found = dict[tuple[str, str], set[str]]
"""The parameter sets of the tests for each (core, row)."""


@dataclass(frozen=True, slots=True)
class Score:
    """The numbers of existing and of required tests of one table, for one core."""

    table: str
    core: str
    names: int
    names_required: int
    instances: int
    instances_required: int
    missing: tuple[str, ...]


def collect_ids() -> list[str]:
    """Return pytest's ids of the tests in FOLDER."""
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", FOLDER]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"pytest cannot collect {FOLDER}:\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def instances(ids: Iterable[str]) -> Found:
    """Group test ids by core and row."""
    found: Found = defaultdict(set)
    for test in ids:
        match = re.search(r"::test_(\w+)\[(.+)\]$", test)
        words = match[2].split("-") if match else []
        for core in set(CORES).intersection(words):
            assert match is not None
            found[core, match[1]].add("-".join(word for word in words if word != core))
    return found


def score(name: str, core: str, found: Found) -> Score:
    """Compare one table with the tests of one core."""
    table = TABLES[name]
    counts = {row: min(len(found.get((core, row), ())), required) for row, required in table.items()}
    missing = tuple(f"{row} ({counts[row]} of {required})" for row, required in table.items() if counts[row] < required)
    complete = len(table) - len(missing)
    return Score(name, core, complete, len(table), sum(counts.values()), sum(table.values()), missing)


def main(arguments: list[str] | None = None) -> int:
    """Print the report; return 0 if nothing is missing."""
    parser = argparse.ArgumentParser(description="Count the tests that have the names of libfmq's tests.")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    options = parser.parse_args(arguments)
    found = instances(collect_ids())
    scores = [score(name, core, found) for name in TABLES for core in CORES]
    print(json.dumps([_as_dict(one) for one in scores]) if options.json else "\n".join(_lines(scores)))
    return 1 if any(one.missing for one in scores) else 0


def _as_dict(one: Score) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__slots__}


def _lines(scores: list[Score]) -> Iterable[str]:
    for one in scores:
        yield (
            f"{one.table:18}{one.core:10}{one.instances:4} of {one.instances_required} instances"
            f"{one.names:5} of {one.names_required} names"
        )
        yield from (f"  missing: {row}" for row in one.missing)


if __name__ == "__main__":
    sys.exit(main())
