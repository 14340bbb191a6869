; The thread pool's loops, in LLVM IR because of its atomic operations. `thread_pool.py` describes the protocol, and
; substitutes the names that begin with a dollar sign.
;
; Pool memory, in lines of 128 bytes:
;   0  workers, active; then the parallel region: function, args, scratch, stride, chunk, items (i64 each)
;   1  epoch (i64): odd: region open, even: closed, -1: shut down
;   2  sleepers (i32), wake_seq (i32): the futex word of sleeping workers
;   3  one for each thread, the calling thread's first: next chunk, end of the range,
;      busy (i64 each; 0: no, 1: yes, 2: yes, and the caller sleeps until it is 0)

declare i64 @syscall(i64, ...)
declare void $PAUSE_DECLARATION
declare i64 @llvm.smin.i64(i64, i64)

; Compute chunks as thread %me: its own range first, then the others'. A fetch-add hands out each chunk once; a counter
; runs past the end of its range by at most one for each call, so it cannot overflow. The fields of the region are
; plain loads: a thread gets here only between its busy = 1 and busy = 0, and the caller writes them when all are 0.
define internal void @run_chunks(ptr %pool, i64 %me) {
entry:
  %function.at = getelementptr i8, ptr %pool, i64 16
  %args.at = getelementptr i8, ptr %pool, i64 24
  %scratch.at = getelementptr i8, ptr %pool, i64 32
  %stride.at = getelementptr i8, ptr %pool, i64 40
  %chunk.at = getelementptr i8, ptr %pool, i64 48
  %items.at = getelementptr i8, ptr %pool, i64 56
  %workers = load i64, ptr %pool, align 8
  %function = load ptr, ptr %function.at, align 8
  %args = load ptr, ptr %args.at, align 8
  %slots.scratch = load ptr, ptr %scratch.at, align 8
  %stride = load i64, ptr %stride.at, align 8
  %chunk = load i64, ptr %chunk.at, align 8
  %items = load i64, ptr %items.at, align 8
  %scratch.offset = mul i64 %me, %stride
  %scratch = getelementptr i8, ptr %slots.scratch, i64 %scratch.offset
  %slots = getelementptr i8, ptr %pool, i64 384
  br label %visit
visit:
  %victim = phi i64 [ %me, %entry ], [ %victim.next, %range.empty ]
  %visits = phi i64 [ 0, %entry ], [ %visits.next, %range.empty ]
  %offset = mul i64 %victim, 128
  %slot = getelementptr i8, ptr %slots, i64 %offset
  %end.at = getelementptr i8, ptr %slot, i64 8
  %end = load i64, ptr %end.at, align 8
  br label %take
take:
  %number = atomicrmw add ptr %slot, i64 1 monotonic
  %is.chunk = icmp slt i64 %number, %end
  br i1 %is.chunk, label %compute, label %range.empty
compute:
  %first = mul i64 %number, %chunk
  %chunk.end = add i64 %first, %chunk
  %last = call i64 @llvm.smin.i64(i64 %chunk.end, i64 %items)
  call void %function(ptr %args, i64 %first, i64 %last, ptr %scratch)
  br label %take
range.empty:
  %visits.next = add i64 %visits, 1
  %after = add i64 %victim, 1
  %wraps = icmp sgt i64 %after, %workers
  %victim.next = select i1 %wraps, i64 0, i64 %after
  %more = icmp sle i64 %visits.next, %workers
  br i1 %more, label %visit, label %done
done:
  ret void
}

; busy = 0, and wake the caller if it sleeps on the word.
define internal void @clear_busy(ptr %busy) {
entry:
  %before = atomicrmw xchg ptr %busy, i64 0 seq_cst
  %is.awaited = icmp eq i64 %before, 2
  br i1 %is.awaited, label %wake, label %done
wake:
  %ignored = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %busy, i64 129, i64 1, ptr null, ptr null, i64 0)
  br label %done
done:
  ret void
}

; The loop of worker thread %me. It spins %idle.spins times, or %busy.spins times during a run, then sleeps.
define void @worker_loop(ptr %pool, i64 %me, i64 %idle.spins, i64 %busy.spins) {
entry:
  %active.at = getelementptr i8, ptr %pool, i64 8
  %epoch.at = getelementptr i8, ptr %pool, i64 128
  %sleepers.at = getelementptr i8, ptr %pool, i64 256
  %wake_seq.at = getelementptr i8, ptr %pool, i64 260
  %slots = getelementptr i8, ptr %pool, i64 384
  %offset = mul i64 %me, 128
  %slot = getelementptr i8, ptr %slots, i64 %offset
  %busy.at = getelementptr i8, ptr %slot, i64 16
  br label %poll
poll:
  %spins = phi i64 [ 0, %entry ], [ 0, %worked ], [ %spins.now, %idle ], [ 0, %woken ]
  %seen = phi i64 [ 0, %entry ], [ %epoch, %worked ], [ %seen, %idle ], [ %seen, %woken ]
  %epoch = load atomic i64, ptr %epoch.at acquire, align 8
  %is.shut.down = icmp eq i64 %epoch, -1
  br i1 %is.shut.down, label %exit, label %look
look:
  %is.odd = trunc i64 %epoch to i1
  %is.new = icmp ne i64 %epoch, %seen
  %is.open = and i1 %is.odd, %is.new
  br i1 %is.open, label %join, label %wait

; Dekker: this thread stores busy, then loads epoch; the caller stores epoch, then loads busy; all seq_cst. So either
; the epoch loaded here is the closed one, and the thread stays out, or the caller sees busy and waits for it.
join:
  %ignored.busy = atomicrmw xchg ptr %busy.at, i64 1 seq_cst
  %epoch.now = load atomic i64, ptr %epoch.at seq_cst, align 8
  %is.still.open = icmp eq i64 %epoch.now, %epoch
  br i1 %is.still.open, label %joined, label %too.late
too.late:
  call void @clear_busy(ptr %busy.at)
  br label %idle
idle:
  %spins.now = phi i64 [ %spins, %too.late ], [ %spins.next, %wait ], [ %spins.next, %spins.exhausted ], [ 0, %sleep ]
  br label %poll
joined:
  call void @run_chunks(ptr %pool, i64 %me)
  br label %worked
worked:
  call void @clear_busy(ptr %busy.at)
  br label %poll
wait:
  call void $PAUSE
  %spins.next = add i64 %spins, 1
  %is.exhausted = icmp uge i64 %spins.next, %idle.spins
  br i1 %is.exhausted, label %spins.exhausted, label %idle
spins.exhausted:
  %active = load atomic i64, ptr %active.at monotonic, align 8
  %is.active = icmp ne i64 %active, 0
  %is.early = icmp ult i64 %spins.next, %busy.spins
  %goes.on = and i1 %is.active, %is.early
  br i1 %goes.on, label %idle, label %sleep

; Dekker again, with sleepers and epoch: either this thread sees the new epoch, or the caller that changed it sees a sleeper and
; wakes it. A wake-up between the load of wake_seq and the futex call changes wake_seq, and the call returns EAGAIN.
; A thread that does not sleep after all stays counted: the next wake-up resets the count, at the price of a needless
; system call.
sleep:
  %wake_seq = load atomic i32, ptr %wake_seq.at acquire, align 4
  %ignored.sleepers = atomicrmw add ptr %sleepers.at, i32 1 seq_cst
  %epoch.then = load atomic i64, ptr %epoch.at seq_cst, align 8
  %is.changed = icmp ne i64 %epoch.then, %epoch
  br i1 %is.changed, label %idle, label %futex.wait
futex.wait:
  %ignored = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %wake_seq.at, i64 128, i32 %wake_seq, ptr null, ptr null, i64 0)
  %wake_seq.now = load atomic i32, ptr %wake_seq.at acquire, align 4
  %is.spurious = icmp eq i32 %wake_seq.now, %wake_seq
  br i1 %is.spurious, label %futex.wait, label %woken
woken:
  br label %poll
exit:
  ret void
}

; Wake all sleeping workers. Called after a change of epoch.
define internal void @wake(ptr %pool) {
entry:
  %sleepers.at = getelementptr i8, ptr %pool, i64 256
  %wake_seq.at = getelementptr i8, ptr %pool, i64 260
  %sleepers = load atomic i32, ptr %sleepers.at seq_cst, align 4
  %is.none = icmp eq i32 %sleepers, 0
  br i1 %is.none, label %done, label %wake.all
wake.all:
  store atomic i32 0, ptr %sleepers.at seq_cst, align 4
  %before = atomicrmw add ptr %wake_seq.at, i32 1 seq_cst
  %ignored = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %wake_seq.at, i64 129, i64 2147483647, ptr null, ptr null, i64 0)
  br label %done
done:
  ret void
}

; Let all workers leave their loops.
define void @shut_down(ptr %pool) {
entry:
  %epoch.at = getelementptr i8, ptr %pool, i64 128
  %before = atomicrmw xchg ptr %epoch.at, i64 -1 seq_cst
  call void @wake(ptr %pool)
  ret void
}

; Run the launch records from %begin to before %end, one after the other, as the calling thread.
define void @run_launches(ptr %records, i64 %begin, i64 %end, ptr %pool, ptr %scratch, i64 %stride) {
entry:
  %active.at = getelementptr i8, ptr %pool, i64 8
  %function.at = getelementptr i8, ptr %pool, i64 16
  %args.at = getelementptr i8, ptr %pool, i64 24
  %scratch.at = getelementptr i8, ptr %pool, i64 32
  %stride.at = getelementptr i8, ptr %pool, i64 40
  %chunk.at = getelementptr i8, ptr %pool, i64 48
  %items.at = getelementptr i8, ptr %pool, i64 56
  %epoch.at = getelementptr i8, ptr %pool, i64 128
  %slots = getelementptr i8, ptr %pool, i64 384
  %workers = load i64, ptr %pool, align 8
  %threads = add i64 %workers, 1
  %max.chunks = mul i64 %threads, $CHUNKS_PER_THREAD
  store atomic i64 1, ptr %active.at monotonic, align 8
  store ptr %scratch, ptr %scratch.at, align 8
  store i64 %stride, ptr %stride.at, align 8
  %is.any = icmp slt i64 %begin, %end
  br i1 %is.any, label %launch, label %done
launch:
  %number = phi i64 [ %begin, %entry ], [ %number.next, %launched ]
  %offset = mul i64 %number, 32
  %record = getelementptr i8, ptr %records, i64 %offset
  %r.args.at = getelementptr i8, ptr %record, i64 8
  %r.items.at = getelementptr i8, ptr %record, i64 16
  %r.parallelism.at = getelementptr i8, ptr %record, i64 24
  %function = load ptr, ptr %record, align 8
  %args = load ptr, ptr %r.args.at, align 8
  %items = load i64, ptr %r.items.at, align 8
  %parallelism = load i64, ptr %r.parallelism.at, align 8
  %product = mul i64 %parallelism, %workers
  %is.serial = icmp eq i64 %product, 0
  br i1 %is.serial, label %serial, label %parallel
serial:
  call void %function(ptr %args, i64 0, i64 %items, ptr %scratch)
  br label %launched

; chunk = ceil(items / max.chunks), chunks = ceil(items / chunk); thread t gets chunks [chunks*t/threads, chunks*(t+1)/threads).
parallel:
  %items.filled = add i64 %items, %max.chunks
  %items.rounded = sub i64 %items.filled, 1
  %chunk = sdiv i64 %items.rounded, %max.chunks
  %items.chunk = add i64 %items, %chunk
  %items.last = sub i64 %items.chunk, 1
  %chunks = sdiv i64 %items.last, %chunk
  store ptr %function, ptr %function.at, align 8
  store ptr %args, ptr %args.at, align 8
  store i64 %chunk, ptr %chunk.at, align 8
  store i64 %items, ptr %items.at, align 8
  br label %range
range:
  %t = phi i64 [ 0, %parallel ], [ %t.next, %range ]
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
  %wakes = icmp eq i64 %parallelism, $PARALLEL_WAKE
  br i1 %wakes, label %wake.workers, label %take.part
wake.workers:
  call void @wake(ptr %pool)
  br label %take.part
take.part:
  call void @run_chunks(ptr %pool, i64 0)
  %closed = atomicrmw add ptr %epoch.at, i64 1 seq_cst
  br label %collect

; All chunks have been taken. Wait for each worker that still computes one: spin first, then sleep on its busy word, so
; that a preempted worker can have this CPU. busy changes from 1 to 2 only while the worker is busy, and the worker that
; finds 2 wakes the caller.
collect:
  %c = phi i64 [ 1, %take.part ], [ %c.next, %collected ]
  %c.offset = mul i64 %c, 128
  %c.slot = getelementptr i8, ptr %slots, i64 %c.offset
  %c.busy.at = getelementptr i8, ptr %c.slot, i64 16
  br label %spin
spin:
  %c.spins = phi i64 [ 0, %collect ], [ %c.spins.next, %pause ]
  %busy = load atomic i64, ptr %c.busy.at seq_cst, align 8
  %is.busy = icmp ne i64 %busy, 0
  br i1 %is.busy, label %still.busy, label %collected
still.busy:
  %c.spins.next = add i64 %c.spins, 1
  %is.long = icmp ugt i64 %c.spins.next, $SPINS_BEFORE_WAIT
  br i1 %is.long, label %await, label %pause
pause:
  call void $PAUSE
  br label %spin
await:
  %exchange = cmpxchg ptr %c.busy.at, i64 1, i64 2 seq_cst seq_cst
  %found = extractvalue { i64, i1 } %exchange, 0
  %is.finished = icmp eq i64 %found, 0
  br i1 %is.finished, label %collected, label %futex.wait
futex.wait:
  %ignored = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %c.busy.at, i64 128, i64 2, ptr null, ptr null, i64 0)
  br label %await
collected:
  %c.next = add i64 %c, 1
  %c.more = icmp sle i64 %c.next, %workers
  br i1 %c.more, label %collect, label %launched

launched:
  %number.next = add i64 %number, 1
  %is.next = icmp slt i64 %number.next, %end
  br i1 %is.next, label %launch, label %done
done:
  store atomic i64 0, ptr %active.at monotonic, align 8
  ret void
}
