"""The console: a page that shows the memory of all executors, and the streams of its data."""

from pagewise_gateway.http.console.assets import Assets
from pagewise_gateway.http.console.feeds import Feeds
from pagewise_gateway.http.console.handlers import CONSOLE_HANDLERS, add_console

__all__ = ["CONSOLE_HANDLERS", "Assets", "Feeds", "add_console"]
