"""Checks of source text against the rules of the architecture: layers, one module per side effect, size limits.

Nothing is imported or run. A `Source` is a module's dotted name inside the package (`queue.core`; empty for the
package's own `__init__`) and its text; each rule is a function from a Source to complaints with line numbers. An
import counts anywhere in a module, in a function or under TYPE_CHECKING as well. Of Cython files only the import lines
are read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PACKAGE = "nnfmq"
EVERYTHING = "*"
BOTH_SIDES = ("base", "hal", "queue", "serialize", "operations", "validation", "engines")

LAYERS: dict[str, tuple[str, ...]] = {
    "": ("client", "importers", "model_builder", "queue", "media", "base", "hal"),
    "__main__": ("cli", "driver.process.embedded", "driver.process.worker_program", "driver.compilation.unfinished"),
    "hal": (),
    "base": ("hal",),
    "observe": ("base.cores", "hal"),
    "data": ("hal",),
    "media": ("hal",),
    "queue": ("base", "hal.errors"),
    "serialize": ("base.cores", "hal"),
    "operations": ("hal",),
    "validation": ("hal", "operations"),
    "engines": ("base", "operations", "hal"),
    "importers": (
        "base.memory",
        "base.onnx_fields",
        "base.shared_constants",
        "data",
        "hal",
        "validation",
        "operations",
    ),
    "planning": ("hal", "validation", "operations"),
    "graphs": ("base.verbose_log", "hal", "planning"),
    "model_builder": ("base", "graphs", "hal", "validation", "operations"),
    "recording": ("base", "serialize", "hal"),
    "hosted": (*BOTH_SIDES, "driver"),
    "telemetry": ("base.ownership", "base.settings", "hal"),
    "driver": BOTH_SIDES,
    "client": (*BOTH_SIDES, "importers", "recording", "telemetry", "planning", "model_builder"),
    "nnapi": ("base", "client", "model_builder", "telemetry", "validation.values", "hal"),
    "compat": ("client", "importers", "hal"),
    # A process beside the driver: a client of it, and a server of the models of a directory.
    "repository": ("base", "client", "importers", "serialize", "hal"),
    "serving": ("base", "client", "hal"),
    # What measures and tests the rest. Only commands import it.
    "lab": (*BOTH_SIDES, "client", "importers", "media", "planning", "recording", "data"),
    "cli": (EVERYTHING,),
}
"""Part → what it may import beside itself and `observe`, which every part may."""

CLIENT_LAYERS: tuple[tuple[str, ...], ...] = (
    ("waiting", "task_waiting", "fallback_thread", "connection.garbage"),
    (
        "connection.defaults",
        "connection.late_sends",
        "connection.open_connections",
        "connection.page",
        "connection.embedded",
        "connection.switches",
        "connection.trace",
        "connection.prepare_arguments",
        "connection.cache_directory",
        "connection.driver_start",
        "connection.connection",
        "connection.statistics",
        "named.repository",
    ),
    ("model._copies", "model._pycopies", "model.array_copies", "model.arrays", "model.buffers", "observation"),
    (
        "model.handle",
        "model.array_request",
        "model.array_layouts",
        "connection.recovery",
        "partitioned.plan",
        "partitioned.memory",
    )
    + ("partitioned.handle",),
    (
        "execution",
        "burst",
        "partitioned.controller",
        "partitioned.executions",
        "partitioned.synchronous",
        "partitioned.asynchronous",
        "partitioned.fenced",
        "partitioned.burst",
    ),
    ("model.compiled_model", "model.prepared_model", "model.buffer_allocation", "partitioned.model"),
    ("connection.device", "connection.hosted_choice", "model.cpu_fallback", "named.models"),
    (
        "connection.client",
        "connection.client_compilation",
        "connection.late_client",
        "partitioned.devices",
        "partitioned.compilation",
    ),
    ("connection.connect", "partitioned.runtime", "run"),
)
"""The layers within the client, the lowest first: waits, the control channel, arrays, handles of prepared models,
executions, models, devices, clients, and where an application begins. A module imports its own layer and lower ones."""

EXPLAINED = ("client", "nnapi", "planning", "model_builder")
"""The parts in which an import inside a function has its reason in a comment on its line, or on the one before."""

DOORS: dict[str, tuple[str, ...]] = {
    # The control channel; the stream socket of a collector of telemetry, which speaks JSON lines and no protocol; an
    # HTTP server on loopback, in a process of its own; the datagrams of the service manager's protocol; the listening
    # socket of a gateway, which uvicorn takes.
    "socket": (
        "base.channel",
        "base.service_manager",
        "telemetry.sinks",
        "cli.metrics_endpoint",
        "serving.inference_protocol.listeners",
    ),
    "socketserver": (),
    # Memory of other processes; and private memory for machine code, in engines, which know nothing of other processes.
    "mmap": ("base.memory", "engines.compiled.guard_pages", "engines.compiled.object_code"),
    "posix_ipc": ("base.posix_shm",),
    "ctypes": (
        "queue",
        "engines.memory",
        "engines.compiled._pypool",
        "engines.compiled.guard_pages",
        "engines.compiled.object_code",
        "engines.compiled.target",
        "base.processes",
        "base.sandbox.kernel",
        "base.scheduling",
    ),
    "llvmlite": ("engines.compiled",),
    "multiprocess": ("lab",),
    # The embedded driver, what measures or tests in child processes, and commands that run an application.
    "subprocess": (
        "client.connection",
        "repository.version_import",
        "cli.record",
        "cli.trace_collection",
        "lab",
        "serving.driver_process",
    ),
    "multiprocessing": (),
    "pickle": (),
    "dill": (),
    "cloudpickle": (),
    "marshal": (),
    "shelve": (),
}
"""Module → the only places that may import it."""

CALLS: dict[str, tuple[str, ...]] = {
    "fork": ("driver.process.children",),
    "setresuid": ("base.accounts",),
    "setresgid": ("base.accounts",),
    "setgroups": ("base.accounts",),
    "memfd_create": ("base.memory", "cli.doctor"),  # the doctor asks the kernel whether it can
    # The kernel's scheduler: compile processes yield to executions; the sampler of `nnfmq stress` goes before all load;
    # what the supervisor asks for workers by their clients' classes keeps the niceness.
    "nice": ("base.scheduling",),
    "set_scheduling": ("base.scheduling", "driver.process.client_classes"),
    "setpriority": ("lab.stress.sampler",),
    "sched_setscheduler": (),
    # To none; memory that was writable becomes executable for perf only, which reads no names for that of files.
    "mprotect": ("engines.compiled.guard_pages", "engines.compiled.object_code"),
    "posix_fallocate": ("base.memory",),
    "F_ADD_SEALS": ("base.memory", "cli.doctor"),
    "recvmsg": ("base.channel",),
    "sendmsg": ("base.channel",),
    "recv_fds": ("base.channel",),
    "send_fds": ("base.channel",),
    # Where the log of a driver goes, and in which form.
    "addHandler": ("base.logs",),
    "basicConfig": (),
    "captureWarnings": ("base.logs",),
    "StreamHandler": (),
    # Settings are read in one module: declare a new one in nnfmq/base/settings.py. The others set variables of
    # NumPy's BLAS or another runtime, pass the environment to a child process, or read a variable of another program:
    # $CC, $COLUMNS. A driver that changes its account has the home directory of that one. What a service manager sets
    # for one process is removed. ONNX Runtime reads a variable when it is imported.
    "environ": (
        "base.accounts",
        "base.service_manager",
        "base.settings",
        "base.processes",
        "base.cores",
        "cli.console",
        "cli.record",
        "cli.trace_collection",
        "hosted.onnxruntime",
        "lab",
        "serving.driver_process",
    ),
    "getenv": (),
}
"""Function or constant → the only places that may name it: objects from behind the door get passed around."""

FUNCTION_LINES = 60
MODULE_LINES = 900
EXCUSE = "long because"
"""What the docstring of a module over the limit says, with the reason."""


@dataclass(frozen=True, slots=True)
class Source:
    """A module's name inside the package, and its text."""

    module: str
    text: str
    is_package: bool = False
    is_cython: bool = False

    def tree(self) -> ast.Module:
        """Parse the text; of Cython, what is importing in it."""
        return ast.parse(_import_lines(self.text) if self.is_cython else self.text)


@lru_cache(maxsize=1)
def _nodes(source: Source) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's tree, which is the first; kept for the rules that look at the same module."""
    return tuple(ast.walk(source.tree()))


def _import_lines(text: str) -> str:
    """Keep a Cython file's import lines, each at its own line number."""
    lines = (line.strip().replace("cimport", "import") for line in text.splitlines())
    return "\n".join(line if re.match(r"(from\s+\S+\s+)?import\s+[^(]+$", line) else "" for line in lines)


def sources(root: Path) -> list[Source]:
    """Read every module of the package under `root`."""
    return [_source(root, path) for path in sorted(root.rglob("*.py*")) if path.suffix in (".py", ".pyx")]


def _source(root: Path, path: Path) -> Source:
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    return Source(module, path.read_text(encoding="utf-8"), is_package, path.suffix == ".pyx")


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of everything imported; `from a import b` is a.b."""
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(source, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__"):
            yield from ((node.lineno, word) for word in _first_text(node))


def _base(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    here = [PACKAGE, *source.module.split(".")] if source.module else [PACKAGE]
    up = node.level - source.is_package
    return ".".join([*here[: len(here) - up], *([node.module] if node.module else [])])


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _first_text(call: ast.Call) -> Iterator[str]:
    for argument in call.args[:1]:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def _within(name: str, places: Iterable[str]) -> bool:
    return any(place == EVERYTHING or name == place or name.startswith(f"{place}.") for place in places)


def upward_imports(source: Source) -> Iterator[str]:
    """Return complaints about imports of parts of the package that the table does not allow."""
    part = source.module.split(".")[0]
    if part not in LAYERS:
        yield f"{source.module}: the table of layers has no part {part!r}"
        return
    for line, name in imports(source):
        target = _own(name)
        if target is not None and not _within(target, (*LAYERS[part], part or "*nothing*", "observe")):
            yield f"{source.module or PACKAGE}:{line}: {part or PACKAGE} may not import {name}"


def _own(name: str) -> str | None:
    """Return a name relative to the package, None for another package, '' for names of the package itself."""
    package, _, rest = name.partition(".")
    if package != PACKAGE:
        return None
    return rest if rest.split(".")[0] in LAYERS else ""


def upward_imports_of_the_client(source: Source) -> Iterator[str]:
    """Return complaints about imports of a higher layer of the client, and about its modules without a layer."""
    part, _, module = source.module.partition(".")
    if part != "client" or not module or source.is_package:
        return
    layer = _client_layer(module)
    if layer is None:
        yield f"{source.module}: the table of the client's layers has no such module"
        return
    for line, name in imports(source):
        target = _client_layer((_own(name) or "").removeprefix("client."))
        if target is not None and target > layer:
            yield f"{source.module}:{line}: {name} is in a higher layer of the client"


def _client_layer(module: str) -> int | None:
    """Return the layer of a module of the client, or of what it defines."""
    return next((number for number, places in enumerate(CLIENT_LAYERS) if _within(module, places)), None)


def unexplained_imports(source: Source) -> Iterator[str]:
    """Return complaints about imports inside functions that do not say why they are there."""
    if source.module.split(".")[0] not in EXPLAINED:
        return
    lines = source.text.splitlines()
    functions = [node for node in _nodes(source) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    for node in sorted((n for n in inside if isinstance(n, ast.Import | ast.ImportFrom)), key=lambda n: n.lineno):
        if not any("#" in line for line in lines[max(node.lineno - 2, 0) : node.end_lineno]):
            yield f"{source.module}:{node.lineno}: an import inside a function without its reason"


def cycles(found: Iterable[Source]) -> list[list[str]]:
    """Return the import cycles between modules: strongly connected components (Tarjan), each sorted.

    An import counts wherever it stands, as in `imports`. `from package import module` is an import of the module only.
    """
    graph = import_graph(list(found))
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            start = stack.index(node)
            components.append(sorted(stack[start:]))
            del stack[start:]

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(component for component in components if len(component) > 1)


def import_graph(found: list[Source]) -> dict[str, set[str]]:
    """Return the modules that each module imports; names are those of `Source.module`."""
    modules = {source.module for source in found}
    graph: dict[str, set[str]] = {source.module: set() for source in found}
    for source in found:
        for _, name in imports(source):
            inside = name.removeprefix(f"{PACKAGE}.") if name.startswith(f"{PACKAGE}.") else None
            target = inside if inside in modules else (inside or "").rpartition(".")[0]
            if inside is not None and target in modules and target != source.module:
                graph[source.module].add(target)
    return graph


def back_doors(source: Source) -> Iterator[str]:
    """Return complaints about side effects outside their one module."""
    for line, name in imports(source):
        top = name.split(".")[0]
        if top in DOORS and not _within(source.module, DOORS[top]):
            yield f"{source.module}:{line}: only {_or_nobody(DOORS[top])} may import {top}"
    for line, word in _names(source):
        if word in CALLS and not _within(source.module, CALLS[word]):
            yield f"{source.module}:{line}: only {_or_nobody(CALLS[word])} may use {word}"


def _names(source: Source) -> Iterator[tuple[int, str]]:
    for node in _nodes(source):
        if isinstance(node, ast.expr):
            yield node.lineno, _last_name(node)


def _or_nobody(places: tuple[str, ...]) -> str:
    return " and ".join(places) or "nobody"


def over_the_limits(source: Source) -> Iterator[str]:
    """Return complaints about long modules, modules without docstring, long functions, and swallowed errors."""
    if source.is_cython:
        return
    nodes = _nodes(source)
    tree = nodes[0]
    assert isinstance(tree, ast.Module)
    doc, lines = ast.get_docstring(tree), len(source.text.splitlines())
    if not doc:
        yield f"{source.module or PACKAGE}: no docstring"
    if lines > MODULE_LINES and EXCUSE not in " ".join((doc or "").lower().split()):
        yield f"{source.module}: {lines} lines, and its docstring does not say {EXCUSE!r}"
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > FUNCTION_LINES:
            yield f"{source.module}:{node.lineno}: {node.name}() has {body_lines(node)} lines, over {FUNCTION_LINES}"
        if isinstance(node, ast.ExceptHandler) and _swallows_everything(node):
            yield f"{source.module}:{node.lineno}: every error is swallowed"


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function's body, without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def _swallows_everything(handler: ast.ExceptHandler) -> bool:
    catches_all = handler.type is None or _last_name(handler.type) in ("Exception", "BaseException")
    return catches_all and all(
        isinstance(step, ast.Pass) or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))
        for step in handler.body
    )
