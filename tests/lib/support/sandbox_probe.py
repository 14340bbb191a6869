"""A device of a plug-in that tries what no worker may: one act for each model.

The model is RELU of as many floats as the number of the act, counted from 1. What the kernel says is the text of the
error with which the model's preparation fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import nnfmq
from nnfmq.hal.errors import GeneralFailure
from support.models import relu_model
from support.plugins import add_plugin

DEVICE = "test-probe"
SOURCE = '''
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import signal
import socket

from nnfmq.driver.devices.device import DeviceBase, SandboxNeeds
from nnfmq.hal.errors import GeneralFailure

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
LIBC.mremap.restype = ctypes.c_void_p
LIBC.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
ARGUMENTS = {{}}
PAGE = mmap.PAGESIZE
X86 = platform.machine() == "x86_64"


def call(result):
    if result == -1 or result == 2**64 - 1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def memory(protection):
    return call(LIBC.mmap(None, PAGE, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))


def memfd_code(code):
    """Map machine code from a file that this process has written: the filter cannot tell it from a library."""
    fd = os.memfd_create("code")
    os.write(fd, code)
    address = LIBC.mmap(None, PAGE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0)
    return ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 4)(call(address))


def from_machine_code(number, *arguments):
    """Make a system call by an instruction of this process's own."""
    x86 = bytes.fromhex("4889f8 4889f7 4889d6 4889ca 0f05 c3")
    arm = bytes.fromhex("e80300aa e00301aa e10302aa e20303aa 010000d4 c0035fd6")
    result = memfd_code(x86 if X86 else arm)(number, *arguments, *(0,) * (3 - len(arguments)))
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def write(path):
    with open(path, "w") as file:
        file.write("written")


def own(fd):
    fcntl.fcntl(fd, fcntl.F_SETOWN, ARGUMENTS["victim"])


def fork():
    if os.fork() == 0:
        os._exit(0)


def fork_by_clone():
    return call(LIBC.syscall(56 if X86 else 220, signal.SIGCHLD, 0, 0, 0, 0))


def send_to_abstract_address():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.connect(ARGUMENTS["abstract"])


def text(path):
    KEPT.append(ctypes.create_string_buffer(os.fsencode(path)))
    return ctypes.addressof(KEPT[-1])


def send_to_abstract_address_by_machine_code():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = os.fsencode(ARGUMENTS["abstract"])
    from_machine_code(42 if X86 else 203, left.fileno(), text(b"\\1\\0" + name), 2 + len(name))


KEPT = []
OPEN = 257 if X86 else 56
HERE = -100  # AT_FDCWD; 65 is O_WRONLY and O_CREAT
ACTS = {{
    "socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "unix socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET),
    "datagram pair": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "abstract address": send_to_abstract_address,
    "socket from machine code": lambda: from_machine_code(41 if X86 else 198, 2, 1, 0),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {{}}),
    "fork": fork,
    "clone": fork_by_clone,
    "fork from machine code": lambda: from_machine_code(57 if X86 else 220, signal.SIGCHLD if not X86 else 0),
    "exec from machine code": lambda: from_machine_code(59 if X86 else 221, text("/bin/true"), 0, 0),
    "kill from machine code": lambda: from_machine_code(62 if X86 else 129, ARGUMENTS["victim"], signal.SIGKILL),
    "abstract address from machine code": send_to_abstract_address_by_machine_code,
    "read a home file from machine code": lambda: from_machine_code(OPEN, HERE, text(ARGUMENTS["secret"]), 0),
    "write the cache from machine code": lambda: from_machine_code(OPEN, HERE, text(ARGUMENTS["cache"]), 65),
    "executable memory from machine code": lambda: from_machine_code(10 if X86 else 226, memory(3), PAGE, 5),
    "kill a worker": lambda: os.kill(ARGUMENTS["victim"], signal.SIGKILL),
    "probe the supervisor": lambda: os.kill(os.getppid(), 0),
    "kill by a pidfd": lambda: os.pidfd_open(ARGUMENTS["victim"]),
    "own a descriptor": lambda: own(0),
    "read a home file": lambda: open(ARGUMENTS["secret"]).read(),
    "read another process": lambda: open("/proc/%d/maps" % ARGUMENTS["victim"]).read(),
    "list processes": lambda: os.listdir("/proc"),
    "write its own memory file": lambda: os.open("/proc/self/mem", os.O_RDWR),
    "write a file": lambda: write(ARGUMENTS["file"]),
    "write the cache": lambda: write(ARGUMENTS["cache"]),
    "remove from the cache": lambda: os.unlink(ARGUMENTS["cached"]),
    "change a mode": lambda: os.chmod(ARGUMENTS["cached"], 0o777),
    "change the key": lambda: os.truncate(ARGUMENTS["key"], 0),
    "executable anonymous memory": lambda: memory(mmap.PROT_EXEC),
    "writable and executable memory": lambda: memory(mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC),
    "make memory executable": lambda: call(LIBC.mprotect(memory(mmap.PROT_READ | mmap.PROT_WRITE), PAGE, 5)),
    "enlarge memory": lambda: call(LIBC.mremap(memory(mmap.PROT_READ | mmap.PROT_WRITE), PAGE, 2 * PAGE, 1)),
    "dumpable again": lambda: call(LIBC.prctl(4, 1, 0, 0, 0)),
    "type in a terminal": lambda: fcntl.ioctl(0, 0x5412, b"x"),
    "another's limits": lambda: call(LIBC.syscall(302 if X86 else 261, ARGUMENTS["victim"], 7, 0, 0)),
    "system V memory": lambda: call(LIBC.syscall(29 if X86 else 194, 0, PAGE, 0o1777)),
}}
DEADLY = {{
    "ptrace": lambda: LIBC.ptrace(16, ARGUMENTS["victim"], 0, 0),
    "memory of a process": lambda: LIBC.syscall(310 if X86 else 270, ARGUMENTS["victim"], 0, 0, 0, 0, 0),
    "namespace": lambda: LIBC.unshare(0x10000000),
    "mount": lambda: LIBC.mount(b"none", b"/mnt", b"tmpfs", 0, 0),
    "bpf": lambda: LIBC.syscall(321 if X86 else 280, 0, 0, 0),
    "io_uring": lambda: LIBC.syscall(425, 1, 0),
    "userfaultfd": lambda: LIBC.syscall(323 if X86 else 282, 0),
    "perf events": lambda: LIBC.syscall(298 if X86 else 241, 0, 0, 0, 0, 0),
    "keys": lambda: LIBC.syscall(250 if X86 else 219, 0, 0, 0, 0, 0),
    "ptrace from machine code": lambda: from_machine_code(101 if X86 else 117, 16, ARGUMENTS["victim"]),
}}
LAWFUL = {{
    "code from a file": lambda: from_machine_code(39 if X86 else 172) == os.getpid() or 1 / 0,
    "a thread": lambda: __import__("concurrent.futures").futures.ThreadPoolExecutor(1).submit(int).result(),
    "a library": lambda: __import__("ssl"),
    "end by itself": lambda: os.kill(os.getpid(), 0),
}}
ALL = ACTS | DEADLY | LAWFUL


class Probe(DeviceBase):
    name = "{device}"
    sandbox_needs = SandboxNeeds({needs})

    def supports(self, model, subgraph, operation):
        return True

    def compile(self, model):
        (number,) = model.main.operands[model.main.input_indexes[0]].dimensions
        name = list(ALL)[number - 1]
        with open(os.path.join(os.path.dirname(__file__), "arguments.json")) as file:
            ARGUMENTS.update(json.load(file))
        try:
            result = ALL[name]()
        except OSError as error:
            raise GeneralFailure("refused with " + errno.errorcode[error.errno]) from None
        raise GeneralFailure("done: " + name)
'''


def _names(table: str) -> list[str]:
    """Return the names of the acts of a table in the source."""
    body = SOURCE.split(f"\n{table} = {{{{\n")[1].split("\n}}\n")[0]
    return [line.split('"')[1] for line in body.splitlines()]


REFUSED, DEADLY, LAWFUL = map(_names, ("ACTS", "DEADLY", "LAWFUL"))
_ALL = [*REFUSED, *DEADLY, *LAWFUL]


def add_probe(site: Path, needs: str = "") -> None:
    """Install the device, which declares these needs, into the folder `site`."""
    source = SOURCE.format(device=DEVICE, needs=needs)
    add_plugin(site, "nnfmq_probe", source, {"probe": "nnfmq_probe:Probe"}, "nnfmq.devices")


def write_arguments(site: Path, **arguments: object) -> None:
    """Tell the device what its acts are about. Its folder is one that Python imports from, so workers may read it."""
    (site / "arguments.json").write_text(json.dumps(arguments))


def attempt(client: nnfmq.Client, act: str) -> str:
    """Let a worker try an act; return what came of it: `done: ACT`, or `refused with ERRNO`. Raises DeadObject."""
    with pytest.raises(GeneralFailure) as error:
        client.device(DEVICE).prepare(relu_model((_ALL.index(act) + 1,)))
    found = re.search(r"refused with \w+|done: [^'\")]+", str(error.value))
    return found[0] if found else str(error.value)


def attempts(client: nnfmq.Client, acts: Sequence[str]) -> dict[str, str]:
    """Let a worker try several acts; return what came of each."""
    return {act: attempt(client, act) for act in acts}
