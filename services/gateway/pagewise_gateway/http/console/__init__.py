"""The console: a page that shows what the fleet's memory does, and where its data comes from."""

from pagewise_gateway.http.console.assets import Assets
from pagewise_gateway.http.console.feeds import Feeds
from pagewise_gateway.http.console.handlers import CONSOLE_HANDLERS, add_console

__all__ = ["CONSOLE_HANDLERS", "Assets", "Feeds", "add_console"]
