"""One event of `tools/chaos.py`: a process is killed or stopped, or something runs out; then everything is looked at.

For an event a client runs a script until a process reaches a step, or some time has passed. Then the event is brought
about, and the script goes on to its end. Afterwards the driver must have the processes, descriptors and shared mappings
that it had before.
"""

from __future__ import annotations

import os
import random
import re
import resource
import select
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from bench_support import has_exited
from chaos_clients import CALL_S, WRONG, Call, ChaosClient, Times, run_script
from chaos_place import GONE, LATE_S, SETTLE_S, Place, Traces, fork
from chaos_steps import Role, steps

from nnfmq.hal.errors import ErrorStatus

SCRIPT_S = 240.0
"""A client that has not ended its script by then has hung."""
_STOPPED_S = (0.01, 0.2)
_TICK_S = 0.001
_LOG_CHARACTERS = 20_000
_OF_CONTROLS = 1 << 40
"""Above the numbers of events: a model that an event has compiled is in the cache."""

# ----------------------------------------------------------------------------------------------------------------------
# What an event is


class Action(Enum):
    """What is done at a step."""

    KILL = "kill"
    STOP = "stop and go on"
    STOP_AND_KILL = "stop, then kill"
    MEMORY = "no memory"
    DESCRIPTORS = "no descriptors"
    DISK = "full disk"
    DELAY = "delay"


SHORTAGES = (Action.MEMORY, Action.DESCRIPTORS, Action.DISK)
_WEIGHTS = {
    Action.KILL: 50, Action.STOP: 15, Action.STOP_AND_KILL: 15, Action.MEMORY: 6, Action.DESCRIPTORS: 6, Action.DISK: 4,
    Action.DELAY: 4,
}  # fmt: skip
_VICTIMS = {
    Role.CLIENT: 6, Role.WORKER: 6, Role.SUPERVISOR: 1, Role.COMPILE_SERVER: 3, Role.COMPILE_PROCESS: 3,
    Role.REPOSITORY: 1, Role.IMPORT: 2,
}  # fmt: skip
"""How often each process is chosen, and not the one that is at the step."""
_AT_THE_STEP = 0.5
_AT_RANDOM_TIMES = 8
"""One event in so many is at a random time."""
_SCRIPTS = {"executions": 6, "bursts": 6, "compilation": 4, "surplus": 4, "versions": 1, "broken": 1}
"""How often a script is chosen of those that pass a step. The last two start interpreters, which import models."""


class Event(NamedTuple):
    """What to do, at which step (-1: `after_s` after the beginning), during which script, and to which process."""

    number: int
    script: str
    step: int
    after_s: float
    action: Action
    victim: Role
    stopped_s: float

    @property
    def text(self) -> str:
        """The event in words."""
        at = f"at '{steps()[self.step].name}'" if self.step >= 0 else f"after {self.after_s * 1000:.0f} ms"
        return f"{self.number}: {self.action.value}: {self.victim.text}, {at} of {self.script}"


def draw(seed: int, number: int, scripts_of: dict[int, list[str]], seconds: dict[str, float]) -> Event:
    """Return the event with a number. `scripts_of` has the scripts that pass a step, `seconds` their durations."""
    chance = random.Random(f"{seed} {number}")
    known = sorted(scripts_of)
    random.Random(seed).shuffle(known)
    place, step = number % (len(known) * _AT_RANDOM_TIMES // (_AT_RANDOM_TIMES - 1)), -1
    if place < len(known):
        step = known[place]
    scripts = scripts_of[step] if step >= 0 else sorted(seconds)
    script = chance.choices(scripts, [_SCRIPTS[each] for each in scripts])[0]
    action = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    victim = chance.choices(list(_VICTIMS), list(_VICTIMS.values()))[0]
    if action is Action.DELAY or (step >= 0 and chance.random() < _AT_THE_STEP):
        victim = steps()[step].role if step >= 0 else Role.WORKER
    return Event(number, script, step, chance.random() * seconds[script], action, victim, chance.uniform(*_STOPPED_S))


@dataclass
class Outcome:
    """What came of an event. `findings` are what must not be; each has a kind before the colon.

    If there are any, `log` is what the driver has logged, with the places at which its threads are.
    """

    event: Event
    victim: Role | None = None
    was_reached: bool = True
    seen_ms: dict[str, float] = field(default_factory=dict)
    neighbour: Times = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    log: str = ""


# ----------------------------------------------------------------------------------------------------------------------
# The event


class _Running:
    """A script that runs, and the event that is to come."""

    def __init__(self, place: Place, event: Event) -> None:
        self.place = place
        self.event = event
        self.outcome = Outcome(event)
        self.others = [place.neighbour.pid, place.neighbour_worker, *self._of_repository()]
        self.folder = place.folder / f"client{event.number}"
        self.folder.mkdir()
        account = place.account
        if account is not None:
            os.chown(self.folder, account.uid, account.uid)
        own = ChaosClient(place.socket, self.folder, place.models, event.number, account)
        place.page.spare(self.others)
        if event.step >= 0:
            place.page.arm(event.step)
        uid = None if account is None else account.uid
        self.client = fork(
            lambda connection: connection.send(run_script(event.script, own)), place.page, place.log, uid
        )
        self.undo = ExitStack()
        self.calls: list[Call] = []

    def _of_repository(self) -> list[int]:
        """Return the workers of the repository, unless it is what is disturbed."""
        if self.event.step >= 0 and steps()[self.event.step].phase == "version change":
            return []
        return [pid for pid in self.place.of_role(Role.WORKER) if pid != self.place.neighbour_worker]

    def close(self) -> None:
        """End the client, and remove what it has left."""
        self.undo.close()
        self.place.page.release()
        self.client.end()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.place.remove_models()

    # -- until the event ----------------------------------------------------------------------------------------------

    def wait_for_step(self) -> int | None:
        """Wait until a process is at the step, or the time has come; return its pid. None: there was no such step."""
        begin = time.monotonic()
        if self.event.step < 0:
            self.client.has_exited(self.event.after_s)
            return self.client.pid
        while True:
            waiting = self.place.page.waiting()
            if waiting is not None:
                return waiting[0]
            if self.client.has_exited(_TICK_S) or time.monotonic() > begin + SCRIPT_S:
                self.place.page.release()
                return None

    def victims(self, at_step: int) -> list[int]:
        """Return the processes that are what the event wants, without those of others; else the one at the step."""
        if self.event.victim is Role.CLIENT:
            return [self.client.pid]
        found = [pid for pid in self.place.of_role(self.event.victim) if pid not in self.others]
        return [at_step] if at_step in found or not found else found[:1]

    # -- the event ----------------------------------------------------------------------------------------------------

    def bring_about(self, pid: int) -> None:
        """Do what the event says to a process, and let the one at the step go on."""
        action, page = self.event.action, self.place.page
        self.outcome.victim = page.role_of(pid)
        observers = self._observers(pid)
        begin = time.monotonic_ns()
        try:
            if action is Action.DELAY:
                time.sleep(self.event.stopped_s)
            elif action in SHORTAGES:
                self._take_away(pid)
            else:
                os.kill(pid, signal.SIGKILL if action is Action.KILL else signal.SIGSTOP)
        except GONE:
            self.outcome.was_reached = False  # it had ended
        page.release()
        if action in (Action.STOP, Action.STOP_AND_KILL):
            time.sleep(self.event.stopped_s)
            begin = time.monotonic_ns()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if action is Action.STOP else signal.SIGKILL)
        self._observe(observers, begin)

    def _take_away(self, pid: int) -> None:
        """Let a process have no more memory or descriptors, or nobody any space on the disk, until the script ends."""
        if self.event.action is Action.DISK and self.place.has_own_disk:
            ballast = self.place.cache / "ballast"
            fill(ballast)
            self.undo.callback(ballast.unlink)
            return
        kind, now = {
            Action.MEMORY: (resource.RLIMIT_AS, _address_space(pid)),
            Action.DESCRIPTORS: (resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{pid}/fd"))),
            Action.DISK: (resource.RLIMIT_FSIZE, 0),
        }[self.event.action]
        with _as_user_of(pid):
            before = resource.prlimit(pid, kind)
            resource.prlimit(pid, kind, (now, before[1]))
        self.undo.callback(_restore, pid, kind, before)

    # -- what the other side sees -------------------------------------------------------------------------------------

    def _observers(self, pid: int) -> list[tuple[str, int]]:
        """Open the processes that must end if `pid` is killed."""
        if self.event.action not in (Action.KILL, Action.STOP_AND_KILL):
            return []
        role, wanted = self.outcome.victim, []
        if role is Role.CLIENT:
            wanted = [("client", each) for each in self.place.of_role(Role.WORKER) if each not in self._all_others()]
        elif role is Role.SUPERVISOR:
            ends = (Role.COMPILE_SERVER, Role.REPOSITORY)
            wanted = [("supervisor", each) for role in ends for each in self.place.of_role(role)]
        opened = []
        for name, each in wanted:
            with suppress(OSError):
                opened.append((name, os.pidfd_open(each)))
        return opened

    def _all_others(self) -> set[int]:
        return {self.place.neighbour_worker, *self.others, *self._workers_of_repository()}

    def _workers_of_repository(self) -> list[int]:
        repositories = set(self.place.of_role(Role.REPOSITORY))
        return [pid for pid in self.place.of_role(Role.WORKER) if client_of(pid) in repositories]

    def _observe(self, observers: Sequence[tuple[str, int]], begin_ns: int) -> None:
        """Measure until the last of the processes has exited."""
        self.begin_ns = begin_ns
        for name, pidfd in observers:
            if has_exited(pidfd, SETTLE_S):
                seen = (time.monotonic_ns() - begin_ns) / 1e6
                self.outcome.seen_ms[name] = max(seen, self.outcome.seen_ms.get(name, 0.0))
            else:
                self.outcome.findings.append(f"hang: a process does not end after the death of its {name}")
            os.close(pidfd)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Wait for the end of the script, and evaluate its calls."""
        if not self._is_finished():
            with suppress(ProcessLookupError):
                os.kill(self.client.pid, signal.SIGUSR1)
            self.client.has_exited(1.0)
            self.outcome.findings.append(f"hang: the client has not ended {self.event.script}")
            return
        with suppress(EOFError, OSError):
            if self.client.connection.poll():
                self.calls = self.client.connection.recv()
        self._evaluate()

    def _is_finished(self) -> bool:
        """Wait until the client has sent its calls, which may be more than a pipe takes, or has exited."""
        poll = select.poll()
        poll.register(self.client.connection.fileno(), select.POLLIN)
        poll.register(self.client.pidfd, select.POLLIN)
        return bool(poll.poll(SCRIPT_S * 1000))

    def _evaluate(self) -> None:
        outcome, allowed = self.outcome, allowed_statuses(self.event, self.outcome.victim)
        for call in self.calls:
            outcome.statuses[f"{call.name}: {call.status}"] += 1
            text = f"{call.name}: {call.status}: {call.text}"
            if call.status == WRONG:
                outcome.findings.append(f"wrong output: {text}")
            elif call.end_ns - call.begin_ns > (CALL_S + LATE_S) * 1e9 * _CALLS_IN_ONE.get(call.name, 1):
                outcome.findings.append(f"hang: {text} after {(call.end_ns - call.begin_ns) / 1e9:.1f} s")
            elif call.status not in allowed:
                outcome.findings.append(f"status: {text}")
        failed = next((call for call in self.calls if call.status == ErrorStatus.DEAD_OBJECT.name), None)
        if failed is not None and outcome.victim is Role.WORKER and self.event.action in _DEADLY:
            outcome.seen_ms["worker"] = (failed.end_ns - max(self.begin_ns, failed.begin_ns)) / 1e6

    def look_around(self, wanted: Traces, is_new_driver: bool) -> None:
        """Compare what there is with what there was before, and check the neighbour and the log."""
        outcome, place = self.outcome, self.place
        if not is_new_driver:
            outcome.findings += [f"left behind: {text}" for text in place.settle(wanted)]
        outcome.neighbour, wrong = place.neighbour_report()
        outcome.findings += [f"neighbour: {text}" for text in wrong[:3]]
        if outcome.findings:
            place.log_stacks()
        text = place.new_log()
        if outcome.findings:
            outcome.log = text[-_LOG_CHARACTERS:]
        if self.event.action not in SHORTAGES and ("Traceback" in text or "internal error" in text):
            outcome.findings.append(f"log: {text[-1500:]}")


_DEADLY = (Action.KILL, Action.STOP_AND_KILL)
_CALLS_IN_ONE = {
    "queries": 3, "prepare": 4, "buffers": 5, "rare calls": 3, "reusable execution": 2, "the others": 3,
    **dict.fromkeys(("listing", "change of version", "removal of the model", "failed import"), 4),
}  # fmt: skip
"""How many calls with a time limit of their own are recorded as one."""


def allowed_statuses(event: Event, victim: Role | None) -> set[str]:
    """Return the names of the statuses with which calls may end in an event."""
    status = ErrorStatus
    found = {status.NONE}
    late = {status.MISSED_DEADLINE_TRANSIENT, status.MISSED_DEADLINE_PERSISTENT}
    full = {status.RESOURCE_EXHAUSTED_TRANSIENT, status.RESOURCE_EXHAUSTED_PERSISTENT}
    if event.action in SHORTAGES:
        found |= {status.GENERAL_FAILURE, status.DEAD_OBJECT, status.DEVICE_UNAVAILABLE, *late, *full}
        return {each.name for each in found} | {"OSError", "MemoryError"}
    if event.action in _DEADLY:
        if victim in (Role.WORKER, Role.SUPERVISOR):
            found |= {status.DEAD_OBJECT, status.DEVICE_UNAVAILABLE}
        if victim in (Role.SUPERVISOR, Role.REPOSITORY, Role.IMPORT):
            found |= {status.DEAD_OBJECT, status.DEVICE_UNAVAILABLE, *late}
        if victim in (Role.COMPILE_PROCESS, Role.COMPILE_SERVER):
            found |= {status.GENERAL_FAILURE}
    return {each.name for each in found}


def client_of(worker: int) -> int:
    """Return the process of the client of a worker, 0 if it is unknown: the peer of one of its sockets."""
    with suppress(*GONE):
        for entry in os.listdir(f"/proc/{worker}/fdinfo"):
            with suppress(*GONE):
                found = re.search(r"^Pid:\t(\d+)$", Path(f"/proc/{worker}/fdinfo/{entry}").read_text(), re.MULTILINE)
                if found is not None and int(found[1]) > 0:
                    return int(found[1])
    return 0


def _address_space(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@contextmanager
def _as_user_of(pid: int) -> Iterator[None]:
    """Have the real ids of a process in the block: root of a container may lack what changes the limits of others."""
    status = Path(f"/proc/{pid}/status").read_text()
    uid, gid = (int(re.search(rf"^{name}:\t(\d+)", status, re.MULTILINE)[1]) for name in ("Uid", "Gid"))  # type: ignore[index]
    uids, gids = os.getresuid(), os.getresgid()
    os.setresgid(gid, gid, gids[2])
    os.setresuid(uid, uid, uids[2])
    try:
        yield
    finally:
        os.setresuid(*uids)
        os.setresgid(*gids)


def _restore(pid: int, kind: int, limits: tuple[int, int]) -> None:
    with suppress(*GONE), _as_user_of(pid):
        resource.prlimit(pid, kind, limits)


def fill(path: Path) -> None:
    """Fill the file system of a file with that file."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def run_event(place: Place, event: Event, wanted: Traces) -> tuple[Outcome, bool]:
    """Bring an event about; return what came of it, and whether the driver must be replaced."""
    running = _Running(place, event)
    running.begin_ns = time.monotonic_ns()
    try:
        at_step = running.wait_for_step()
        if at_step is None:
            running.outcome.was_reached = False
        else:
            for pid in running.victims(at_step):
                running.bring_about(pid)
        running.collect()
    finally:
        running.close()
    is_new = running.outcome.victim is Role.SUPERVISOR and event.action in _DEADLY
    place.repository_deaths += running.outcome.victim in (Role.REPOSITORY, Role.IMPORT) and event.action in _DEADLY
    running.look_around(wanted, is_new)
    is_spent = is_new or place.repository_deaths > 2 or bool(running.outcome.findings)
    return running.outcome, is_spent


def run_undisturbed(place: Place, script: str, number: int) -> _Running:
    """Run a script without an event; return what came of it. `number` decides what the script computes."""
    running = _Running(place, Event(number, script, -1, 0.0, Action.DELAY, Role.CLIENT, 0.0))
    try:
        running.collect()
    finally:
        running.close()
    return running


def run_control(place: Place, event: Event, wanted: Traces) -> Outcome:
    """Do what `run_event` does, without the event; the script has to compile as much as that of the event."""
    running = run_undisturbed(place, event.script, _OF_CONTROLS + event.number)
    running.look_around(wanted, False)
    return running.outcome


def record(place: Place, script: str) -> tuple[list[int], list[Call], float]:
    """Run a script without an event; return the numbers of the steps that it passes, its calls, and its duration."""
    before, begin = place.page.counts(), time.monotonic()
    running = run_undisturbed(place, script, 0)
    seconds = time.monotonic() - begin
    place.baseline(0.0)
    after = place.page.counts()
    return [step for step, count in enumerate(after) if count > before[step]], running.calls, seconds
