"""Rules for every test: the right package under test, the data where it is, nothing left behind.

The leak check surrounds each test and, once more, the whole session, so that fixtures of a module or of the session
answer for what they keep as well. Where a test must leave something, there is no way to say so: change the test.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# One BLAS thread, as in the driver: a pool ends before each fork and comes back, unasked, with the next product.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# No configuration file of this machine or user.
os.environ["NNFMQ_CONFIG"] = os.devnull
# A test that compares what a driver has logged compares problems, as texts; those of the log set these themselves.
os.environ["NNFMQ_LOG_LEVEL"] = "warning"
os.environ["NNFMQ_LOG_FORMAT"] = "text"
# ONNX Runtime otherwise reports to its makers: a thread and a database from the import on, in every process that forks.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# No child of a test imports from the current directory: in a clone that is the source tree, not what is installed.
os.environ["PYTHONSAFEPATH"] = "1"

from support import bugs, leaks, places, tiers, under_test
from support.drivers import Daemon, Shared, running_daemon, short_folder

import nnfmq

settings.register_profile("nnfmq", deadline=None)  # a busy machine is no reason to fail
settings.load_profile("nnfmq")  # before @given in any test module takes the current one

_TIER = pytest.StashKey[str]()
_EXCLUDED = pytest.StashKey[int]()
_watcher = leaks.Watcher()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose tests."""
    add = parser.addoption
    add("--tier", choices=tiers.TIERS, help="quick (default without paths), full (default with paths) or deep")
    add("--target", metavar="NAME", help="all kernel tests, for this instruction set (or `host`)")
    add("--emulated", action="store_true", help="in an emulator even if this machine has the instruction set")
    add("--all-photos", action="store_true", help="all photos through the classifiers, not some")


def pytest_configure(config: pytest.Config) -> None:
    """End the run before it starts if it would test another package or another core than intended."""
    complaint = under_test.complaint()
    if complaint:
        pytest.exit(complaint, returncode=pytest.ExitCode.USAGE_ERROR)
    config.pluginmanager.register(_watcher)  # a hook of this file is not called for a fixture of the session
    bugs.watch_for_them()
    os.environ.pop("PYTEST_ADDOPTS", None)  # options of this run, not of the pytest runs that tests start
    _restore_signals()
    config.stash[_TIER] = tiers.choose(config)


def _restore_signals() -> None:
    """Handle the signals that nohup, or `&` in a script, made this process and thus its children ignore.

    Tests interrupt programs with SIGINT, and would wait for one that ignores it.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Deselect the tests that are not in the tier of this run."""
    out = set(tiers.excluded_from(items, config.stash[_TIER]))
    config.stash[_EXCLUDED] = len(out)
    if out:
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    if tiers.IS_DEEP:
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report how many tests this tier left out, and how to run them."""
    count, tier = config.stash.get(_EXCLUDED, 0), config.stash[_TIER]
    if count:
        more = "full" if tier == "quick" else "deep"
        terminalreporter.write_line(f"Tier {tier}: {count:,} tests were left out; pytest --tier {more} runs them.")


def pytest_collection_finish() -> None:
    """Exempt the tests, hundreds of thousands of long-lived objects, from garbage collection: a second each time."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Name the package under test in the log."""
    data = places.data_path()
    return "\n".join(
        [
            f"nnfmq: {under_test.IMPORTED.parent}, core: {under_test.core_name()}",
            f"data: {data}{'' if data.is_dir() else ' (absent: the tests that need it are skipped)'}",
        ]
    )


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of models, photos and golden files that the project does not ship."""
    path = places.data_path()
    if not path.is_dir():
        pytest.skip(f"no test data in {path}; $NNFMQ_DATA can say where it is")
    return path


@pytest.fixture(scope="session", autouse=True)
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep drivers, here and in children, from the key and the cache in the user's own directories."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("NNFMQ_COMPILE_AFTER_EXIT_S", "0")  # no process outlives a test
        patch.setenv("NNFMQ_COMPILE_NOTICE", "0")  # a test that compares stderr does not depend on the duration
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind_by_the_session() -> Iterator[None]:
    with leaks.watch():
        yield


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that nothing is left, and no driver in this process has a bug. One fixture: each takes 30 µs of a test."""
    from nnfmq.base.logs import LIMITS

    for limit in LIMITS.values():
        limit.reset()  # warnings of another test, whose logs are limited in rate
    with bugs.none(), _watcher.watch():
        yield
        if (module := sys.modules.get("nnfmq.driver.execution.watchdog")) is not None:
            module.WATCHDOG.stop()  # a device of a plug-in has started its thread
        request.node.funcargs.clear()  # pytest keeps what the other fixtures returned, such as a program with its code


@pytest.fixture
def configured_logs() -> Iterator[None]:
    """Restore afterwards what `logs.configure` changes, for a test that calls it or a command that does."""
    root, own = logging.getLogger(), logging.getLogger("nnfmq")
    handlers, level = list(root.handlers), own.level
    yield
    root.handlers[:] = handlers
    own.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    """Return a stack of what the test opens; it is closed after the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    """Return a function that runs a call in a new thread, whose result the future gets."""
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty folder whose path is short enough for a socket."""
    with short_folder() as made:
        yield made


# ----------------------------------------------------------------------------------------------------------------------
# Drivers of all tests of a module: what one test does must not affect the next one.


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """Return a function that enters a context for the test that first needs it, and for the module's tests after it."""
    with ExitStack() as stack:

        def enter(context: AbstractContextManager[Any]) -> Any:
            with _watcher.exemption():
                return stack.enter_context(context)

        yield enter


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """Return a running daemon."""
    with short_folder() as made, running_daemon(made / "d.sock") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def shared_client() -> Iterator[nnfmq.Client]:
    """Return a client of an embedded driver."""
    with nnfmq.connect(embedded=True) as made:
        yield made


@pytest.fixture(scope="module")
def shared_device(shared_client: nnfmq.Client) -> nnfmq.Device:
    """Return the reference device of that driver."""
    return shared_client.device("reference")
