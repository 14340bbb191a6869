"""Kill, stop and starve the processes of a driver at every step of their protocols, and check what it does to others.

    python tools/chaos.py                                  # 200 events
    python tools/chaos.py --events 1000 --resume FILE      # 1,000 more of a series that FILE has; sums of all of them
    python tools/chaos.py --events 0 --resume FILE --json  # the sums again
    python tools/chaos.py --first 4711 --events 1          # one event, by its number
    python tools/chaos.py --at 'OpenEntry is sent'         # all events at one step
    python tools/chaos.py --users several                  # a driver for several users, with clients of two; as root
    python tools/chaos.py --steps                          # the steps

An event: while a client runs a script, a process is killed or stopped, gets no more memory or descriptors, or the disk
is full, or a process takes long, when a step is reached or at a random time. The seed and its number decide everything
about it. After it the tool looks for hangs (calls that outlive their deadline, clients that do not end), processes,
descriptors and shared mappings that were not there before, outputs that are not NumPy's, and statuses that nothing
explains; and at a neighbour, another client of the driver: its outputs, and the times of its executions, alone, beside
the scripts while nothing disturbs them (controls, one before every fourth event), and beside the events. It measures
how long the other side needs to notice a death. The exit status is 0 only if nothing was found and the scripts pass
every step. FILE is written while the events come about, so a run that is ended early counts, too; several runs may add
to one FILE at the same time.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import results_file

from nnfmq.base.processes import use_one_blas_thread
from nnfmq.cli.console import console, from_zero, print_json, table
from nnfmq.hal.errors import InvalidArgument, NnfmqError
from nnfmq.lab.child_processes import BenchmarkFailed

if TYPE_CHECKING:
    from chaos_clients import Times
    from chaos_events import Event, Outcome
    from chaos_place import Place, Users
    from chaos_steps import Page
    from rich.console import Console

EVENTS_MAX = 1000
"""Of one run; `--resume` sums several."""
ALONE_S = 1.0
_CONTROL_EVERY = 4
_SAVED_EVERY = 10
_SEEN = {"client": "a client's, by its worker", "worker": "a worker's, by its client",
    "supervisor": "a supervisor's, by its compile server and repository"}  # fmt: skip
_KINDS = ("hang", "left behind", "wrong output", "neighbour", "status", "log", "step")

# ----------------------------------------------------------------------------------------------------------------------
# A run


class Series:
    """The events of one run, in a place that is replaced when an event has destroyed it."""

    def __init__(
        self,
        seed: int,
        base: Path,
        page: Page,
        say: Callable[[str], None],
        users: Users | None = None,
        at: str | None = None,
    ) -> None:
        self.seed = seed
        self.users = users
        self._at = at
        self._base = base
        self._page = page
        self._say = say
        self._places = 0
        self.scripts_of: dict[int, list[str]] = {}
        self.seconds: dict[str, float] = {}
        self.alone: list[Times] = []
        self.controls: list[Outcome] = []
        self.outcomes: list[Outcome] = []

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Yield a new place, in which each script has run once, so that nothing is created for the first time later."""
        from chaos_clients import SCRIPTS, texts
        from chaos_events import record
        from chaos_place import Place

        self._places += 1
        with tempfile.TemporaryDirectory(prefix=f"place{self._places}-", dir=self._base) as name, ExitStack() as stack:
            place = Place(Path(name), self._page, stack, self.users)
            place.baseline()  # the import of the first model is no step of a script
            for script in SCRIPTS if not self.seconds else ("compilation",):
                passed, calls, self.seconds[script] = record(place, script)
                if texts(calls):
                    raise BenchmarkFailed(f"the script {script} fails without an event: {texts(calls)}")
                for step in passed:
                    self.scripts_of.setdefault(step, []).append(script)
            yield place

    def measure_alone(self, place: Place) -> None:
        """Measure the neighbour while it has the driver for itself."""
        place.neighbour_report()
        time.sleep(ALONE_S)
        self.alone.append(place.neighbour_report()[0])

    def _scripts_at(self) -> dict[int, list[str]]:
        """Return the scripts that pass each step at which events are wanted."""
        from chaos_steps import steps

        found = {n: scripts for n, scripts in self.scripts_of.items() if self._at in (None, steps()[n].name)}
        if not found:
            raise BenchmarkFailed(f"no script passes {self._at!r}; --steps shows the steps")
        return found

    def run(self, numbers: range, save: Callable[[], None]) -> None:
        """Bring the events with these numbers about; call `save` after every _SAVED_EVERY of them, and at the end."""
        from chaos_events import draw, run_control, run_event

        left = list(numbers)
        while True:
            with self.place() as place:
                place.new_log()
                wanted = place.baseline()
                is_spent = False
                while left and not is_spent:
                    event = draw(self.seed, left.pop(0), self._scripts_at(), self.seconds)
                    if len(self.outcomes) % _CONTROL_EVERY == 0:
                        self.measure_alone(place)
                        self.controls.append(run_control(place, event, wanted))
                    self._say(f"{len(numbers) - len(left)} of {len(numbers)}: {event.text}")
                    outcome, is_spent = run_event(place, event, wanted)
                    self.outcomes.append(outcome)
                    if not left or len(self.outcomes) % _SAVED_EVERY == 0:
                        save()
                if not left:
                    return

    def report(self, first: int) -> dict[str, Any]:
        """Return the results of the run."""
        from chaos_steps import steps, steps_of_others

        outcomes = self.outcomes
        passed = self.scripts_of.keys() | steps_of_others(self.users is not None)
        missing = [step.name for number, step in enumerate(steps()) if number not in passed]
        control, events = ([each.neighbour for each in group] for group in (self.controls, outcomes))
        return {
            "first": first, "events": len(outcomes), "users": "one" if self.users is None else "several",
            "places": self._places, "load": round(os.getloadavg()[0], 1),
            "reached": sum(outcome.was_reached for outcome in outcomes),
            "steps": sorted({outcome.event.step for outcome in outcomes if outcome.was_reached}),
            "actions": _count(outcomes, lambda event, _: event.action.value),
            "victims": _count(outcomes, lambda _, outcome: outcome.victim.text if outcome.victim else "none"),
            "statuses": dict(sum((outcome.statuses for outcome in outcomes), Counter())),
            "seen_ms": {name: [round(outcome.seen_ms[name], 3) for outcome in outcomes if name in outcome.seen_ms]
                for name in _SEEN},
            "neighbour": {"alone": _added(self.alone), "control": _added(control), "events": _added(events)},
            "findings": [*_findings([*outcomes, *self.controls]), *({"number": -1, "event": "none", "log": "",
                "finding": f"step: no script passes '{name}'"} for name in missing)],
        }  # fmt: skip


def _findings(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    for outcome in outcomes:
        event = {"number": outcome.event.number, "event": outcome.event.text, "log": outcome.log}
        yield from (_without_paths(event | {"finding": finding}) for finding in outcome.findings)


_ROOT = Path(__file__).resolve().parents[1]


def _without_paths(texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return texts in which the folders of the source tree, of Python and of the user are not named."""
    shown = {str(_ROOT): ".", sys.prefix: "PREFIX", sys.base_prefix: "PYTHON", str(Path.home()): "~"}
    pattern = re.compile("|".join(re.escape(folder) for folder in sorted(shown, key=len, reverse=True)))
    return {
        name: pattern.sub(lambda found: shown[found[0]], value) if isinstance(value, str) else value
        for name, value in texts.items()
    }


def _count(outcomes: Sequence[Outcome], key: Callable[[Event, Outcome], str]) -> dict[str, int]:
    return dict(Counter(key(outcome.event, outcome) for outcome in outcomes if outcome.was_reached))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values: the smallest that is not below this share of them."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


# ----------------------------------------------------------------------------------------------------------------------
# Sums


def _added(times: Iterable[Mapping[str, Mapping[Any, int]]]) -> dict[str, Counter[int]]:
    """Return the sums of times of the neighbour, also of those that were read from JSON."""
    found: dict[str, Counter[int]] = {}
    for each in times:
        for name, counts in each.items():
            found.setdefault(name, Counter()).update({int(bucket): count for bucket, count in counts.items()})
    return found


def _neighbour(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the percentiles of the neighbour's times in all parts that have them, and their ratios."""
    from chaos_clients import TIMES

    known = [part["neighbour"] for part in parts if "control" in part["neighbour"]]
    found: dict[str, Any] = {}
    for beside in ("alone", "control", "events"):
        times = _added(part[beside] for part in known)
        found[beside] = {name: _percentiles(times.get(name, Counter())) for name in TIMES}
    waits = {beside: found[beside]["client"] for beside in found}
    found["ratios"] = {share: {beside: round(waits["events"][share] / waits[beside][share], 2)
        for beside in ("alone", "control") if waits[beside]["count"] and waits["events"]["count"]}
        for share in _SHARES}  # fmt: skip
    older = [part["neighbour"] for part in parts if "during_us" in part["neighbour"]]
    found["older_executions"] = sum(each["executions"] for each in older)
    found["older_p99_ratios"] = [round(each["during_us"]["p99"] / each["alone_us"]["p99"], 2) for each in older
        if each["during_us"]]  # fmt: skip
    return found


_SHARES = {"p50": 0.5, "p99": 0.99}


def _percentiles(counts: Counter[int]) -> dict[str, float]:
    """Return how many times there are, and their percentiles in us, to within 6 %."""
    from nnfmq.observe.statistics_layout import BUCKETS, LatencyHistogram

    histogram = LatencyHistogram(tuple(counts[bucket] for bucket in range(BUCKETS)))
    found = {name: histogram.quantile_ns(share) for name, share in _SHARES.items()}
    return {"count": histogram.total, **{name: ns / 1000 for name, ns in found.items() if ns is not None}}


def summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of several runs."""
    from chaos_steps import steps

    findings = [finding for part in parts for finding in part["findings"]]
    reached = {step for part in parts for step in part["steps"]}
    kinds = Counter(finding["finding"].partition(":")[0] for finding in findings)
    return {
        "runs": len(parts), "events": sum(part["events"] for part in parts),
        "reached": sum(part["reached"] for part in parts),
        "steps": len(steps()), "steps_disturbed": len(reached - {-1}),
        "actions": _summed(parts, "actions"), "victims": _summed(parts, "victims"),
        "found": {kind: kinds.get(kind, 0) for kind in _KINDS},
        "seen_ms": {name: _distribution([each for part in parts for each in part["seen_ms"][name]]) for name in _SEEN},
        "neighbour": _neighbour(parts),
        "statuses": _summed(parts, "statuses"), "findings": findings,
    }  # fmt: skip


def _summed(parts: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    return dict(sum((Counter(part[name]) for part in parts), Counter()).most_common())


def _distribution(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {"count": len(ordered), **{name: percentile(ordered, share) for name, share in shares.items()}}


def print_sums(sums: Mapping[str, Any], no_color: bool) -> None:
    """Print the sums as tables, and what was found."""
    out = console(no_color)
    events = table("action", ">events", "process", ">events")
    actions, victims = list(sums["actions"].items()), list(sums["victims"].items())
    for place in range(max(len(actions), len(victims))):
        cells = [*(actions[place : place + 1] or [("", "")]), *(victims[place : place + 1] or [("", "")])]
        events.add_row(*(str(cell) for pair in cells for cell in pair))
    out.print(events)
    seen = table("death", ">times", ">p50, ms", ">p99, ms", ">max, ms")
    for name, text in _SEEN.items():
        found = sums["seen_ms"][name]
        seen.add_row(text, str(found["count"]), *(f"{found[key]:.1f}" for key in ("p50", "p99", "max") if key in found))
    out.print(seen)
    for finding in sums["findings"][:40]:
        out.print(f"found: {finding['event']}\n  {finding['finding']}", highlight=False, soft_wrap=True)
    _print_neighbour(sums["neighbour"], out)
    found = ", ".join(f"{kind} {count}" for kind, count in sums["found"].items())
    out.print(
        f"{sums['events']:,} events in {sums['runs']} runs, {sums['reached']:,} brought about, at "
        f"{sums['steps_disturbed']} of {sums['steps']} steps. Found: {found}."
    )


def _print_neighbour(sums: Mapping[str, Any], out: Console) -> None:
    names = {"alone": "alone", "control": "beside the scripts", "events": "beside the events"}
    times = table("the neighbour", ">times", ">p50, us", ">p99, us", ">queue's p99", ">driver's", ">engine's")
    for beside, text in names.items():
        client, *others = sums[beside].values()
        cells = [client.get("p50"), client.get("p99"), *(each.get("p99") for each in others)]
        times.add_row(text, f"{client['count']:,}", *("-" if us is None else f"{us:.0f}" for us in cells))
    out.print(times)
    ratios = [f"its {share} was {ratio:g} times that {names[beside]}" for share, each in sums["ratios"].items()
        for beside, ratio in each.items()]  # fmt: skip
    older = ", ".join(map(str, sums["older_p99_ratios"]))
    if older:
        ratios.append(
            f"in older runs, of {sums['older_executions']:,} executions, its p99 was {older} times that alone"
        )
    out.print(f"The neighbour beside the events: {'; '.join(ratios)}.")


# ----------------------------------------------------------------------------------------------------------------------
# The command


class SeriesFile:
    """The runs of a series, with one seed, in a file to which several processes add. `path` is None: in this object.

    Raises:
        InvalidArgument: If the file is that of another seed.
    """

    def __init__(self, path: Path | None, seed: int) -> None:
        self._path = path
        self._content: dict[str, Any] = {"seed": seed, "next": 0, "parts": []}
        if path is not None:
            self._content = results_file.content(path, self._content)
        if self._content["seed"] != seed:
            raise InvalidArgument(f"--resume {path}: its events have the seed {self._content['seed']}, not {seed}")

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The results of the runs."""
        parts: list[dict[str, Any]] = self._content["parts"]
        return parts

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        if self._path is None:
            yield self._content
            return
        with results_file.changed(self._path, self._content) as self._content:
            yield self._content

    def take(self, count: int) -> range:
        """Return the numbers of the next events, which no other run gets."""
        with self._changed() as content:
            first = content["next"]
            content["next"] += count
        return range(first, first + count)

    def save(self, part: dict[str, Any]) -> None:
        """Add the results of a run, or replace those that it had earlier."""
        with self._changed() as content:
            others = [each for each in content["parts"] if each["first"] != part["first"]]
            content["parts"] = [*others, part]


def run(options: argparse.Namespace, file: SeriesFile) -> None:
    """Bring the events about, and add the results to the file."""
    use_one_blas_thread()  # before NumPy is imported: a tool with threads could not fork its clients
    from chaos_place import several_users
    from chaos_steps import Page, Role, install

    if options.users == "several":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))
        from support.other_users import open_the_way

        open_the_way(*([] if options.resume is None else [options.resume.absolute().parent]))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a run that is ended removes its driver
    given = options.first
    numbers = file.take(options.events) if given is None else range(given, given + options.events)
    with tempfile.TemporaryDirectory(prefix="nnfmq-chaos-") as name:
        page = Page(Path(name) / "page")
        install(page, Role.CLIENT)
        users = several_users() if options.users == "several" else None
        series = Series(options.seed, Path(name), page, _say, users, options.at)
        series.run(numbers, lambda: file.save(series.report(numbers.start)))


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:110]}", end="", file=sys.stderr, flush=True)


def print_steps() -> None:
    """Print the steps."""
    use_one_blas_thread()
    from chaos_steps import steps

    listing = table("phase", "process", "step")
    for step in sorted(steps(), key=lambda step: step.phase):
        listing.add_row(step.phase, step.role.text, step.name)
    console(no_color=True).print(listing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if nothing was found, else 1."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--events", metavar="N", type=from_zero, default=200, help=f"at most {EVENTS_MAX} (default: 200)")
    add("--first", metavar="N", type=from_zero, help="the number of the first event (default: 0, or the next one)")
    add("--seed", metavar="N", type=from_zero, default=1, help="of what the events are (default: 1)")
    add("--at", metavar="STEP", help="only events at this step, one of those that --steps shows")
    add("--resume", metavar="FILE", type=Path, help="add this run to those of the file, and print the sums")
    add("--users", choices=("one", "several"), default="one", help="of the driver; several: as root (default: one)")
    add("--steps", action="store_true", help="print the steps")
    add("--json", action="store_true", help="print JSON")
    add("--no-color", action="store_true")
    options = parser.parse_args(arguments)
    if options.events > EVENTS_MAX:
        parser.error(f"--events {options.events}: a run has at most {EVENTS_MAX}; --resume sums several runs")
    if options.steps:
        print_steps()
        return 0
    if options.users == "several" and os.getuid():
        parser.error("--users several: only root starts a driver for several users")
    try:
        file = SeriesFile(options.resume, options.seed)
    except InvalidArgument as error:
        parser.error(str(error))
    if options.events:
        try:
            run(options, file)
        except (BenchmarkFailed, NnfmqError) as error:
            print(f"chaos: error: {error}", file=sys.stderr)
            return 1
    sums = summed(file.parts)
    if options.json:
        print_json(sums)
    else:
        print_sums(sums, options.no_color)
    return 1 if sums["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
