"""Ways to break the queue's algorithm, each by one change to its source, that the explorer must notice.

A change whose place is not found in the source fails with a message: the fault has to follow the Python core.
"""

from __future__ import annotations

from support.explorer.instrumented_runtime import SeededBug

PUBLISH_BEFORE_PAYLOAD = SeededBug(
    "        at = w % self._ring_bytes\n",
    "        self._write[0] = (w + size) % 2**64  # SYNC records\n        at = w % self._ring_bytes\n",
)
READ_COUNTER_BEFORE_COPY = SeededBug(
    "        data = self._copy_out(r, size)\n"
    "        self._read[0] = (r + size) % 2**64  # SYNC space\n"
    "        return data\n",
    "        self._read[0] = (r + size) % 2**64  # SYNC space\n        return self._copy_out(r, size)\n",
)
WRITE_INTO_A_FULL_RING = SeededBug(
    "        if size > free or w % self._quantum:\n            return False\n",
    "        if size > free + self._quantum or w % self._quantum:\n            return False\n",
)
NO_SECOND_LOOK = SeededBug(
    "            if self._is_ready(side, size) or self._is_stopped(event):\n"
    "                return True\n"
    "            if not old & mask:\n",
    "            if self._is_stopped(event):\n                return True\n            if not old & mask:\n",
)
BIT_CONSUMED_AFTER_THE_LOOK = SeededBug(
    "        old = event.take_bits(mask)\n"
    "        if self._is_ready(side, size) or event.is_stopped:\n"
    "            return None\n"
    "        return old & ~mask\n",
    "        if self._is_ready(side, size) or event.is_stopped:\n"
    "            return None\n"
    "        return event.take_bits(mask) & ~mask\n",
)
SLEEP_ON_ANY_VALUE = SeededBug(
    "                event.sleep(old & ~mask, deadline_ns, mask)\n",
    "                event.sleep(event._word[0], deadline_ns, mask)\n",
)
EVENT_FLAG_SLEEPS_ON_ANY_VALUE = SeededBug(
    "            self.sleep(old & ~mask, deadline_ns, mask)\n",
    "            self.sleep(self._word[0], deadline_ns, mask)\n",
)
WAKE_ONLY_IF_ALL_WERE_SET = SeededBug(
    "(address, mask, 5)) & mask != mask", "(address, mask, 5)) & mask == mask", "futex"
)
WAKE_BEFORE_WRITE = SeededBug(
    "            if not self._try_write(data, True):\n"
    "                return False\n"
    "            event.notify(NOT_EMPTY)\n",
    "            event.notify(NOT_EMPTY)\n"
    "            if not self._try_write(data, True):\n"
    "                return False\n",
)
KERNEL_CLEARS_UNSEEN_BITS = SeededBug(
    "self._change(_OP_ANDN, address, old & mask)", "self._change(_OP_ANDN, address, mask)", "futex"
)
FLAG_TESTED_BEFORE_TAKING_BITS_ONLY = SeededBug(
    "        while not _has_passed(deadline_ns):\n"
    "            old = event.take_bits(mask)\n"
    "            if self._is_ready(side, size) or self._is_stopped(event):\n",
    "        if self._is_stopped(event):\n"
    "            return True\n"
    "        while not _has_passed(deadline_ns):\n"
    "            old = event.take_bits(mask)\n"
    "            if self._is_ready(side, size):\n",
)
BITS_BELIEVED_BEFORE_FLAG = SeededBug(
    "            self.check_stop()  # before the bits are believed: they may be those of wake_all\n", ""
)

SILENT_WRITE = SeededBug(
    "        self._intent[0] = (w + size) % 2**64  # SYNC lap: before the bytes; x86-64 keeps that order by itself\n",
    "",
)
SILENT_BEGIN = SeededBug("            self._intent[0] = (w + size) % 2**64  # SYNC lap\n", "            pass\n")
ANNOUNCED_AFTER_THE_BYTES = SeededBug(
    "        self._intent[0] = (w + size) % 2**64  # SYNC lap: before the bytes; x86-64 keeps that order by itself\n"
    "        self._put(w, source, size)\n",
    "        self._put(w, source, size)\n        self._intent[0] = (w + size) % 2**64\n",
)
NAP_ONLY = SeededBug(  # what was the end of a nap is taken for that of the wait
    "        found = found or self._sleep(event, READER, self._quantum, deadline_ns, NOT_EMPTY)\n",
    "        found = found or plan == POLL and self._sleep(event, READER, self._quantum, deadline_ns, NOT_EMPTY)\n",
)

# Only reordering makes these visible.

RECORDS_RELAXED = SeededBug(
    "source[first:]\n        self._write[0] = (w + size) % 2**64  # SYNC records\n",
    "source[first:]\n        self._write[0] = (w + size) % 2**64\n",
)
SPACE_RELAXED = SeededBug(
    "        self._read[0] = (r + size) % 2**64  # SYNC space\n        return data\n",
    "        self._read[0] = (r + size) % 2**64\n        return data\n",
)
RECORDS_NOT_ACQUIRED = SeededBug(
    "        w = self._write[0]  # SYNC records\n        r = self._read[0]\n",
    "        w = self._write[0]\n        r = self._read[0]\n",
)
