"""The steps at which `tools/chaos.py` disturbs a driver or its clients, and the hooks that report them.

A step is a message of a protocol that is sent or has been received, or the beginning or the end of a function in the
table FUNCTIONS. The messages are those of the protocols' own tables, so a new message is a step.

nnfmq has no code for this. `install` replaces functions in the process that calls it, which is a client of the tool, or
a process that `chaos_program.py` has started; those that it forks inherit the replacements. A process that is started
in another way runs the same instructions as without the tool.

A process reports its steps in a page of shared memory, and makes no system call for that, so that no sandbox hinders
it. At the step that the tool has chosen it waits there until the tool has done what it wants to do.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import nnfmq.serialize.message_codec

# ----------------------------------------------------------------------------------------------------------------------
# The tables


class Role(IntEnum):
    """What a process is to the driver."""

    CLIENT = 1
    WORKER = 2
    SUPERVISOR = 3
    COMPILE_SERVER = 4
    COMPILE_PROCESS = 5
    REPOSITORY = 6
    IMPORT = 7
    UNFINISHED = 8
    """The process that goes on with a compilation after its client has left."""
    CACHE_WRITER = 9
    """A child process of the supervisor that writes one file of the cache."""

    @property
    def text(self) -> str:
        """The name that tables show."""
        return self.name.lower().replace("_", " ")


class Step(NamedTuple):
    """A step, and the process that passes it."""

    name: str
    phase: str
    role: Role


class FunctionStep(NamedTuple):
    """The beginning or the end of a function, `module:qualified.name`, as a step."""

    name: str
    phase: str
    role: Role
    target: str
    is_end: bool = False


def _both(name: str, phase: str, role: Role, target: str) -> tuple[FunctionStep, FunctionStep]:
    return FunctionStep(f"{name} begins", phase, role, target), FunctionStep(f"{name} ends", phase, role, target, True)


_CACHE, _COMPILATION = "nnfmq.driver.cache", "nnfmq.driver.compilation"
_BURST = "nnfmq.driver.execution.burst"
FUNCTIONS: tuple[FunctionStep, ...] = (
    *_both("connecting to the socket", "connect", Role.CLIENT, "nnfmq.base.channel:Channel.connect"),
    FunctionStep("a Hello is handled", "connect", Role.SUPERVISOR,
        "nnfmq.driver.process.supervisor:Supervisor._on_hello"),
    *_both("forking a worker", "connect", Role.SUPERVISOR, "nnfmq.driver.process.workers:WorkerProcesses._fork"),
    FunctionStep("a worker begins", "connect", Role.WORKER, "nnfmq.driver.process.worker:main"),
    FunctionStep("a session begins", "connect", Role.WORKER, "nnfmq.driver.session.session:run_session"),
    FunctionStep("Refused is sent", "connect", Role.SUPERVISOR, "nnfmq.driver.process.pending_clients:reject"),
    *_both("receiving a model", "prepare", Role.WORKER, "nnfmq.driver.session.model_calls:receive_model"),
    *_both("compiling in processes", "compile", Role.WORKER, f"{_COMPILATION}.jobs:compile_in_processes"),
    *_both("passing on a compile request", "compile", Role.SUPERVISOR,
        f"{_COMPILATION}.server:CompileRelay._pass_on"),
    *_both("forking a compile process", "compile", Role.COMPILE_SERVER,
        f"{_COMPILATION}.server:_Compilation.start_process"),
    *_both("compiling kernels", "compile", Role.COMPILE_PROCESS, f"{_COMPILATION}.process:compile_description"),
    *_both("creating a burst", "configure", Role.WORKER, f"{_BURST}:BurstServer.create"),
    *_both("mapping a memory", "map", Role.WORKER, f"{_BURST}:CachingBurstExecutor.add_cache_entry"),
    *_both("exchanging packets", "send", Role.CLIENT, "nnfmq.client.burst.channel:BurstChannel.exchange"),
    *_both("handling a packet", "execute", Role.WORKER, f"{_BURST}:BurstServer._handle"),
    *_both("executing", "execute", Role.WORKER, "nnfmq.driver.execution.prepared_model:MappedExecution.run"),
    *_both("encoding a result", "reply", Role.WORKER, f"{_BURST}:BurstServer.encode"),
    *_both("freeing a memory", "free", Role.WORKER, f"{_BURST}:BurstServer.free_memory"),
    *_both("closing a connection", "disconnect", Role.CLIENT,
        "nnfmq.client.connection.connection:Connection.close"),
    FunctionStep("a session ends", "disconnect", Role.WORKER, "nnfmq.driver.session.session:Session.stop"),
    *_both("reaping a worker", "disconnect", Role.SUPERVISOR,
        "nnfmq.driver.process.workers:WorkerProcesses._on_exit"),
    *_both("storing a program", "cache write", Role.WORKER, f"{_CACHE}.programs:CacheEntry.store"),
    *_both("writing a cache file", "cache write", Role.WORKER, f"{_CACHE}.files:write_file"),
    *_both("copying a program", "cache write", Role.CACHE_WRITER, f"{_CACHE}.programs:_write_entries"),
    *_both("removing old programs", "cache write", Role.CACHE_WRITER, f"{_CACHE}.programs:_evict"),
    *_both("saving to a client's files", "cache write", Role.WORKER, f"{_CACHE}.files:save_files"),
    *_both("reading a client's files", "prepare", Role.WORKER, f"{_CACHE}.files:read_files"),
    FunctionStep("a load begins", "version change", Role.REPOSITORY,
        "nnfmq.repository.repository:ModelRepository._begin_load"),
    *_both("importing in a process", "version change", Role.REPOSITORY,
        "nnfmq.repository.version_import:import_in_process"),
    *_both("importing a version", "version change", Role.IMPORT, "nnfmq.repository.version_import:_result"),
    *_both("preparing a version", "version change", Role.REPOSITORY,
        "nnfmq.repository.models:DriverModels.prepare"),
    *_both("publishing a version", "version change", Role.REPOSITORY,
        "nnfmq.repository.server:RepositoryServer.publish"),
    *_both("withdrawing a model", "version change", Role.REPOSITORY,
        "nnfmq.repository.server:RepositoryServer.withdraw"),
    *_both("moving to a version", "version change", Role.CLIENT, "nnfmq.client.named.models:NamedModels._move"),
)  # fmt: skip
_BECOMES: Mapping[str, Role] = {
    "nnfmq.driver.process.worker:main": Role.WORKER,
    f"{_COMPILATION}.server:_Server.run": Role.COMPILE_SERVER,
    f"{_COMPILATION}.process:CompileProcess.run": Role.COMPILE_PROCESS,
    f"{_CACHE}.programs:copy_entries": Role.CACHE_WRITER,
}
"""Functions with which a forked process gets a role of its own."""
_PHASES: Mapping[str, str] = {
    **dict.fromkeys(("Hello", "HelloReply", "Refused"), "connect"),
    **dict.fromkeys(("Goodbye", "ReleaseModel", "CloseBurst"), "disconnect"),
    **dict.fromkeys(("ConfigureBurst", "BurstConfigured", "ConfigureAidlBurst"), "configure"),
    **dict.fromkeys(("GetMemories", "Memories"), "map"),
    **dict.fromkeys(("FreeMemory", "ReleaseMemoryResource", "ReleaseBuffer", "ReleaseExecution"), "free"),
    **dict.fromkeys(("PrepareModel", "PrepareModelFromCache", "PreparedModelReady", "PreparationProgress"), "prepare"),
    **dict.fromkeys(("Lookup", "Publish", "Release", "Invalidate", "Found", "NotFound", "Store"), "cache write"),
    **dict.fromkeys(("OpenModel", "ModelOpened", "ListModels", "ModelList", "VersionChanged"), "version change"),
    **dict.fromkeys(("ImportedModel", "ImportFailed"), "version change"),
}
"""The phase of a message; that of others is "execute"."""
NEVER_SENT: Mapping[str, str] = {
    "Invalidate": "a worker sends it only if another worker has published wrong bytes",
    "GoOn": "a worker sends it only if its client leaves while a model is compiled in the background",
    "GoAway": "a driver sends it only when it ends or is replaced",
    "Leave": "a client sends it only to a driver that ends or is replaced",
}
"""Messages that no client of the tool brings about, and why."""
OF_SEVERAL_USERS, OF_ONE_USER = ("OpenEntry", "OpenStatistics", "Opened"), ("CopyPages", "PagesCopied")
"""Messages that workers send, or get, only of a driver for several users, or for one."""


@dataclass(frozen=True)
class Protocol:
    """A protocol: the messages that each side may send, and the processes at each end."""

    name: str
    senders: Mapping[Any, Collection[type]]
    roles: Mapping[Enum, tuple[Role, Role]]
    """Sender → the role of the process that sends, and of the one that receives."""


@functools.cache
def protocols() -> tuple[Protocol, ...]:
    """Return the protocols between the processes, with the tables of messages that the code itself uses."""
    from nnfmq.driver.cache import shared
    from nnfmq.repository import version_import
    from nnfmq.serialize import control_protocol, repository_protocol

    peer, repository = control_protocol.PeerRole, repository_protocol.RepositoryRole
    cache, child = shared.Sender, version_import._Sender
    return (
        Protocol("control", {role: control_protocol.message_types_of(role) for role in peer}, {
            peer.CLIENT: (Role.CLIENT, Role.WORKER), peer.DRIVER: (Role.WORKER, Role.CLIENT)}),
        Protocol("model repository", repository_protocol.SENDERS, {
            repository.CLIENT: (Role.CLIENT, Role.REPOSITORY), repository.REPOSITORY: (Role.REPOSITORY, Role.CLIENT)}),
        Protocol("shared cache", _senders_of(shared._codec), {
            cache.WORKER: (Role.WORKER, Role.SUPERVISOR), cache.SUPERVISOR: (Role.SUPERVISOR, Role.WORKER)}),
        Protocol("import", _senders_of(version_import._codec), {child.CHILD: (Role.IMPORT, Role.REPOSITORY)}),
    )  # fmt: skip


def _senders_of(codec: Any) -> Mapping[Enum, Collection[type]]:
    """Return the messages that each side may send, which a codec has in the types of its decoders."""
    found: dict[Enum, Collection[type]] = {}
    for sender, decoder in codec._decoders.items():
        found[sender] = getattr(decoder.type, "__args__", (decoder.type,))
    return found


@functools.cache
def steps() -> tuple[Step, ...]:
    """Return all steps. Their numbers are their places."""
    found = [step for protocol in protocols() for step in _message_steps(protocol)]
    found += [Step(step.name, step.phase, step.role) for step in FUNCTIONS]
    return tuple(dict.fromkeys(found))


def steps_of_others(serves_several: bool) -> set[int]:
    """Return the numbers of the steps that a driver does not pass which serves several users, or one."""
    others = OF_ONE_USER if serves_several else OF_SEVERAL_USERS
    return {number for number, step in enumerate(steps()) if step.name.split()[0] in others}


def _message_steps(protocol: Protocol) -> Iterator[Step]:
    for sender, kinds in protocol.senders.items():
        sends, receives = protocol.roles[sender]
        for name in (kind.__name__ for kind in kinds):
            phase = _PHASES.get(name, "execute")
            if name in NEVER_SENT:
                continue
            if name != "Refused":  # which the supervisor sends, by a function of the table
                yield Step(f"{name} is sent", phase, sends)
            yield Step(f"{name} has been received", phase, receives)


# ----------------------------------------------------------------------------------------------------------------------
# The page


PAGE_VARIABLE = "CHAOS_PAGE"
"""The file of the page. `chaos_program.py` reads the variable, and nnfmq does not."""
_ARMED, _STATE, _PID, _TIME = range(4)
_SPARED, _SPARED_MAX = 8, 56
_COUNTS, _COUNTS_MAX = 64, 4032
_ROLES, _PIDS_MAX = _COUNTS + _COUNTS_MAX, 1 << 22  # Linux has no larger pids
_PAGE_BYTES = 8 * (_ROLES + _PIDS_MAX)  # what nobody writes takes no memory
_IDLE, _WAITS, _RELEASED = range(3)
_TICK_S = 0.0005
HOLD_S = 90.0
"""A process that waits goes on after this time: the tool has ended."""


class Page:
    """The shared memory in which processes report their steps and roles. The tool creates it; others open it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _PAGE_BYTES)
            self._words = memoryview(mmap.mmap(fd, _PAGE_BYTES)).cast("q")
        finally:
            os.close(fd)

    # -- for the tool -------------------------------------------------------------------------------------------------

    def spare(self, pids: Sequence[int]) -> None:
        """Let no step of these processes count, and none of them wait: they are no part of the script."""
        for place in range(_SPARED_MAX):
            self._words[_SPARED + place] = pids[place] if place < len(pids) else 0

    def arm(self, number: int) -> None:
        """Let the next process that reaches the step wait there."""
        self._words[_STATE] = _IDLE
        self._words[_ARMED] = number + 1

    def waiting(self) -> tuple[int, int] | None:
        """Return the pid of the process that waits at the step, and since when (monotonic clock, ns)."""
        words = self._words
        return (words[_PID], words[_TIME]) if words[_STATE] == _WAITS else None

    def release(self) -> None:
        """Let the process go on, and no other one wait."""
        self._words[_ARMED] = 0
        self._words[_STATE] = _RELEASED

    def role_of(self, pid: int) -> Role | None:
        """Return the role of a process, None if it has reported none."""
        word = self._words[_ROLES + pid]
        return Role(word) if word else None

    def counts(self) -> list[int]:
        """Return how often each step was passed since the page was created."""
        return list(self._words[_COUNTS : _COUNTS + len(steps())])

    # -- for the processes --------------------------------------------------------------------------------------------

    def report_role(self, role: Role) -> None:
        """Report the role of the calling process."""
        self._words[_ROLES + os.getpid()] = role

    def report_step(self, number: int) -> None:
        """Report a step of the calling process, if it has the step's role; block if the tool wants that."""
        words, pid = self._words, os.getpid()
        is_spared = pid in words[_SPARED : _SPARED + _SPARED_MAX].tolist()
        if is_spared or self.role_of(pid) is not steps()[number].role:
            return
        words[_COUNTS + number] += 1
        if words[_ARMED] == number + 1 and words[_STATE] == _IDLE:
            self._wait(pid)

    def _wait(self, pid: int) -> None:
        words = self._words
        words[_PID], words[_TIME] = pid, time.monotonic_ns()
        words[_STATE] = _WAITS
        end = time.monotonic() + HOLD_S
        while words[_STATE] == _WAITS and time.monotonic() < end:
            _sleep(_TICK_S)


_sleep = time.sleep


# ----------------------------------------------------------------------------------------------------------------------
# The hooks


class _Hooks:
    def __init__(self, page: Page) -> None:
        self.page = page
        self._numbers = {(step.name, step.role): number for number, step in enumerate(steps())}
        self._by_name = {step.name: number for number, step in enumerate(steps())}
        self._own_sender: dict[Role, set[Enum]] = {}
        for protocol in protocols():
            for sender, (sends, _) in protocol.roles.items():
                self._own_sender.setdefault(sends, set()).add(sender)

    def patch_codec(self) -> None:
        """Report every message of every protocol that this process encodes or decodes."""
        codec: Any = nnfmq.serialize.message_codec.MessageCodec
        encode, decode = codec.encode, codec.decode

        @functools.wraps(encode)
        def reporting_encode(own: Any, message: Any) -> bytes:
            self._report(f"{type(message).__name__} is sent")
            return bytes(encode(own, message))

        @functools.wraps(decode)
        def reporting_decode(own: Any, data: Any, *, sender: Enum, fds: int | None = 0) -> Any:
            message = decode(own, data, sender=sender, fds=fds)
            # The control protocol decodes what it has encoded, as a check.
            if sender not in self._own_sender.get(self.page.role_of(os.getpid()) or Role.CLIENT, ()):
                self._report(f"{type(message).__name__} has been received")
            return message

        codec.encode, codec.decode = reporting_encode, reporting_decode

    def _report(self, name: str) -> None:
        number = self._by_name.get(name)
        if number is not None:
            self.page.report_step(number)

    def patch_function(self, target: str) -> None:
        """Report the steps of a function, and the role of the process if it gets one there."""
        holder, name, original = find(target)
        begins = [self._number(step) for step in FUNCTIONS if step.target == target and not step.is_end]
        ends = [self._number(step) for step in FUNCTIONS if step.target == target and step.is_end]
        role, page = _BECOMES.get(target), self.page
        kind = type(original)
        function: Callable[..., Any] = getattr(original, "__func__", original)

        @functools.wraps(function)
        def reporting(*words: Any, **options: Any) -> Any:
            if role is not None:
                page.report_role(role)
            for number in begins:
                page.report_step(number)
            result = function(*words, **options)
            for number in ends:
                page.report_step(number)
            return result

        replacement = kind(reporting) if kind in (classmethod, staticmethod) else reporting
        setattr(holder, name, replacement)
        _replace_imported(original, replacement)

    def _number(self, step: FunctionStep) -> int:
        return self._numbers[step.name, step.role]


def find(target: str) -> tuple[Any, str, Any]:
    """Import a function; return the module or class that has it, its name there, and what is stored under the name."""
    module, _, path = target.partition(":")
    holder: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        holder = getattr(holder, each)
    return holder, name, vars(holder)[name]


def _replace_imported(original: object, replacement: object) -> None:
    """Replace a function in the modules that have imported it by name."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "nnfmq"]:
        for name in [name for name, value in vars(module).items() if value is original]:
            setattr(module, name, replacement)


def install(page: Page, role: Role) -> None:
    """Report the steps of this process, and of those that it forks, in `page`. Call it before it connects or serves."""
    hooks = _Hooks(page)
    hooks.patch_codec()
    for module in ("control_protocol", "repository_protocol"):
        _bind_codec_again(f"nnfmq.serialize.{module}")
    _bind_codec_again("nnfmq.driver.cache.shared")
    for target in dict.fromkeys((*_BECOMES, *(step.target for step in FUNCTIONS))):
        with suppress(ImportError):  # of a part of nnfmq that cannot run here
            hooks.patch_function(target)
    page.report_role(role)


def _bind_codec_again(name: str) -> None:
    """Let a module, and those that have imported them, use the codec's replaced methods instead of the bound ones."""
    module = importlib.import_module(name)
    for method in ("encode", "decode"):
        bound = getattr(module, method)
        if getattr(bound, "__self__", None) is module._codec:
            replacement = getattr(module._codec, method)
            setattr(module, method, replacement)
            _replace_imported(bound, replacement)
