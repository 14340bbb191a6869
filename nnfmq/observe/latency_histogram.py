"""LatencyHistogram: how long executions took, as counts in the buckets of `statistics_layout`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nnfmq.observe.statistics_layout import BUCKETS, bucket_start_ns

_PER_OCTAVE = 8


@dataclass(frozen=True, slots=True)
class LatencyHistogram:
    """Counts of durations; `counts` has one for each bucket."""

    counts: tuple[int, ...] = (0,) * BUCKETS

    @property
    def total(self) -> int:
        """How many durations were counted."""
        return sum(self.counts)

    def quantile_ns(self, fraction: float) -> int | None:
        """Return the nearest-rank quantile, to within 6.25 %; None if nothing was counted.

        That is the middle of the bucket of the duration: below 1 µs it is at most 63 ns away.
        """
        rank = max(1, math.ceil(self.total * fraction))
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen >= rank:
                return (bucket_start_ns(bucket) + bucket_start_ns(bucket + 1)) // 2
        return None

    def since(self, earlier: LatencyHistogram) -> LatencyHistogram:
        """Return what was counted after `earlier`; a count that has gone back was read in another order, and is 0."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        return LatencyHistogram(tuple(max(now - then, 0) for now, then in pairs))

    def __add__(self, other: LatencyHistogram) -> LatencyHistogram:
        pairs = zip(self.counts, other.counts, strict=True)
        return LatencyHistogram(tuple(one + two for one, two in pairs))

    def below_powers_of_two(self) -> list[tuple[float, int]]:
        """Return for 1, 2, 4, ... µs the bound in seconds, and how many durations are shorter than it."""
        bounds, below = [], 0
        for octave in range(BUCKETS // _PER_OCTAVE - 1):
            begin = octave * _PER_OCTAVE
            below += sum(self.counts[begin : begin + _PER_OCTAVE])
            bounds.append((bucket_start_ns(begin + _PER_OCTAVE) / 1e9, below))
        return bounds
