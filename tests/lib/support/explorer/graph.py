"""Algorithms on a graph of states, given as a list of each state's successors: the states that cannot reach an end, the
number of paths to ends, the longest path. No recursion, because the graphs have millions of edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Following = Sequence[Iterable[int]]


def cut_off(following: Following, ends: Sequence[bool]) -> list[int]:
    """Return the states from which no path leads to one of `ends`."""
    before: list[list[int]] = [[] for _ in following]
    for number, others in enumerate(following):
        for other in others:
            before[other].append(number)
    good = list(ends)
    waiting = [number for number, is_good in enumerate(good) if is_good]
    while waiting:
        for number in before[waiting.pop()]:
            if not good[number]:
                good[number] = True
                waiting.append(number)
    return [number for number, is_good in enumerate(good) if not is_good]


def count_paths(following: Sequence[tuple[int, ...]]) -> int | None:
    """Count the paths from state 0 to states without successors; None if there is a cycle."""
    entries = [0] * len(following)
    for others in following:
        for other in others:
            entries[other] += 1
    paths = [1] + [0] * (len(following) - 1)
    ready, seen, total = [0], 0, 0
    while ready:
        number = ready.pop()
        seen += 1
        total += 0 if following[number] else paths[number]
        for other in following[number]:
            paths[other] += paths[number]
            entries[other] -= 1
            if not entries[other]:
                ready.append(other)
    return total if seen == len(following) else None


def longest_way(costs: Mapping[int, Sequence[tuple[int, int]]]) -> int:
    """Return the highest cost of a path; `costs` maps a state to its successors and the cost of each transition.

    Cycles are allowed as long as they cost nothing.
    """
    left = dict.fromkeys(costs, 0)
    order = _last_first(costs)
    changed = True
    while changed:  # once where there are no cycles, once more for each that is nested
        changed = False
        for number in order:
            longest = max((cost + left[other] for other, cost in costs[number]), default=0)
            if longest != left[number]:
                left[number], changed = longest, True
    return max(left.values(), default=0)


def _last_first(costs: Mapping[int, Sequence[tuple[int, int]]]) -> list[int]:
    """Return the states, each after all that follow it as far as cycles allow."""
    order: list[int] = []
    seen: set[int] = set()
    for root in costs:
        path = [] if root in seen else [(root, iter(costs[root]))]
        seen.add(root)
        while path:
            other = next((other for other, _ in path[-1][1] if other not in seen), None)
            if other is None:
                order.append(path.pop()[0])
            else:
                seen.add(other)
                path.append((other, iter(costs[other])))
    return order
