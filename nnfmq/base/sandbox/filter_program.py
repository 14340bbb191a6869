"""The program by which the kernel decides about each system call of a process: a filter of seccomp(2), in classic BPF.

The kernel runs it for a call whose number and arguments are in `struct seccomp_data`. It finds the call by a binary
search among ranges of numbers, and compares arguments where a rule says so. Since Linux 5.11 the kernel keeps a
bitmap of the numbers that are allowed for any arguments, and does not run the program for them: futex(2), by which
bursts wait, costs what it costs without a filter.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeAlias

from nnfmq.base.sandbox import system_calls
from nnfmq.base.sandbox.system_calls import ALWAYS, OWN_PID, Condition, Permissions, Rule

__all__ = ["ALLOW", "KILL", "MACHINES", "failing", "filter_program"]

ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW
KILL = 0x80000000  # SECCOMP_RET_KILL_PROCESS
_ERRNO = 0x00050000  # SECCOMP_RET_ERRNO
MACHINES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The machines that there is a program for, as `uname -m` names them, and the numbers by which the kernel does."""

_LOAD, _AND, _JUMP, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data
_FIRST_OF_X32 = 0x40000000  # calls of x86-64 with 32-bit pointers, for which the numbers mean something else
_Instruction: TypeAlias = tuple[int, int, int, int]
"""Operation, how far to jump if its condition holds and if not, and its operand: struct sock_filter."""


def failing(number: int) -> int:
    """Return the result of a call that fails with this errno."""
    return _ERRNO | number


def filter_program(machine: str, permissions: Permissions, pid: int) -> bytes:
    """Return the instructions, an array of struct sock_filter, for the process `pid`."""
    return _program(machine, permissions).replace(struct.pack("=I", OWN_PID), struct.pack("=I", pid))


@cache  # a supervisor makes it once for all its workers
def _program(machine: str, permissions: Permissions) -> bytes:
    decisions = _decisions(machine, permissions)
    body = _search(_ranges(decisions))
    program = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_IF_EQUAL, 1, 0, MACHINES[machine]),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 0, 1, _FIRST_OF_X32),
        (_RETURN, 0, 0, KILL),
        *body,
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


_Decision: TypeAlias = int | Rule
"""The result of a call, or the conditions on which it is allowed."""


def _decisions(machine: str, permissions: Permissions) -> dict[int, _Decision]:
    """Return the decision about each number that is not refused with EPERM."""
    numbers = system_calls.numbers(machine, system_calls.CONDITIONAL)
    found: dict[int, _Decision] = {}
    for number in system_calls.numbers(machine, *system_calls.allowed_groups(permissions)).values():
        found[number] = ALLOW
    for number in system_calls.numbers(machine, *system_calls.KILLED).values():
        found[number] = KILL
    for number in system_calls.numbers(machine, system_calls.UNKNOWN).values():
        found[number] = failing(errno.ENOSYS)
    for name, rule in system_calls.conditions(permissions).items():
        found[numbers[name]] = ALLOW if rule is ALWAYS else rule
    return found


def _ranges(decisions: Mapping[int, _Decision]) -> list[tuple[int, _Decision]]:
    """Return the first number of each range with one decision, in ascending order."""
    refused = failing(errno.EPERM)
    ranges: list[tuple[int, _Decision]] = []
    for number in range(system_calls.NEWEST + 1):
        decision = decisions.get(number, refused)
        if not ranges or ranges[-1][1] != decision:
            ranges.append((number, decision))
    return [*ranges, (system_calls.NEWEST + 1, failing(errno.ENOSYS))]


def _search(ranges: Sequence[tuple[int, _Decision]]) -> list[_Instruction]:
    """Return instructions that decide about the loaded number, which is in one of the ranges."""
    if len(ranges) == 1:
        decision = ranges[0][1]
        return [(_RETURN, 0, 0, decision)] if isinstance(decision, int) else _checks(decision)
    middle = len(ranges) // 2
    left, right = _search(ranges[:middle]), _search(ranges[middle:])
    # Conditional jumps reach 255 instructions, others any number.
    return [(_IF_AT_LEAST, 0, 1, ranges[middle][0]), (_JUMP, 0, 0, len(left)), *left, *right]


def _checks(rule: Rule) -> list[_Instruction]:
    """Return instructions that allow a call if all conditions of one alternative hold, else refuse it."""
    result: list[_Instruction] = []
    for alternative in rule:
        result += _alternative(alternative)
    return [*result, (_RETURN, 0, 0, failing(errno.EPERM))]


def _alternative(conditions: Sequence[Condition]) -> list[_Instruction]:
    """Return instructions that allow a call, or go on behind them."""
    result: list[_Instruction] = [(_RETURN, 0, 0, ALLOW)]
    for condition in reversed(conditions):
        result = [*_condition(condition, len(result)), *result]
    return result


def _condition(condition: Condition, rest: int) -> list[_Instruction]:
    """Return instructions that go on if the condition holds, and otherwise skip `rest` more."""
    offset = _ARGUMENTS_AT + 8 * condition.argument + 4 * condition.is_high  # both machines are little-endian
    result: list[_Instruction] = [(_LOAD, 0, 0, offset)]
    if condition.mask != 0xFFFFFFFF:
        result.append((_AND, 0, 0, condition.mask))
    count = len(condition.values)
    for index, value in enumerate(condition.values):
        left = count - index - 1
        if condition.is_one:  # the last one that differs skips the rest
            result.append((_IF_EQUAL, left, 0 if left else rest, value & 0xFFFFFFFF))
        else:
            result.append((_IF_EQUAL, left + rest, 0, value & 0xFFFFFFFF))
    return result
