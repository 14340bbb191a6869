"""The thread team: who computes the units of a step, and how the others learn of it.

One leader, the thread that executes a model, opens a step; whoever is awake joins in. Every thread has a range of the
step's chunks, takes from its own first and then from the others', one at a time. So nobody waits for a thread that
sleeps or has lost its processor, but for the one chunk that it has begun: the leader does its work, and a helper that
wakes in the middle of a long step takes its part of what is left. Helpers poll as long as somebody leads, and for a
moment after that; then they sleep, and only a step with enough work behind it wakes them. The leader sleeps, too, where
a helper has lost its processor in the middle of a chunk: so the helper gets the leader's. Results do not depend on who
computes what, since units do not overlap.

    epoch    odd: a step is open    even: none is    -1: leave

A helper says that it is busy before it looks whether the step is still open, and the leader closes the step before it
looks who is busy: so one of them sees the other, and what describes a step changes when nobody reads it.

Steps are records of four words: function, table of addresses, units, and how they are shared out (`Sharing`). The
functions are below in LLVM's assembly, which has the atomic operations; they are compiled once in a process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from enum import IntEnum
from functools import cache

import numpy as np

from nnfmq.engines.compiled.objects import Linker, host_target, object_of_assembly

__all__ = ["STEP_WORDS", "Sharing", "Team", "team_code", "the_team"]

STEP_WORDS = 4
_LINE_BYTES = 128  # two cache lines, which some processors fetch together
_LINE_WORDS = _LINE_BYTES // 8
_POLLS = 300  # after the last step of a run: some 10 µs, for whoever got the result wants the processor
_MOST_POLLS = 200_000  # while somebody leads
_MOST_HELPERS = 15
_CHUNKS = 4  # of each thread
_PATIENCE = 2000  # looks at a helper that has a chunk still
_FIRST_SLOT = 3 * _LINE_WORDS

_ASSEMBLY = """
declare i64 @syscall(i64, ...)
declare void @PAUSE

; The team's memory, in lines of 128 bytes:
;   0  helpers, leading, and the open step: function, table, scratch, stride, chunk, units (i64 each)
;   1  epoch (i64)
;   2  sleepers (i32), bell (i32): the word that those who sleep wait on
;   3  a slot for each thread, the leader's first: next chunk, end of the range, busy (i64 each; 2: the leader sleeps)

define internal void @work(ptr %team, i64 %me) {
entry:
  %function.at = getelementptr i8, ptr %team, i64 16
  %table.at = getelementptr i8, ptr %team, i64 24
  %scratch.at = getelementptr i8, ptr %team, i64 32
  %stride.at = getelementptr i8, ptr %team, i64 40
  %chunk.at = getelementptr i8, ptr %team, i64 48
  %units.at = getelementptr i8, ptr %team, i64 56
  %helpers = load i64, ptr %team, align 8
  %function = load ptr, ptr %function.at, align 8
  %table = load ptr, ptr %table.at, align 8
  %areas = load ptr, ptr %scratch.at, align 8
  %stride = load i64, ptr %stride.at, align 8
  %chunk = load i64, ptr %chunk.at, align 8
  %units = load i64, ptr %units.at, align 8
  %area = mul i64 %me, %stride
  %scratch = getelementptr i8, ptr %areas, i64 %area
  %slots = getelementptr i8, ptr %team, i64 384
  br label %visit
visit:
  %who = phi i64 [ %me, %entry ], [ %whom, %left ]
  %visits = phi i64 [ 0, %entry ], [ %visited, %left ]
  %offset = mul i64 %who, 128
  %slot = getelementptr i8, ptr %slots, i64 %offset
  %end.at = getelementptr i8, ptr %slot, i64 8
  %end = load i64, ptr %end.at, align 8
  br label %take
take:
  %number = atomicrmw add ptr %slot, i64 1 monotonic
  %some = icmp slt i64 %number, %end
  br i1 %some, label %compute, label %left
compute:
  %first = mul i64 %number, %chunk
  %behind = add i64 %first, %chunk
  %last = call i64 @llvm.smin.i64(i64 %behind, i64 %units)
  call void %function(ptr %table, i64 %first, i64 %last, ptr %scratch)
  br label %take
left:
  %visited = add i64 %visits, 1
  %after = add i64 %who, 1
  %over = icmp sgt i64 %after, %helpers
  %whom = select i1 %over, i64 0, i64 %after
  %more = icmp sle i64 %visited, %helpers
  br i1 %more, label %visit, label %done
done:
  ret void
}

define internal void @rest(ptr %busy) {
  %before = atomicrmw xchg ptr %busy, i64 0 seq_cst
  %awaited = icmp eq i64 %before, 2
  br i1 %awaited, label %wake, label %done
wake:
  %ignored = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %busy, i64 129, i64 1, ptr null, ptr null, i64 0)
  br label %done
done:
  ret void
}

define void @serve(ptr %team, i64 %me, i64 %limit, i64 %most) {
entry:
  %leading.at = getelementptr i8, ptr %team, i64 8
  %epoch.at = getelementptr i8, ptr %team, i64 128
  %sleepers.at = getelementptr i8, ptr %team, i64 256
  %bell.at = getelementptr i8, ptr %team, i64 260
  %slots = getelementptr i8, ptr %team, i64 384
  %offset = mul i64 %me, 128
  %slot = getelementptr i8, ptr %slots, i64 %offset
  %busy.at = getelementptr i8, ptr %slot, i64 16
  br label %poll
poll:
  %polls = phi i64 [ 0, %entry ], [ 0, %worked ], [ %spent, %idle ], [ 0, %awake ]
  %seen = phi i64 [ 0, %entry ], [ %epoch, %worked ], [ %seen, %idle ], [ %seen, %awake ]
  %epoch = load atomic i64, ptr %epoch.at acquire, align 8
  %leave = icmp eq i64 %epoch, -1
  br i1 %leave, label %gone, label %look
look:
  %odd = trunc i64 %epoch to i1
  %new = icmp ne i64 %epoch, %seen
  %open = and i1 %odd, %new
  br i1 %open, label %join, label %wait
join:
  %ignored.busy = atomicrmw xchg ptr %busy.at, i64 1 seq_cst
  %still = load atomic i64, ptr %epoch.at seq_cst, align 8
  %same = icmp eq i64 %still, %epoch
  br i1 %same, label %go, label %late
late:
  call void @rest(ptr %busy.at)
  br label %idle
idle:
  %spent = phi i64 [ %polls, %late ], [ %more, %wait ], [ %more, %consider ], [ 0, %sleep ]
  br label %poll
go:
  call void @work(ptr %team, i64 %me)
  br label %worked
worked:
  call void @rest(ptr %busy.at)
  br label %poll
wait:
  call void @PAUSE
  %more = add i64 %polls, 1
  %tired = icmp uge i64 %more, %limit
  br i1 %tired, label %consider, label %idle
consider:
  %leading = load atomic i64, ptr %leading.at monotonic, align 8
  %led = icmp ne i64 %leading, 0
  %early = icmp ult i64 %more, %most
  %stay = and i1 %led, %early
  br i1 %stay, label %idle, label %sleep
sleep:
  %bell = load atomic i32, ptr %bell.at acquire, align 4
  %others = atomicrmw add ptr %sleepers.at, i32 1 seq_cst
  %now = load atomic i64, ptr %epoch.at seq_cst, align 8
  %changed = icmp ne i64 %now, %epoch
  br i1 %changed, label %idle, label %nap
nap:
  %ignored = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %bell.at, i64 128, i32 %bell, ptr null, ptr null, i64 0)
  %rung = load atomic i32, ptr %bell.at acquire, align 4
  %silent = icmp eq i32 %rung, %bell
  br i1 %silent, label %nap, label %awake
awake:
  br label %poll
gone:
  ret void
}

define internal void @wake(ptr %team) {
  %sleepers.at = getelementptr i8, ptr %team, i64 256
  %bell.at = getelementptr i8, ptr %team, i64 260
  %sleepers = load atomic i32, ptr %sleepers.at seq_cst, align 4
  %none = icmp eq i32 %sleepers, 0
  br i1 %none, label %done, label %ring
ring:
  store atomic i32 0, ptr %sleepers.at seq_cst, align 4
  %before = atomicrmw add ptr %bell.at, i32 1 seq_cst
  %ignored = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %bell.at, i64 129, i64 2147483647, ptr null, ptr null, i64 0)
  br label %done
done:
  ret void
}

define void @leave(ptr %team) {
  %epoch.at = getelementptr i8, ptr %team, i64 128
  %before = atomicrmw xchg ptr %epoch.at, i64 -1 seq_cst
  call void @wake(ptr %team)
  ret void
}

define void @run(ptr %steps, i64 %begin, i64 %end, ptr %team, ptr %scratch, i64 %stride) {
entry:
  %leading.at = getelementptr i8, ptr %team, i64 8
  %function.at = getelementptr i8, ptr %team, i64 16
  %table.at = getelementptr i8, ptr %team, i64 24
  %scratch.at = getelementptr i8, ptr %team, i64 32
  %stride.at = getelementptr i8, ptr %team, i64 40
  %chunk.at = getelementptr i8, ptr %team, i64 48
  %units.at = getelementptr i8, ptr %team, i64 56
  %epoch.at = getelementptr i8, ptr %team, i64 128
  %slots = getelementptr i8, ptr %team, i64 384
  %helpers = load i64, ptr %team, align 8
  %threads = add i64 %helpers, 1
  %chunks.most = mul i64 %threads, CHUNKS
  store atomic i64 1, ptr %leading.at monotonic, align 8
  store ptr %scratch, ptr %scratch.at, align 8
  store i64 %stride, ptr %stride.at, align 8
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %step, label %done
step:
  %number = phi i64 [ %begin, %entry ], [ %next, %stepped ]
  %offset = mul i64 %number, 32
  %record = getelementptr i8, ptr %steps, i64 %offset
  %r.table.at = getelementptr i8, ptr %record, i64 8
  %r.units.at = getelementptr i8, ptr %record, i64 16
  %r.sharing.at = getelementptr i8, ptr %record, i64 24
  %function = load ptr, ptr %record, align 8
  %table = load ptr, ptr %r.table.at, align 8
  %units = load i64, ptr %r.units.at, align 8
  %sharing = load i64, ptr %r.sharing.at, align 8
  %many = mul i64 %sharing, %helpers
  %alone = icmp eq i64 %many, 0
  br i1 %alone, label %single, label %share
single:
  call void %function(ptr %table, i64 0, i64 %units, ptr %scratch)
  br label %stepped

share:
  %filled = add i64 %units, %chunks.most
  %rounded = sub i64 %filled, 1
  %chunk = sdiv i64 %rounded, %chunks.most
  %units.filled = add i64 %units, %chunk
  %units.rounded = sub i64 %units.filled, 1
  %chunks = sdiv i64 %units.rounded, %chunk
  store ptr %function, ptr %function.at, align 8
  store ptr %table, ptr %table.at, align 8
  store i64 %chunk, ptr %chunk.at, align 8
  store i64 %units, ptr %units.at, align 8
  br label %range
range:
  %t = phi i64 [ 0, %share ], [ %t.next, %range ]
  %t.next = add i64 %t, 1
  %t.offset = mul i64 %t, 128
  %t.slot = getelementptr i8, ptr %slots, i64 %t.offset
  %t.end.at = getelementptr i8, ptr %t.slot, i64 8
  %b.product = mul i64 %chunks, %t
  %b = sdiv i64 %b.product, %threads
  %e.product = mul i64 %chunks, %t.next
  %e = sdiv i64 %e.product, %threads
  store atomic i64 %b, ptr %t.slot monotonic, align 8
  store i64 %e, ptr %t.end.at, align 8
  %t.more = icmp slt i64 %t.next, %threads
  br i1 %t.more, label %range, label %open
open:
  %opened = atomicrmw add ptr %epoch.at, i64 1 seq_cst
  %all = icmp eq i64 %sharing, AND_WAKE
  br i1 %all, label %ring, label %take
ring:
  call void @wake(ptr %team)
  br label %take
take:
  call void @work(ptr %team, i64 0)
  %closed = atomicrmw add ptr %epoch.at, i64 1 seq_cst
  br label %collect

collect:
  %c = phi i64 [ 1, %take ], [ %c.next, %collected ]
  %c.offset = mul i64 %c, 128
  %c.slot = getelementptr i8, ptr %slots, i64 %c.offset
  %c.busy.at = getelementptr i8, ptr %c.slot, i64 16
  br label %look
look:
  %looks = phi i64 [ 0, %collect ], [ %looks.next, %pausing ]
  %busy = load atomic i64, ptr %c.busy.at seq_cst, align 8
  %working = icmp ne i64 %busy, 0
  br i1 %working, label %busy.yet, label %collected
busy.yet:
  %looks.next = add i64 %looks, 1
  %long = icmp ugt i64 %looks.next, PATIENCE
  br i1 %long, label %await, label %pausing
pausing:
  call void @PAUSE
  br label %look
await:
  %exchange = cmpxchg ptr %c.busy.at, i64 1, i64 2 seq_cst seq_cst
  %found = extractvalue { i64, i1 } %exchange, 0
  %over = icmp eq i64 %found, 0
  br i1 %over, label %collected, label %sleep
sleep:
  %none = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %c.busy.at, i64 128, i64 2, ptr null, ptr null, i64 0)
  br label %await
collected:
  %c.next = add i64 %c, 1
  %c.more = icmp sle i64 %c.next, %helpers
  br i1 %c.more, label %collect, label %stepped

stepped:
  %next = add i64 %number, 1
  %further = icmp slt i64 %next, %end
  br i1 %further, label %step, label %done
done:
  store atomic i64 0, ptr %leading.at monotonic, align 8
  ret void
}

declare i64 @llvm.smin.i64(i64, i64)
"""

_MACHINES = {  # how to pause, futex(2)
    "x86_64": ("llvm.x86.sse2.pause()", "", "202"),
    "aarch64": ("llvm.aarch64.hint(i32)", "i32 1", "98"),
}

_RUN = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
)
_LEAVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_SERVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def _assembly(machine: str) -> str:
    declaration, argument, futex = _MACHINES[machine]
    name = declaration.split("(")[0]
    text = _ASSEMBLY.replace("declare void @PAUSE", f"declare void @{declaration}")
    text = (
        text.replace("@PAUSE", f"@{name}({argument})")
        .replace("CHUNKS", str(_CHUNKS))
        .replace("PATIENCE", str(_PATIENCE))
        .replace("AND_WAKE", str(int(Sharing.AND_WAKE)))
    )
    return text.replace("FUTEX", futex)


@cache
def team_code() -> bytes:
    """Return the functions' object code. It takes as long as a small model, and a process that is forked has it."""
    return object_of_assembly(_assembly(os.uname().machine), host_target())


class Sharing(IntEnum):
    """Who computes a step: the leader alone, all who are awake, or those who sleep as well."""

    ALONE = 0
    SHARED = 1
    AND_WAKE = 2


class Team:
    """The threads of this process that help to execute models, and the leave to lead them."""

    def __init__(self, helpers: int) -> None:
        self._linker = Linker([team_code()], host_target())
        self._run = _RUN(self._linker.address("run"))
        self._serve = _SERVE(self._linker.address("serve"))
        self._leave = _LEAVE(self._linker.address("leave"))
        self._memory = np.zeros(_FIRST_SLOT + (1 + helpers + 1) * _LINE_WORDS, np.int64)  # a line more, to align it
        self._base = -(-self._memory.ctypes.data // _LINE_BYTES) * _LINE_BYTES
        self._words = self._memory[(self._base - self._memory.ctypes.data) // 8 :]
        self._nobody = np.zeros(_FIRST_SLOT, np.int64)
        self._nobody_at = self._nobody.ctypes.data
        self._leading = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.helpers = helpers
        self.areas = 1 + helpers
        """How many areas of scratch memory whoever runs brings, whatever is the limit today."""

    def run(self, steps: int, first: int, last: int, scratch: int, stride: int) -> None:
        """Run steps from `first` to before `last` of those at address `steps`. Blocks, without the GIL.

        `scratch` is the address of `areas` areas of `stride` bytes. While somebody else leads the team this thread
        computes alone.
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
            self._dismiss()

    def limit(self, helpers: int) -> None:
        """Let so many threads help, at most as many as at first, from the next run on; those that are there leave."""
        with self._leading:  # nobody may start the old number of helpers meanwhile
            self._dismiss()
            self.helpers = helpers

    def _dismiss(self) -> None:
        self._leave(self._base)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._words[:] = 0

    def _start(self) -> None:
        for number in range(1, self.helpers + 1):
            arguments = (self._base, number, _POLLS, _MOST_POLLS)
            thread = threading.Thread(target=self._serve, args=arguments, name=f"nnfmq-team-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread to give: those that there are do it
                break
            self._threads.append(thread)
        self._words[0] = len(self._threads)


@cache
def the_team() -> Team:
    """Return this process's team: a thread for each processor that it may use, itself among them."""
    return Team(min(len(os.sched_getaffinity(0)) - 1, _MOST_HELPERS))
