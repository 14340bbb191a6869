"""The live view of `nnfmq top`, with textual: a line about the driver, and tables of clients, models and bursts.

If the driver serves models by name, a table of these comes first, with why versions are not served. All tables scroll
together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from nnfmq.cli import describe
from nnfmq.cli.console import share_text
from nnfmq.cli.statistics import (
    Activity,
    DriverSample,
    ServedModels,
    read_served_models,
    served_activities,
    take_sample,
)
from nnfmq.cli.statistics_tables import (
    Rows,
    burst_rows,
    client_rows,
    duration_text,
    failure_lines,
    model_rows,
    rate_text,
    served_activity_rows,
    size_text,
    times_rows,
)
from nnfmq.hal.errors import DeadObject, DeviceUnavailable, NnfmqError

if TYPE_CHECKING:
    from nnfmq.client.connection.client import Client

_READ_S = 0.5  # of each reading, which waits as long if no driver runs
_TABLES = ("served", "clients", "models", "times", "bursts")
_SCROLLBAR = 1  # character; tables leave it free, so that they do not change when it appears


class TopScreen(App[None]):
    """The application. Borrows `client`, which is of the driver at `socket` and recovers when another driver runs.

    If that driver is killed, but not its workers, the client's worker goes on with statistics that nobody else writes.
    `connect` then returns a client of the driver that listens now; None = it is not looked for.
    """

    CSS = """
    Screen { scrollbar-size-vertical: 1; }
    #driver { height: auto; padding: 0 1; background: $panel; }
    #failures { height: auto; padding: 0 1; }
    DataTable { height: auto; margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("space", "pause", "pause"),
        Binding("down", "screen.scroll_down", "scroll", key_display="↑ ↓ PgUp PgDn"),
        Binding("up", "screen.scroll_up", show=False),
        Binding("pagedown", "screen.page_down", show=False),
        Binding("pageup", "screen.page_up", show=False),
        Binding("home", "screen.scroll_home", show=False),
        Binding("end", "screen.scroll_end", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(
        self, client: Client, interval: float, socket: str | None, connect: Callable[[], Client] | None = None
    ) -> None:
        super().__init__()
        self._client = client
        self._connect = connect
        self._found = ExitStack()  # the client that `connect` has returned
        self._seconds = interval
        self._socket = socket
        self._served = ServedModels()
        self._before: DriverSample | None = None
        self._activity: Activity | None = None
        self._is_paused = False

    def compose(self) -> ComposeResult:
        """Yield the widgets from top to bottom."""
        yield Static("", id="driver", markup=False)
        for name in _TABLES:
            listing: DataTable[Text] = DataTable(id=name, cursor_type="none", zebra_stripes=True)
            listing.can_focus = False  # keys are for the screen
            yield listing
            if name == "served":
                yield Static("", id="failures", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read the statistics."""
        self.refresh_statistics()
        self.set_interval(self._seconds, self.refresh_statistics)

    def on_resize(self) -> None:
        """Show what fits into the new width."""
        self.call_after_refresh(self._draw)

    def action_pause(self) -> None:
        """Stop, or go on."""
        self._is_paused = not self._is_paused
        self._draw()

    def refresh_statistics(self) -> None:
        """Read the statistics and show what has changed; say so if no driver runs."""
        if self._is_paused:
            return
        try:
            sample = take_sample(self._client, _READ_S)
        except (DeadObject, DeviceUnavailable) as error:
            self._show_none(describe(error))
            return
        except NnfmqError as error:
            self._say(describe(error))
            return
        if self._was_orphaned(sample):
            return
        self._activity = Activity(sample, self._before)
        self._before = sample
        self._served = read_served_models(self._client, self._socket, _READ_S)
        self._draw()

    def _show_none(self, reason: str) -> None:
        self._before = self._activity = None
        for name in _TABLES:
            self.query_one(f"#{name}", DataTable).clear()
        self.query_one("#failures").display = False
        self._say(f"{reason}; waiting for the next driver")

    def _was_orphaned(self, sample: DriverSample) -> bool:
        """Return whether the driver has ended without the worker that was asked; then look for the next driver."""
        pid = sample.statistics.pid
        if self._connect is None or pid in sample.usage:
            return False
        try:
            found = self._connect()
        except NnfmqError as error:
            self._show_none(f"driver {pid} has ended, only workers of it go on: {describe(error)}")
            return True
        if found.driver_pid == pid:  # this process does not see it: it is of another container
            found.close()
            return False
        self._found.close()
        self._client.close()
        self._client = self._found.enter_context(found)
        self._before = None
        self.refresh_statistics()
        return True

    def on_unmount(self) -> None:
        """Close the client that was found."""
        self._found.close()

    def _say(self, text: str) -> None:
        self.query_one("#driver", Static).update(text)

    def _draw(self) -> None:
        activity = self._activity
        if activity is None:
            return
        statistics = activity.now.statistics
        usage = activity.now.usage.get(statistics.pid)
        parts = [
            f"driver {statistics.pid}",
            f"up {duration_text(statistics.uptime_ns)}",
            f"{rate_text(activity.per_s)} executions per s",
            f"CPU {share_text(activity.cpu_share(statistics.pid))}",
            f"memory {size_text(None if usage is None else usage.resident_bytes)}",
        ]
        if self._served.problem:
            parts.append(f"served models unknown: {self._served.problem}")
        self._say(", ".join(parts) + (" — paused" if self._is_paused else ""))
        width, entries = self.size.width - _SCROLLBAR, self._served.entries
        self.query_one("#served").display = entries is not None
        failures = failure_lines(entries or [])
        self.query_one("#failures").display = bool(failures)
        self.query_one("#failures", Static).update("\n".join(failures))
        served = served_activity_rows(served_activities(entries or [], activity), width)
        of_clients = (make(activity, width) for make in (client_rows, model_rows, times_rows, burst_rows))
        tables = (served, *of_clients)
        for name, contents in zip(_TABLES, tables, strict=True):
            self._fill(self.query_one(f"#{name}", DataTable), contents)

    @staticmethod
    def _fill(listing: DataTable[Text], contents: Rows) -> None:
        headings, rows = contents
        listing.clear(columns=True)
        numbers = [heading.startswith(">") for heading in headings]
        for heading, right in zip(headings, numbers, strict=True):
            listing.add_column(_justified(heading.lstrip(">"), right))
        for cells in rows:
            listing.add_row(*map(_justified, cells, numbers))


def _justified(text: str, right: bool) -> Text:
    return Text(text, justify="right" if right else "left")
