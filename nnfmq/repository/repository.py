"""ModelRepository: looks at the directory, loads versions, and serves them.

A thread looks at the directory every LOOK_S. The main thread decides, and waits for no file and no driver; up to
LOADS_MAX threads load a version each. A load that takes longer than SLOW_LOAD_S leaves its place to another one, and up
to SLOW_LOADS_MAX go on beside the others: so imports that hang delay no other model for long. An import whose process
is stopped ends. Clients are served on the watcher thread meanwhile.

If the file system does not answer, the models stay as they were, and another thread looks after SLOW_LOOK_S, because
the first one may never go on: the file system may have been mounted again. So neither ends the service. What would end
it, a main thread or a watcher thread that does not go on, the supervisor notices by the heartbeats that are missing.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import NamedTuple, TypeAlias

from nnfmq.base.logs import about
from nnfmq.base.threads import Thread
from nnfmq.client.model.prepared_model import PreparedModel
from nnfmq.hal.errors import DeadObject, ErrorStatus, NnfmqError
from nnfmq.repository.models import DirectoryLook, DriverModels, ModelDirectory, VersionState
from nnfmq.repository.server import RepositoryServer
from nnfmq.repository.version_import import ImportCancellation, ImportCrashed, ImportedVersion, import_in_process
from nnfmq.serialize.repository_protocol import ModelDescription, ModelEntry, ModelState

__all__ = ["LoadFailure", "ModelRepository", "ModelVersions"]


# ----------------------------------------------------------------------------------------------------------------------
# ModelVersions: which version of a model is served, and which one to load next. Without I/O.
#
# The newest version that can be loaded is served. A version is loaded when its files have not changed between two looks
# at the directory, and again when they have changed since. If that fails, the version served before remains; so it does
# while an older one takes the place of a version that was removed.
#
# A version whose files are wrong has failed until they change. If the process that loads it dies, it is tried again
# after 1 and 2 s, and has failed after CRASHES_MAX times. Other errors, such as a lack of memory, may pass: it is tried
# again after pauses that grow to PAUSE_MAX_S.


CRASHES_MAX = 3
PAUSE_MAX_S = 60.0
_SETTLED_S = 2.0
_REASON_CHARACTERS = 1000


class LoadFailure(Enum):
    """Why a version could not be loaded."""

    WRONG = "wrong"
    """Its files are."""
    CRASH = "crash"
    """The process that loaded it died."""
    SHORTAGE = "shortage"
    """Something that may pass."""


class _Version:
    def __init__(self, state: VersionState) -> None:
        self.state = state
        self.is_settled = False
        self.failures = self.crashes = 0
        self.has_failed = False
        self.retry_at_s = 0.0
        self.reason = ""


class _Served(NamedTuple):
    version: int
    state: VersionState
    device: str
    changed_s: float


class ModelVersions:
    """The versions of one model. Used by one thread. Times are seconds of the monotonic clock, unless stated."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._known: dict[int, _Version] = {}  # the newest first
        self._served: _Served | None = None
        self._exists = True

    @property
    def served_version(self) -> int:
        """The version that is served, 0 if there is none."""
        return 0 if self._served is None else self._served.version

    @property
    def is_gone(self) -> bool:
        """Whether there is nothing to say of the model any more: it has no directory, and is not served."""
        return not self._exists and self._served is None

    def look(self, found: Mapping[int, VersionState] | None, clock_s: float) -> None:
        """Note the states of all versions that there are now; None = the model's directory is gone.

        `clock_s` is the time of day, since the epoch.
        """
        self._exists = found is not None
        found = found or {}
        known = {}
        for number in sorted(found, reverse=True):
            version = self._known.get(number)
            if version is None or version.state != found[number]:
                version = _Version(found[number])
                # A driver that starts need not look twice at files that have been there for long.
                version.is_settled = found[number].changed_s + _SETTLED_S < clock_s
            else:
                version.is_settled = True
            known[number] = version
        self._known = known

    def next_load(self, now_s: float, loading: Collection[int] = ()) -> int:
        """Return the version to load now, 0 if there is none. `loading` are those that are being loaded."""
        for number, version in self._known.items():
            if not self.is_wanted(number):
                break
            is_due = version.is_settled and not version.has_failed and version.retry_at_s <= now_s
            if is_due and number not in loading:
                return number
        return 0

    def is_wanted(self, number: int) -> bool:
        """Return whether this version, as its files are now, would replace the one that is served."""
        served = self._served
        if served is None or served.version not in self._known:
            return True
        is_new = number == served.version and self._known[number].state != served.state
        return number > served.version or is_new

    def state_of(self, number: int) -> VersionState | None:
        """Return the state of a version's files, None if it was not there at the last look."""
        version = self._known.get(number)
        return None if version is None else version.state

    def on_loaded(self, number: int, state: VersionState, device: str, clock_s: float) -> None:
        """Note that a version with files of this state is served from now on."""
        self._served = _Served(number, state, device, clock_s)

    def on_failure(self, number: int, state: VersionState, failure: LoadFailure, reason: str, now_s: float) -> bool:
        """Note that loading a version has failed; return whether it has failed for good, until its files change."""
        version = self._known.get(number)
        if version is None or version.state != state:
            return False  # its files have changed, or it was removed
        version.failures += 1
        version.reason = reason[:_REASON_CHARACTERS]
        version.crashes += failure is LoadFailure.CRASH
        version.has_failed = failure is LoadFailure.WRONG or version.crashes >= CRASHES_MAX
        version.retry_at_s = now_s + min(2.0 ** (version.failures - 1), PAUSE_MAX_S)
        return version.has_failed

    def on_unusable(self, number: int, state: VersionState) -> None:
        """Note that the files of a version have changed since they had this state: load it after the next look."""
        version = self._known.get(number)
        if version is not None and version.state == state:
            version.is_settled = False

    def withdraw(self) -> bool:
        """Serve nothing any more if the served version was removed and no other one may follow; return whether so."""
        served = self._served
        if served is None or served.version in self._known:
            return False
        if any(not version.has_failed for version in self._known.values()):
            return False
        self._served = None
        return True

    def entry(self) -> ModelEntry:
        """Return the entry of the model for clients."""
        served = self._served
        failed = [number for number in self._known if self._has_failed_after_served(number)]
        number = failed[0] if failed else 0
        return ModelEntry(
            name=self.name,
            state=self._state(),
            version=self.served_version,
            device="" if served is None else served.device,
            failed_version=number,
            reason=self._known[number].reason if number else "" if self._known else "there is no version of it",
            changed_s=0.0 if served is None else served.changed_s,
        )

    def _has_failed_after_served(self, number: int) -> bool:
        return number >= self.served_version and bool(self._known[number].reason)

    def _state(self) -> ModelState:
        if self._served is not None:
            return ModelState.READY
        is_pending = any(not version.has_failed for version in self._known.values())
        return ModelState.LOADING if is_pending else ModelState.UNAVAILABLE


# ----------------------------------------------------------------------------------------------------------------------
# ModelRepository: looks at the directory, loads versions, and serves them.


LOOK_S = 1.0
SLOW_LOOK_S, LOOK_THREADS_MAX = 30.0, 8
LOADS_MAX, SLOW_LOADS_MAX = 2, 4
SLOW_LOAD_S = 10.0
RESTORE_PAUSE_S = 10.0  # between two times, in case a model makes the worker die
_PASSING = frozenset(
    (
        ErrorStatus.DEVICE_UNAVAILABLE,
        ErrorStatus.MISSED_DEADLINE_TRANSIENT,
        ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
        ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT,
    )
)
_log = logging.getLogger("nnfmq.repository")


class _Load(NamedTuple):
    """A version that is being loaded, with the state of its files at the beginning."""

    name: str
    version: int
    state: VersionState
    started_s: float
    cancellation: ImportCancellation


class _Loaded(NamedTuple):
    """A version that is prepared in the driver."""

    imported: ImportedVersion
    prepared: PreparedModel

    def close(self) -> None:
        self.imported.close()
        self.prepared.close()


class _Failed(NamedTuple):
    failure: LoadFailure
    reason: str


class _Ended(NamedTuple):
    """The end of a load; without a result its files have changed meanwhile."""

    load: _Load
    result: _Loaded | _Failed | None


class _Restored(NamedTuple):
    """A model that is served, and was prepared again; None: that has failed."""

    name: str
    loaded: _Loaded
    prepared: PreparedModel | None


_Event: TypeAlias = DirectoryLook | _Ended | _Restored
"""What other threads tell the main thread."""


class ModelRepository:
    """The models of a directory, and those of them that are served."""

    def __init__(self, directory: ModelDirectory, driver: DriverModels, server: RepositoryServer) -> None:
        self._directory = directory
        self._driver = driver
        self._server = server
        self._models: dict[str, ModelVersions] = {}
        self._served: dict[str, _Loaded] = {}
        self._loads: list[_Load] = []  # that are in progress
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._unreadable = ""
        self._restore_at_s, self._restoring = 0.0, 0  # how many models are to be prepared again
        self._look_threads = 0
        self._looked_s = 0.0  # when the last look has ended, or another thread began to look

    def run(self) -> None:
        """Serve until the process ends."""
        self._start_look_thread()
        while True:
            self.handle_event(LOOK_S)
            if time.monotonic() > self._looked_s + SLOW_LOOK_S:
                self._on_slow_look()
            self._server.show_life()

    # -- looking -------------------------------------------------------------------------------------------------------

    def _start_look_thread(self) -> None:
        """Start a thread that looks at the directory, instead of one that does not come back."""
        self._looked_s = time.monotonic()
        self._look_threads += 1
        with suppress(RuntimeError):  # it is tried again
            Thread(target=self._look, args=(self._look_threads,), name="nnfmq-look", daemon=True).start()

    def _look(self, number: int) -> None:
        """Look at the directory again and again, until another thread does."""
        while number == self._look_threads:
            self._events.put(self._directory.look())
            time.sleep(LOOK_S)

    def _on_slow_look(self) -> None:
        self._report_unreadable(f"{self._directory.path} has not answered for {SLOW_LOOK_S:g} s")
        self._look_after_processes()
        if self._look_threads < LOOK_THREADS_MAX:
            self._start_look_thread()

    def note(self, found: DirectoryLook) -> None:
        """Note what a look has found; begin loading what is new, and withdraw what is gone."""
        self._looked_s = time.monotonic()
        self._report_unreadable("; ".join(f"{error.filename}: {error.strerror}" for error in found.errors))
        if found.models is not None:
            for name, states in found.models.items():
                if states is not None:
                    self._models.setdefault(name, ModelVersions(name)).look(states, time.time())
            for name in self._models.keys() - found.models.keys():
                self._models[name].look(None, time.time())
        self._look_after_processes()
        self._go_on()

    def _look_after_processes(self) -> None:
        for load in self._loads:
            load.cancellation.end_if_stopped()
        self._restore_lost()

    def _report_unreadable(self, text: str) -> None:
        """Log what cannot be read, once."""
        if text != self._unreadable:
            self._unreadable = text
            if text:
                _log.warning("the models remain those of the last look: %s", text)

    def _go_on(self) -> None:
        """Withdraw models, cancel and begin loads, as far as possible; publish the list of models."""
        for load in self._loads:
            if not self._is_wanted(load):
                load.cancellation.cancel()  # an import that hangs would keep the place of another one
        for name, versions in list(self._models.items()):
            if versions.withdraw():
                self._withdraw(name)
            if versions.is_gone:
                del self._models[name]
        for versions in self._models.values():
            if self._has_place():
                self._begin_load(versions)
        self._server.set_entries(self._entries())

    def _has_place(self) -> bool:
        """Return whether another load may begin."""
        began_s = time.monotonic() - SLOW_LOAD_S
        slow = sum(load.started_s < began_s for load in self._loads)
        return len(self._loads) - min(slow, SLOW_LOADS_MAX) < LOADS_MAX

    def _withdraw(self, name: str) -> None:
        self._server.withdraw(name)
        self._served.pop(name).prepared.close()
        _log.info("model %s is no longer served: its versions were removed", name, extra=about(model=name))

    # -- loading -------------------------------------------------------------------------------------------------------

    def _begin_load(self, versions: ModelVersions) -> None:
        """Begin to load the next version of a model, if there is one.

        While one is being loaded, an older one is loaded only if none is served and the first one takes long.
        """
        now_s = time.monotonic()
        loads = [load for load in self._loads if load.name == versions.name]
        if loads and (versions.served_version or loads[-1].started_s + SLOW_LOAD_S > now_s):
            return
        version = versions.next_load(now_s, [load.version for load in loads])
        state = versions.state_of(version)
        if state is not None:
            load = _Load(versions.name, version, state, now_s, ImportCancellation())
            self._loads.append(load)
            try:
                Thread(target=self._load, args=(load,), name=f"load {load.name}", daemon=True).start()
            except RuntimeError as error:
                self._events.put(_Ended(load, _Failed(LoadFailure.SHORTAGE, str(error))))

    def _load(self, load: _Load) -> None:
        """Load a version and put the result into the queue. Runs on a thread of its own."""
        result: _Loaded | _Failed | None
        try:
            result = self._loaded(load)
        except (ImportCrashed, DeadObject) as error:
            result = _Failed(LoadFailure.CRASH, str(error))
        except NnfmqError as error:
            result = _Failed(LoadFailure.SHORTAGE if error.status in _PASSING else LoadFailure.WRONG, _one_line(error))
        except (OSError, MemoryError) as error:
            result = _Failed(LoadFailure.SHORTAGE, str(error) or "there is not enough memory")
        except Exception as error:  # noqa: BLE001  a bug fails this version, not the others
            text, of_model = "loading version %d of model %s failed", about(model=load.name)
            _log.exception(text, load.version, load.name, extra=of_model)
            result = _Failed(LoadFailure.WRONG, repr(error))
        self._events.put(_Ended(load, result))

    def _loaded(self, load: _Load) -> _Loaded | None:
        folder = self._directory.version_path(load.name, load.version)
        imported = import_in_process(folder, self._driver.socket, load.cancellation)
        try:
            prepared = self._driver.prepare(load.name, load.version, imported.model, imported.memories)
        except BaseException:
            imported.close()
            raise
        loaded = _Loaded(imported, prepared)
        if self._is_unchanged(load):
            return loaded
        loaded.close()
        return None

    def _is_unchanged(self, load: _Load) -> bool:
        """Return whether the files are still those that were loaded."""
        try:
            return self._directory.state(load.name, load.version) == load.state
        except OSError:
            return True  # the next look tells

    def _entries(self) -> list[ModelEntry]:
        return [versions.entry() for versions in self._models.values()]

    def handle_event(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for what another thread tells, a look or the end of a load, and handle it."""
        with suppress(queue.Empty):
            event = self._events.get(timeout=timeout_s)
            if isinstance(event, DirectoryLook):
                self.note(event)
                self._server.start()  # now it is known which models there are
            elif isinstance(event, _Restored):
                self._on_restored(event)
            else:
                self._on_ended(*event)

    def _on_ended(self, load: _Load, result: _Loaded | _Failed | None) -> None:
        self._loads.remove(load)
        if isinstance(result, _Failed):
            self._on_failure(load, result)
        elif result is not None and self._is_wanted(load):
            self._serve(load, result)
        else:
            if result is not None:
                result.close()
            if load.name in self._models:
                self._models[load.name].on_unusable(load.version, load.state)
        self._go_on()

    def _is_wanted(self, load: _Load) -> bool:
        """Return whether the files were those that were loaded at the last look, and no newer version is served."""
        versions = self._models.get(load.name)
        return (
            versions is not None and versions.state_of(load.version) == load.state and versions.is_wanted(load.version)
        )

    def _on_failure(self, load: _Load, failed: _Failed) -> None:
        if not self._is_wanted(load):
            return  # it was cancelled
        versions = self._models[load.name]
        is_final = versions.on_failure(load.version, load.state, failed.failure, failed.reason, time.monotonic())
        then = "it is tried again when its files change" if is_final else "it is tried again"
        served = versions.served_version
        instead = f"version {served} is served" if served else "no version is served"
        text, of_model = "version %d of model %s is not served: %s; %s; %s", about(model=load.name)
        _log.warning(text, load.version, load.name, failed.reason, instead, then, extra=of_model)

    def _serve(self, load: _Load, loaded: _Loaded) -> None:
        device, before = loaded.prepared.device, self._models[load.name].served_version
        self._models[load.name].on_loaded(load.version, load.state, device, time.time())
        self._server.publish(_description(load, loaded), loaded.imported.memories, self._entries())
        previous, self._served[load.name] = self._served.get(load.name), loaded
        if previous is not None:
            previous.prepared.close()
        instead = f" instead of version {before}" if before else ""
        text, of_model = "version %d of model %s is served on device %s%s", about(model=load.name)
        _log.info(text, load.version, load.name, device, instead, extra=of_model)

    def _restore_lost(self) -> None:
        """Prepare the served models again whose worker has died: their programs may have gone with it.

        A load may have connected to another worker meanwhile.
        """
        lost = {name: loaded for name, loaded in self._served.items() if not loaded.prepared.connection.is_open}
        if self._restoring or not lost or time.monotonic() < self._restore_at_s:
            return
        self._restore_at_s = time.monotonic() + RESTORE_PAUSE_S
        _log.warning("the worker that kept the models has died: they are prepared again")
        served = [(name, self._models[name].served_version, loaded) for name, loaded in lost.items()]
        with suppress(RuntimeError):  # it is tried again
            Thread(target=self._restore, args=(served,), name="nnfmq-restore", daemon=True).start()
            self._restoring = len(served)

    def _restore(self, served: Sequence[tuple[str, int, _Loaded]]) -> None:
        """Prepare models again. Runs on a thread of its own."""
        for name, version, loaded in served:
            loaded.prepared.close()
            prepared = None
            try:
                prepared = self._driver.prepare(name, version, loaded.imported.model, loaded.imported.memories)
            except NnfmqError as error:
                _log.warning("model %s is not prepared in advance: %s", name, error, extra=about(model=name))
            self._events.put(_Restored(name, loaded, prepared))

    def _on_restored(self, event: _Restored) -> None:
        self._restoring -= 1
        if event.prepared is None:
            return
        if self._served.get(event.name) is event.loaded:
            self._served[event.name] = event.loaded._replace(prepared=event.prepared)
        else:  # another version has taken its place, or none
            event.prepared.close()


def _one_line(error: Exception) -> str:
    """Return an error's text, of which that of an unsupported model has a line for each operator."""
    return "; ".join(line.strip() for line in str(error).splitlines())


def _description(load: _Load, loaded: _Loaded) -> ModelDescription:
    model, options = loaded.imported.model, loaded.imported.model.options
    return ModelDescription(
        name=load.name,
        version=load.version,
        device=loaded.prepared.device,
        preference=options.preference,
        priority=options.priority,
        batch=options.batch,
        deterministic=options.deterministic,
        model=model.model,
        pools=model.pools,
        inputs=model.inputs,
        outputs=model.outputs,
        states=model.states,
    )
