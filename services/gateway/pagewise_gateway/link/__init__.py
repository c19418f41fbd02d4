"""The link to the scheduler: the connection, and the requests that are served over it."""

from pagewise_gateway.link.adapter_table import AdapterError, AdapterTable
from pagewise_gateway.link.live_request import LiveRequest
from pagewise_gateway.link.scheduler_link import SchedulerLink

__all__ = ["AdapterError", "AdapterTable", "LiveRequest", "SchedulerLink"]
