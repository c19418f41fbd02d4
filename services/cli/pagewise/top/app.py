"""The screen of ``pagewise top``."""

from typing import Any, ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import Resize
from textual.widgets import DataTable, Footer, Input, Static

from pagewise.client import UnreachableError, get
from pagewise.memory import description
from pagewise.top.feed import Feed, abort
from pagewise.top.rows import COLUMNS, cells, chosen, executors, legend, summary

LEAST_COLUMNS, LEAST_LINES = 60, 16
_LEAST_FOR_DETAILS = 24


class Top(App[int]):
    """Executors with their memory above, requests below, and the time line of the chosen request beside them."""

    CSS = """
    Screen { layout: vertical; }
    #summary, #state, #legend { height: 1; padding: 0 1; }
    #summary { background: $panel; }
    #state { display: none; color: $error; text-style: bold; }
    #executors { height: auto; max-height: 45%; padding: 0 1; }
    #requests { height: 1fr; }
    #find { display: none; height: 3; }
    #details { display: none; height: 40%; border-top: solid $accent; padding: 0 1; }
    #small { display: none; height: 1fr; content-align: center middle; }
    .small #small { display: block; }
    .small #main { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort by the next column"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "find", "Find", key_display="/"),
        Binding("a", "abort", "Abort (twice)"),
        Binding("escape", "close", "Close", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "pagewise top"

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._feed = Feed(
            url,
            lambda name, data: self._from_feed(self._show, name, data),
            lambda reason: self._from_feed(self._lost, reason),
        )
        self._fleet: dict[str, Any] | None = None
        self._requests: dict[str, Any] = {"running": [], "waiting": [], "ended": []}
        self._sorted_by = -1
        self._descending = True
        self._wanted = ""
        self._detailed = ""
        self._aborting = ""

    def compose(self) -> ComposeResult:
        """Build the screen."""
        with Vertical(id="main"):
            yield Static(f"connecting to {self._url}", id="summary", markup=False)
            yield Static(id="state", markup=False)
            with VerticalScroll(id="executors"):
                yield Static(id="memory", markup=False)
            yield Static(legend(), id="legend")
            yield Input(placeholder="id, key, executor or state", id="find")
            yield DataTable(id="requests", cursor_type="row", zebra_stripes=True)
            with VerticalScroll(id="details"):
                yield Static(id="timeline", markup=False)
            yield Footer()
        yield Static(id="small", markup=False)

    def on_mount(self) -> None:
        """Begin to read."""
        self._name_columns()
        self.query_one(DataTable).focus()
        self._feed.start()
        self.set_interval(1.0, self._read_details)

    def on_unmount(self) -> None:
        """End reading."""
        self._feed.close()

    def on_resize(self, event: Resize) -> None:
        """Say so if there is too little room, and draw bars as long as there is."""
        small = event.size.width < LEAST_COLUMNS or event.size.height < LEAST_LINES
        self.screen.set_class(small, "small")
        if small:
            self.query_one("#small", Static).update(
                f"{event.size.width} columns and {event.size.height} lines are too few: "
                f"{LEAST_COLUMNS} and {LEAST_LINES} are needed."
            )
        self._draw_fleet()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the requests in which it occurs."""
        self._wanted = event.value
        self._draw_requests()

    def on_input_submitted(self) -> None:
        """Go to the requests that were found."""
        self.query_one(DataTable).focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the time line of a request."""
        self._detailed = str(event.row_key.value)
        self.query_one("#details").display = True
        self._read_details()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by a column that was clicked."""
        self._sorted_by = event.column_index
        self._name_columns()

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._sorted_by = (self._sorted_by + 1) % len(COLUMNS)
        self._name_columns()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._descending = not self._descending
        self._name_columns()

    def action_find(self) -> None:
        """Open the field for the text to find."""
        find = self.query_one("#find", Input)
        find.display = True
        find.focus()

    def action_close(self) -> None:
        """Close the details, and end finding."""
        self._detailed = self._aborting = ""
        self.query_one("#details").display = False
        find = self.query_one("#find", Input)
        find.display, find.value = False, ""
        self.query_one(DataTable).focus()

    def action_abort(self) -> None:
        """Abort the request under the cursor, when asked for it twice."""
        table = self.query_one(DataTable)
        if not table.row_count:
            return
        chosen_id = str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)
        if self._aborting != chosen_id:
            self._aborting = chosen_id
            self.notify(f"Press a again to abort {chosen_id}")
            return
        self._aborting = ""
        self._abort(chosen_id)

    @work(thread=True)
    def _abort(self, request_id: str) -> None:
        try:
            known = abort(self._url, request_id)
            message = f"{request_id} is aborted" if known else f"{request_id} has ended already"
        except UnreachableError as error:
            message = str(error)
        self._from_feed(self.notify, message)

    @work(thread=True, exclusive=True)
    def _read_details(self) -> None:
        request_id = self._detailed
        if not request_id:
            return
        try:
            limit = _LEAST_FOR_DETAILS
            text = "\n".join(description(get(self._url, f"/debug/requests/{request_id}?limit={limit}")))
        except UnreachableError as error:
            text = str(error)
        self._from_feed(self.query_one("#timeline", Static).update, text)

    def _from_feed(self, call: Any, *arguments: Any) -> None:
        """Call a function on the screen's thread, unless the screen has gone."""
        if self.is_running:
            self.call_later(call, *arguments)

    def _show(self, name: str, data: dict[str, Any]) -> None:
        self.query_one("#state").display = False
        if name == "fleet":
            self._fleet = data
            self._draw_fleet()
        elif name == "requests":
            self._requests = data
            self._draw_requests()

    def _lost(self, reason: str) -> None:
        state = self.query_one("#state", Static)
        state.update(f"{reason}. Trying again; what is shown is old.")
        state.display = True

    def _draw_fleet(self) -> None:
        if self._fleet is not None:
            self.query_one("#summary", Static).update(summary(self._fleet))
            self.query_one("#memory", Static).update(executors(self._fleet, self.size.width - 4))

    def _name_columns(self) -> None:
        """Make the table's columns anew, with an arrow at the column that sorts it."""
        table = self.query_one(DataTable)
        table.clear(columns=True)
        for number, column in enumerate(COLUMNS):
            arrow = (" ▼" if self._descending else " ▲") if number == self._sorted_by else ""
            table.add_column(column.title + arrow, key=column.field)
        self._draw_requests()

    def _draw_requests(self) -> None:
        """Fill the table; the cursor stays at its request."""
        table = self.query_one(DataTable)
        row, key = table.cursor_row, None
        if table.row_count:
            key = str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)
        column = None if self._sorted_by < 0 else COLUMNS[self._sorted_by]
        table.clear()
        found = {one["request_id"]: one for one in chosen(self._requests, self._wanted, column, self._descending)}
        for request_id, one in found.items():
            table.add_row(*cells(one), key=request_id)
        names = list(found)
        table.move_cursor(row=names.index(key) if key in found else min(row, max(0, len(names) - 1)))
