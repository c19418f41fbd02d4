"""Reports of requests and of KV memory: the scheduler fills them in, gateways and clients turn them into text.

Times are seconds. ``at`` is a time in the life of a request, counted from its arrival.
"""

# ruff: noqa: F403
from pagewise_shared.reports.cache import *
from pagewise_shared.reports.memory import *
from pagewise_shared.reports.requests import *
