"""The thread team: who computes the units of a step, and how the others learn of it.

One leader, the thread that executes a model, shares each step out and waits for it; helpers poll a *mail* word each
for a bounded time and then sleep on it. Nobody waits for a helper that sleeps: the leader wakes it and goes on alone
until it is there. So a step costs a few stores and loads for each helper, an idle team costs nothing, and a team that
gets no processor little more than no team. Results do not depend on who computes what, since units do not overlap.

    mail  0 polling, nothing to do    1 asleep    2 work is in the slot    3 taken by the leader    4 leave

Steps are records of four words: function, table of addresses, units, and whether sharing them out is worth it. The two
functions are below in LLVM's assembly, which has the atomic operations; they are compiled once in a process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache

import numpy as np

from nnfmq.engines.compiled.objects import Linker, host_target, object_of_assembly

__all__ = ["STEP_WORDS", "Team", "the_team"]

STEP_WORDS = 4
_SLOT_WORDS = 16  # two cache lines, which some processors fetch together
_POLLS = 2000
_MOST_HELPERS = 15
_LEAVE = 4

_ASSEMBLY = """
declare i64 @syscall(i64, ...)
declare void @PAUSE

; The team's memory: helpers (i64), then from byte 128 on a slot of 128 bytes for each:
; mail (i32), function, table, begin, end, scratch, taken (i64 each)

define void @serve(ptr %slot, i64 %limit) {
entry:
  %function.at = getelementptr i8, ptr %slot, i64 8
  %table.at = getelementptr i8, ptr %slot, i64 16
  %begin.at = getelementptr i8, ptr %slot, i64 24
  %end.at = getelementptr i8, ptr %slot, i64 32
  %scratch.at = getelementptr i8, ptr %slot, i64 40
  br label %poll
poll:
  %polls = phi i64 [ 0, %entry ], [ 0, %work ], [ 0, %awake ], [ %more, %again ], [ 0, %race ]
  %mail = load atomic i32, ptr %slot acquire, align 4
  switch i32 %mail, label %wait [ i32 2, label %work  i32 4, label %leave ]
wait:
  call void @PAUSE
  %more = add i64 %polls, 1
  %tired = icmp uge i64 %more, %limit
  br i1 %tired, label %sleep, label %again
again:
  br label %poll
work:
  %function = load ptr, ptr %function.at, align 8
  %table = load ptr, ptr %table.at, align 8
  %begin = load i64, ptr %begin.at, align 8
  %end = load i64, ptr %end.at, align 8
  %scratch = load ptr, ptr %scratch.at, align 8
  call void %function(ptr %table, i64 %begin, i64 %end, ptr %scratch)
  store atomic i32 0, ptr %slot release, align 4
  br label %poll
sleep:
  %pair = cmpxchg ptr %slot, i32 0, i32 1 acq_rel acquire
  %slept = extractvalue { i32, i1 } %pair, 1
  br i1 %slept, label %nap, label %race
race:
  br label %poll
nap:
  %ignored = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %slot, i64 128, i64 1, ptr null, ptr null, i64 0)
  %now = load atomic i32, ptr %slot acquire, align 4
  %still = icmp eq i32 %now, 1
  br i1 %still, label %nap, label %awake
awake:
  br label %poll
leave:
  ret void
}

define void @wake(ptr %slot) {
  %ignored = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %slot, i64 129, i64 1, ptr null, ptr null, i64 0)
  ret void
}

define void @run(ptr %steps, i64 %first, i64 %last, ptr %team, ptr %scratch, i64 %stride) {
entry:
  %helpers = load i64, ptr %team, align 8
  %slots = getelementptr i8, ptr %team, i64 128
  %any = icmp slt i64 %first, %last
  br i1 %any, label %step, label %done
step:
  %number = phi i64 [ %first, %entry ], [ %next, %stepped ]
  %offset = mul i64 %number, 32
  %record = getelementptr i8, ptr %steps, i64 %offset
  %table.at = getelementptr i8, ptr %record, i64 8
  %units.at = getelementptr i8, ptr %record, i64 16
  %shared.at = getelementptr i8, ptr %record, i64 24
  %function = load ptr, ptr %record, align 8
  %table = load ptr, ptr %table.at, align 8
  %units = load i64, ptr %units.at, align 8
  %worth = load i64, ptr %shared.at, align 8
  %many = mul i64 %worth, %helpers
  %alone = icmp eq i64 %many, 0
  br i1 %alone, label %single, label %take
single:
  call void %function(ptr %table, i64 0, i64 %units, ptr %scratch)
  br label %stepped

take:
  %helper = phi i64 [ 0, %step ], [ %helper.next, %taken ]
  %count = phi i64 [ 1, %step ], [ %count.next, %taken ]
  %slot.offset = mul i64 %helper, 128
  %slot = getelementptr i8, ptr %slots, i64 %slot.offset
  %pair = cmpxchg ptr %slot, i32 0, i32 3 acq_rel acquire
  %found = extractvalue { i32, i1 } %pair, 0
  %free = extractvalue { i32, i1 } %pair, 1
  %free.word = zext i1 %free to i64
  %taken.at = getelementptr i8, ptr %slot, i64 48
  store i64 %free.word, ptr %taken.at, align 8
  %count.next = add i64 %count, %free.word
  %asleep = icmp eq i32 %found, 1
  br i1 %asleep, label %wake, label %taken
wake:
  store atomic i32 0, ptr %slot release, align 4
  %ignored = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %slot, i64 129, i64 1, ptr null, ptr null, i64 0)
  br label %taken
taken:
  %helper.next = add i64 %helper, 1
  %more = icmp slt i64 %helper.next, %helpers
  br i1 %more, label %take, label %give

give:
  %g = phi i64 [ 0, %taken ], [ %g.next, %given ]
  %share = phi i64 [ 1, %taken ], [ %share.next, %given ]
  %g.offset = mul i64 %g, 128
  %g.slot = getelementptr i8, ptr %slots, i64 %g.offset
  %g.taken.at = getelementptr i8, ptr %g.slot, i64 48
  %g.taken = load i64, ptr %g.taken.at, align 8
  %g.mine = icmp ne i64 %g.taken, 0
  br i1 %g.mine, label %fill, label %given
fill:
  %b.product = mul i64 %units, %share
  %b = sdiv i64 %b.product, %count.next
  %after = add i64 %share, 1
  %e.product = mul i64 %units, %after
  %e = sdiv i64 %e.product, %count.next
  %f.at = getelementptr i8, ptr %g.slot, i64 8
  %t.at = getelementptr i8, ptr %g.slot, i64 16
  %b.at = getelementptr i8, ptr %g.slot, i64 24
  %e.at = getelementptr i8, ptr %g.slot, i64 32
  %s.at = getelementptr i8, ptr %g.slot, i64 40
  store ptr %function, ptr %f.at, align 8
  store ptr %table, ptr %t.at, align 8
  store i64 %b, ptr %b.at, align 8
  store i64 %e, ptr %e.at, align 8
  %own = add i64 %g, 1
  %own.offset = mul i64 %own, %stride
  %own.scratch = getelementptr i8, ptr %scratch, i64 %own.offset
  store ptr %own.scratch, ptr %s.at, align 8
  store atomic i32 2, ptr %g.slot release, align 4
  br label %given
given:
  %share.next = phi i64 [ %share, %give ], [ %after, %fill ]
  %g.next = add i64 %g, 1
  %g.more = icmp slt i64 %g.next, %helpers
  br i1 %g.more, label %give, label %lead
lead:
  %mine = sdiv i64 %units, %count.next
  call void %function(ptr %table, i64 0, i64 %mine, ptr %scratch)
  br label %collect

collect:
  %c = phi i64 [ 0, %lead ], [ %c.next, %collected ]
  %c.offset = mul i64 %c, 128
  %c.slot = getelementptr i8, ptr %slots, i64 %c.offset
  %c.taken.at = getelementptr i8, ptr %c.slot, i64 48
  %c.taken = load i64, ptr %c.taken.at, align 8
  %c.mine = icmp ne i64 %c.taken, 0
  br i1 %c.mine, label %look, label %collected
look:
  %looks = phi i64 [ 0, %collect ], [ %looks.next, %paused ], [ %looks.next, %yielded ]
  %mail = load atomic i32, ptr %c.slot acquire, align 4
  %working = icmp eq i32 %mail, 2
  br i1 %working, label %busy, label %collected
busy:
  %looks.next = add i64 %looks, 1
  %long = icmp ugt i64 %looks.next, 5000
  br i1 %long, label %yield, label %pausing
pausing:
  call void @PAUSE
  br label %paused
paused:
  br label %look
yield:
  %none = call i64 (i64, ...) @syscall(i64 YIELD)
  br label %yielded
yielded:
  br label %look
collected:
  %c.next = add i64 %c, 1
  %c.more = icmp slt i64 %c.next, %helpers
  br i1 %c.more, label %collect, label %stepped

stepped:
  %next = add i64 %number, 1
  %further = icmp slt i64 %next, %last
  br i1 %further, label %step, label %done
done:
  ret void
}
"""

_MACHINES = {  # how to pause, futex(2), sched_yield(2)
    "x86_64": ("llvm.x86.sse2.pause()", "", "202", "24"),
    "aarch64": ("llvm.aarch64.hint(i32)", "i32 1", "98", "124"),
}

_RUN = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
)
_WAKE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_SERVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


def _assembly(machine: str) -> str:
    declaration, argument, futex, sched_yield = _MACHINES[machine]
    name = declaration.split("(")[0]
    text = _ASSEMBLY.replace("declare void @PAUSE", f"declare void @{declaration}")
    return text.replace("@PAUSE", f"@{name}({argument})").replace("FUTEX", futex).replace("YIELD", sched_yield)


class Team:
    """The threads of this process that help to execute models, and the leave to lead them."""

    def __init__(self, helpers: int) -> None:
        target = host_target()
        self._linker = Linker([object_of_assembly(_assembly(os.uname().machine), target)], target)
        self._run = _RUN(self._linker.address("run"))
        self._serve = _SERVE(self._linker.address("serve"))
        self._wake = _WAKE(self._linker.address("wake"))
        self._memory = np.zeros((1 + helpers + 1) * _SLOT_WORDS, np.int64)  # a slot more, to begin at a cache line
        self._base = -(-self._memory.ctypes.data // 128) * 128
        self._words = self._memory[(self._base - self._memory.ctypes.data) // 8 :]
        self._nobody = np.zeros(_SLOT_WORDS, np.int64)
        self._nobody_at = self._nobody.ctypes.data
        self._leading = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.helpers = helpers

    def run(self, steps: int, first: int, last: int, scratch: int, stride: int) -> None:
        """Run steps from `first` to before `last` of those at address `steps`. Blocks, without the GIL.

        `scratch` is the address of as many areas of `stride` bytes as the team has threads. While somebody else leads
        the team this thread computes alone.
        """
        if not self.helpers or not self._leading.acquire(blocking=False):
            self._run(steps, first, last, self._nobody_at, scratch, stride)
            return
        try:
            if not self._threads:
                self._start()
            self._run(steps, first, last, self._base, scratch, stride)
        finally:
            self._leading.release()

    def stop(self) -> None:
        """Let the helpers leave, and wait until they have; the next `run` would bring them back."""
        with self._leading:
            for number, thread in enumerate(self._threads):
                self._words[_SLOT_WORDS * (1 + number)] = _LEAVE  # nobody else writes it: no run is under way
                self._wake(self._base + 8 * _SLOT_WORDS * (1 + number))
                thread.join()
            self._threads.clear()
            self._words[:] = 0

    def _start(self) -> None:
        for number in range(self.helpers):
            slot = self._base + 8 * _SLOT_WORDS * (1 + number)
            thread = threading.Thread(target=self._serve, args=(slot, _POLLS), name=f"nnfmq-team-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._words[0] = self.helpers


@cache
def the_team() -> Team:
    """Return this process's team: a thread for each processor that it may use, itself among them."""
    return Team(min(len(os.sched_getaffinity(0)) - 1, _MOST_HELPERS))
