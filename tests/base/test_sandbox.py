"""The filter of system calls, run as the kernel would run it, and what a kernel without a part of the sandbox means."""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path

import pytest

from nnfmq.base import settings
from nnfmq.base.sandbox import kernel, sandbox, system_calls
from nnfmq.base.sandbox.filter_program import ALLOW, KILL, MACHINES, failing, filter_program
from nnfmq.base.sandbox.system_calls import Permissions
from nnfmq.hal.errors import DeviceUnavailable

PID = 4321
EPERM, ENOSYS = failing(errno.EPERM), failing(errno.ENOSYS)
ALL_GROUPS = (
    *system_calls.allowed_groups(Permissions(writes=True, connects=True)),
    *system_calls.KILLED,
    system_calls.CONDITIONAL,
    system_calls.UNKNOWN,
)
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
READ, WRITE, EXEC, ANONYMOUS = 1, 2, 4, 0x20


def decide(program: bytes, machine: int, number: int, *arguments: int) -> int:
    """Return what the kernel does about a call: an interpreter of the instructions of classic BPF that are used."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, machine, 0, *(value & 2**64 - 1 for value in padded))
    at, register = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("<HBBI", program, at)
        at += 8
        match code:
            case 0x20:  # BPF_LD | BPF_W | BPF_ABS
                (register,) = struct.unpack_from("<I", data, operand)
            case 0x54:  # BPF_ALU | BPF_AND | BPF_K
                register &= operand
            case 0x05:  # BPF_JMP | BPF_JA
                at += 8 * operand
            case 0x15 | 0x35:  # BPF_JMP | BPF_JEQ or BPF_JGE | BPF_K
                is_true = register == operand if code == 0x15 else register >= operand
                at += 8 * (if_true if is_true else if_false)
            case 0x06:  # BPF_RET | BPF_K
                return operand
            case _:
                raise AssertionError(f"instruction {code:#x}")


def result(name: str, *arguments: int, machine: str = "x86_64", permissions: Permissions = Permissions()) -> int:  # noqa: B008
    """Return what the kernel does about the call `name`."""
    number = system_calls.numbers(machine, *ALL_GROUPS)[name]
    return decide(filter_program(machine, permissions, PID), MACHINES[machine], number, *arguments)


@pytest.mark.parametrize("machine", MACHINES)
def test_each_number_gets_the_decision_of_its_table(machine: str) -> None:
    program = filter_program(machine, Permissions(), PID)
    decisions = {
        **dict.fromkeys(system_calls.numbers(machine, *system_calls.ALLOWED).values(), ALLOW),
        **dict.fromkeys(system_calls.numbers(machine, *system_calls.KILLED).values(), KILL),
        **dict.fromkeys(system_calls.numbers(machine, system_calls.UNKNOWN).values(), ENOSYS),
    }
    conditional = set(system_calls.numbers(machine, system_calls.CONDITIONAL).values())
    for number in set(range(system_calls.NEWEST + 1)) - conditional:
        assert decide(program, MACHINES[machine], number) == decisions.get(number, EPERM), number
    for number in (system_calls.NEWEST + 1, 1000, 0x3FFFFFFF):
        assert decide(program, MACHINES[machine], number) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_no_call_is_in_two_tables(machine: str) -> None:
    numbers = [list(system_calls.numbers(machine, group).values()) for group in ALL_GROUPS]
    together = [number for group in numbers for number in group]
    assert len(together) == len(set(together))
    assert max(together) <= system_calls.NEWEST


def test_every_condition_belongs_to_a_call_of_its_table() -> None:
    names = set(system_calls.numbers("x86_64", system_calls.CONDITIONAL))
    assert set(system_calls.conditions(Permissions(connects=True))) == names
    assert set(system_calls.conditions(Permissions())) == names - {"socket"}


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_machine_end_the_process(machine: str) -> None:
    (other,) = set(MACHINES) - {machine}
    program = filter_program(machine, Permissions(), PID)
    read = system_calls.numbers(machine, *ALL_GROUPS)["read"]
    assert decide(program, MACHINES[other], read) == KILL
    assert decide(program, 0x40000003, read) == KILL  # AUDIT_ARCH_I386
    assert decide(program, MACHINES[machine], read | 0x40000000) == KILL  # x32


@pytest.mark.skipif(not HEADER.exists(), reason="the headers of the C library are not installed")
def test_numbers_are_those_of_the_kernel_s_headers() -> None:
    defined = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", HEADER.read_text()))
    numbers = system_calls.numbers("x86_64", *ALL_GROUPS)
    assert {name: number for name, number in numbers.items() if defined.get(name, str(number)) != str(number)} == {}
    assert len(numbers.keys() & defined.keys()) > 200


DECISIONS: list[tuple[str, tuple[int, ...], int]] = [
    ("mmap", (0, 4096, READ | WRITE, ANONYMOUS), ALLOW),
    ("mmap", (0, 4096, READ | EXEC, 2, 5), ALLOW),  # a file's pages
    ("mmap", (0, 4096, READ | EXEC, 2 | ANONYMOUS), EPERM),
    ("mmap", (0, 4096, READ | WRITE | EXEC, 2, 5), EPERM),
    ("mprotect", (0, 4096, READ), ALLOW),
    ("mprotect", (0, 4096, READ | EXEC), EPERM),
    ("pkey_mprotect", (0, 4096, EXEC, 1), EPERM),
    ("clone", (0x3D0F00,), ALLOW),  # what pthread_create(3) asks for
    ("clone", (17,), EPERM),  # SIGCHLD: fork(2)
    ("clone", (0x3D0F00 | 0x40000000,), EPERM),  # CLONE_NEWNET
    ("kill", (PID, 9), ALLOW),
    ("kill", (PID + 1, 9), EPERM),
    ("kill", (0, 9), EPERM),  # its process group
    ("kill", (-1, 9), EPERM),
    ("tgkill", (PID, PID, 6), ALLOW),
    ("tgkill", (1, 1, 6), EPERM),
    ("fcntl", (0, 4), ALLOW),
    ("fcntl", (0, 4, 0x2000), EPERM),  # O_ASYNC
    ("fcntl", (0, 8, PID), EPERM),  # F_SETOWN
    ("fcntl", (0, 10, 9), EPERM),  # F_SETSIG
    ("fcntl", (0, 15), EPERM),  # F_SETOWN_EX
    ("ioctl", (0, 0x541B), ALLOW),  # FIONREAD
    ("ioctl", (0, 0x5412), EPERM),  # TIOCSTI
    ("socketpair", (1, 5 | 0x80000, 0), ALLOW),  # SOCK_SEQPACKET | SOCK_CLOEXEC
    ("socketpair", (1, 2, 0), EPERM),  # SOCK_DGRAM
    ("socketpair", (2, 5, 0), EPERM),
    ("sendto", (3, 4096, 1, 0, 0, 0), ALLOW),
    ("sendto", (3, 4096, 1, 0, 4096, 16), EPERM),
    ("sendto", (3, 4096, 1, 0, 1 << 32, 16), EPERM),
    ("prctl", (15,), ALLOW),  # PR_SET_NAME
    ("prctl", (4, 1), EPERM),  # PR_SET_DUMPABLE
    ("prctl", (22, 2), EPERM),  # PR_SET_SECCOMP
    ("prlimit64", (0, 7), ALLOW),
    ("prlimit64", (PID + 1, 7), EPERM),
    ("utimensat", (3, 0, 0, 0), ALLOW),
    ("utimensat", (3, 4096, 0, 0), EPERM),
    ("setpriority", (0, 0, 5), ALLOW),
    ("setpriority", (0, PID + 1, 5), EPERM),
    ("setpriority", (2, 0, 5), EPERM),  # PRIO_USER
    ("sched_setaffinity", (0, 8, 4096), ALLOW),
    ("sched_setaffinity", (PID + 1, 8, 4096), EPERM),
    ("socket", (1, 1, 0), EPERM),
    ("connect", (3, 4096, 16), EPERM),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("name", "arguments", "expected"), DECISIONS)
def test_arguments_decide(name: str, arguments: tuple[int, ...], expected: int, machine: str) -> None:
    assert result(name, *arguments, machine=machine) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_permissions_allow_what_they_name(machine: str) -> None:
    code = Permissions(generates_code=True)
    assert result("mprotect", 0, 4096, READ | WRITE | EXEC, machine=machine, permissions=code) == ALLOW
    assert result("mmap", 0, 4096, READ | EXEC, ANONYMOUS, machine=machine, permissions=code) == ALLOW
    assert result("ioctl", 0, 0xC0DE, machine=machine, permissions=Permissions(controls_nodes=True)) == ALLOW
    assert result("ioctl", 0, 0x5412, machine=machine, permissions=Permissions(controls_nodes=True)) == EPERM  # TIOCSTI
    assert result("unlinkat", machine=machine, permissions=Permissions(writes=True)) == ALLOW
    assert result("unlinkat", machine=machine) == EPERM
    client = Permissions(connects=True)
    assert result("socket", 1, 5, 0, machine=machine, permissions=client) == ALLOW
    assert result("socket", 1, 2, 0, machine=machine, permissions=client) == EPERM  # SOCK_DGRAM
    assert result("socket", 2, 1, 0, machine=machine, permissions=client) == EPERM  # AF_INET
    assert result("connect", 3, machine=machine, permissions=client) == ALLOW


# -- kernels that lack a part -----------------------------------------------------------------------------------------


@pytest.fixture
def _old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel seem to have neither Landlock nor a filter."""
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    monkeypatch.setattr(kernel, "supports_filter", lambda: False)


@pytest.mark.usefixtures("_old_kernel")
def test_missing_parts_are_named_and_a_driver_goes_on_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(settings.SANDBOX.variable, "on")
    sandbox.require_parts()
    for words in ("Landlock (Linux 5.13)", "scopes of Landlock (Linux 6.12)", "a filter of system calls"):
        assert f"this kernel lacks {words}" in caplog.text


@pytest.mark.usefixtures("_old_kernel")
def test_a_driver_whose_sandbox_is_required_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SANDBOX.variable, "required")
    with pytest.raises(DeviceUnavailable, match=r"\$NNFMQ_SANDBOX requires a complete sandbox.*Landlock"):
        sandbox.require_parts()


def test_a_kernel_with_the_first_landlock_lacks_its_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 1)
    monkeypatch.setattr(kernel, "supports_filter", lambda: True)
    assert [text.split(" (")[0] for text in sandbox.missing_parts()] == ["scopes of Landlock"]


def test_a_process_with_threads_cannot_enter_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SANDBOX.variable, "required")
    monkeypatch.setattr(os, "listdir", lambda _: ["1", "2"])
    monkeypatch.setattr(sandbox, "_parts", lambda _: [])
    with pytest.raises(DeviceUnavailable, match="threads that were started before"):
        sandbox.enter(sandbox.Sandbox())
