"""ModelVersions: which version of a model is served, and which one to load next. Without I/O.

The newest version that can be loaded is served. A version is loaded when its files have not changed between two looks
at the directory, and again when they have changed since. If that fails, the version served before remains; so it does
while an older one takes the place of a version that was removed.

A version whose files are wrong has failed until they change. If the process that loads it dies, it is tried again after
1 and 2 s, and has failed after CRASHES_MAX times. Other errors, such as a lack of memory, may pass: it is tried again
after pauses that grow to PAUSE_MAX_S.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import NamedTuple

from nnfmq.repository.model_directory import VersionState
from nnfmq.serialize.repository_protocol import ModelEntry, ModelState

__all__ = ["LoadFailure", "ModelVersions"]

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
        """Return what clients are told of the model."""
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
