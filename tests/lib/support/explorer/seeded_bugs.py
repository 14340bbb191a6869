"""Bugs that the model checker must find. Each is one change to the source text of the Python core.

If the text to be replaced is not found exactly once, the test fails with a message: the bug has to follow the source.
"""

from __future__ import annotations

from support.explorer.instrumented_runtime import SeededBug

PUBLISH_BEFORE_PAYLOAD = SeededBug(
    "        start = w % self._ring_bytes\n",
    "        self._write_counter[0] = (w + size) % 2**64  # SYNC records\n        start = w % self._ring_bytes\n",
)
READ_COUNTER_BEFORE_COPY = SeededBug(
    "        data = self._copy_out(r, size)\n"
    "        self._read_counter[0] = (r + size) % 2**64  # SYNC space\n"
    "        return data\n",
    "        self._read_counter[0] = (r + size) % 2**64  # SYNC space\n        return self._copy_out(r, size)\n",
)
WRITE_INTO_A_FULL_RING = SeededBug(
    "        if size > free or w % self._quantum:\n            return False\n",
    "        if size > free + self._quantum or w % self._quantum:\n            return False\n",
)
NO_SECOND_CHECK = SeededBug(
    "            if self._is_ready(side, size) or self._is_cancelled(event):\n"
    "                return True\n"
    "            if not old & mask:\n",
    "            if self._is_cancelled(event):\n                return True\n            if not old & mask:\n",
)
BIT_CLEARED_AFTER_THE_CHECK = SeededBug(
    "        old = event.fetch_clear(mask)\n"
    "        if self._is_ready(side, size) or event.is_cancelled:\n"
    "            return None\n"
    "        return old & ~mask\n",
    "        if self._is_ready(side, size) or event.is_cancelled:\n"
    "            return None\n"
    "        return event.fetch_clear(mask) & ~mask\n",
)
SLEEP_ON_ANY_VALUE = SeededBug(
    "                event.sleep(old & ~mask, deadline_ns, mask)\n",
    "                event.sleep(event._word[0], deadline_ns, mask)\n",
)
EVENT_FLAG_SLEEPS_ON_ANY_VALUE = SeededBug(
    "            self.sleep(old & ~mask, deadline_ns, mask)\n",
    "            self.sleep(self._word[0], deadline_ns, mask)\n",
)
WAKE_ONLY_IF_ALL_WERE_SET = SeededBug("if old & mask != mask else 0", "if old & mask == mask else 0")
WAKE_BEFORE_WRITE = SeededBug(
    "            if not self._try_write(data, True):\n"
    "                return False\n"
    "            event.wake_acquired(NOT_EMPTY)\n",
    "            event.wake_acquired(NOT_EMPTY)\n"
    "            if not self._try_write(data, True):\n"
    "                return False\n",
)
KERNEL_CLEARS_UNSEEN_BITS = SeededBug(
    "self._change(_OP_ANDN, address, old & mask)", "self._change(_OP_ANDN, address, mask)", "futex"
)
FLAG_CHECKED_BEFORE_CLEARING_BITS_ONLY = SeededBug(
    "        while not _has_passed(deadline_ns):\n"
    "            old = event.fetch_clear(mask)\n"
    "            if self._is_ready(side, size) or self._is_cancelled(event):\n",
    "        if self._is_cancelled(event):\n"
    "            return True\n"
    "        while not _has_passed(deadline_ns):\n"
    "            old = event.fetch_clear(mask)\n"
    "            if self._is_ready(side, size):\n",
)
BITS_USED_BEFORE_THE_FLAG = SeededBug(
    "            self.raise_if_cancelled()  # before the bits are used: wake_all sets all when the peer died\n",
    "",
)

_ANNOUNCEMENT = "        self._reserved_counter[0] = (w + size) % 2**64  # SYNC reserve: before the bytes\n"
WRITE_WITHOUT_RESERVATION = SeededBug(_ANNOUNCEMENT, "")
BEGIN_WITHOUT_RESERVATION = SeededBug(
    "            self._reserved_counter[0] = (w + size) % 2**64  # SYNC reserve\n", "            pass\n"
)
RESERVED_AFTER_THE_BYTES = SeededBug(
    f"{_ANNOUNCEMENT}        self._copy_in(w, source, size)\n",
    "        self._copy_in(w, source, size)\n        self._reserved_counter[0] = (w + size) % 2**64\n",
)
TIMED_SLEEP_ONLY = SeededBug(  # the end of the timed sleep is taken for the end of the wait
    "        found = found or self._sleep_for_record(event, deadline_ns)\n",
    "        found = found or action == POLL and self._sleep_for_record(event, deadline_ns)\n",
)

# These are visible only if accesses are reordered.

RECORDS_RELAXED = SeededBug(
    "source[first:]\n        self._write_counter[0] = (w + size) % 2**64  # SYNC records\n",
    "source[first:]\n        self._write_counter[0] = (w + size) % 2**64\n",
)
SPACE_RELAXED = SeededBug(
    "        self._read_counter[0] = (r + size) % 2**64  # SYNC space\n        return data\n",
    "        self._read_counter[0] = (r + size) % 2**64\n        return data\n",
)
RECORDS_NOT_ACQUIRED = SeededBug(
    "        w = self._write_counter[0]  # SYNC records\n        r = self._read_counter[0]\n",
    "        w = self._write_counter[0]\n        r = self._read_counter[0]\n",
)
