"""`_atomics.h` and `_thread_pool.h` under ThreadSanitizer, if the compiler has it; and broken versions of them.

The same programs compiled for AArch64 run under qemu by hand: see docs/explanation/verification.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.places import ROOT

HARNESS = ROOT / "tools" / "tsan" / "harness.c"
POOL_HARNESS = ROOT / "tools" / "tsan" / "pool_harness.c"
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fno-builtin", "-pthread"]
LIMIT_S = 60
WRONG_RECORD, DATA_RACE = 1, 66
EMPTY = "int main(void) { return 0; }\n"


def compiled(target: Path, source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [shutil.which("cc") or "cc", *FLAGS, *flags, str(source), "-o", str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def ran(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(
        [str(program), *words], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.fixture(scope="module")
def sanitizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("sanitizer")
    (folder / "empty.c").write_text(EMPTY)
    done = compiled(folder / "empty", folder / "empty.c", "-fsanitize=thread")
    if done.returncode:
        pytest.skip(f"this C compiler has no ThreadSanitizer: {done.stderr.strip().splitlines()[-1]}")
    if ran(folder / "empty").returncode:
        pytest.skip("ThreadSanitizer's programs do not start on this kernel")


def harness(folder: Path, *flags: str, source: Path = HARNESS) -> Path:
    done = compiled(folder / "harness", source, *flags)
    assert done.returncode == 0, done.stderr
    return folder / "harness"


@pytest.mark.usefixtures("sanitizer")
def test_the_queue_has_no_data_race(tmp_path: Path) -> None:
    done = ran(harness(tmp_path, "-fsanitize=thread"), "20000")
    assert (done.returncode, done.stdout, done.stderr) == (0, "20000 records\n", "")


@pytest.mark.usefixtures("sanitizer")
@pytest.mark.parametrize("seed", ["RELAXED_RELEASE", "RELAXED_ACQUIRE", "PLAIN_EVENT"])
def test_a_seeded_race_is_reported(tmp_path: Path, seed: str) -> None:
    done = ran(harness(tmp_path, "-fsanitize=thread", f"-DSEED_{seed}"), "20000")
    assert done.returncode == DATA_RACE, done.stderr
    assert "data race" in done.stderr


@pytest.mark.usefixtures("sanitizer")
def test_payload_that_is_written_after_its_counter_is_reported_as_a_race_or_a_wrong_record(tmp_path: Path) -> None:
    done = ran(harness(tmp_path, "-fsanitize=thread", "-DSEED_EARLY_PUBLISH"), "20000")
    assert done.returncode in (WRONG_RECORD, DATA_RACE), done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_harness_checks_its_records_without_a_sanitizer(tmp_path: Path) -> None:
    done = ran(harness(tmp_path), "100000")
    assert (done.returncode, done.stdout, done.stderr) == (0, "100000 records\n", "")


@pytest.mark.usefixtures("sanitizer")
def test_the_thread_pool_has_no_data_race(tmp_path: Path) -> None:
    done = ran(harness(tmp_path, "-fsanitize=thread", source=POOL_HARNESS), "5000")
    assert (done.returncode, done.stdout, done.stderr) == (0, "5000 runs\n", "")


@pytest.mark.usefixtures("sanitizer")
@pytest.mark.parametrize("seed", ["RELAXED", "PLAIN_BUSY"])
def test_a_seeded_race_of_the_thread_pool_is_reported(tmp_path: Path, seed: str) -> None:
    done = ran(harness(tmp_path, "-fsanitize=thread", f"-DSEED_{seed}", source=POOL_HARNESS), "20000")
    assert done.returncode == DATA_RACE, done.stderr
    assert "data race" in done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_harness_of_the_thread_pool_checks_its_items_without_a_sanitizer(tmp_path: Path) -> None:
    done = ran(harness(tmp_path, source=POOL_HARNESS), "20000")
    assert (done.returncode, done.stdout, done.stderr) == (0, "20000 runs\n", "")
