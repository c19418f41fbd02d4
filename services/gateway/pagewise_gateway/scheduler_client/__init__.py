"""The gateway's client of the scheduler: the connection, and the requests that are served over it."""

from pagewise_gateway.scheduler_client.adapters import AdapterError, AdapterTable
from pagewise_gateway.scheduler_client.client import SchedulerClient
from pagewise_gateway.scheduler_client.live_request import LiveRequest

__all__ = ["AdapterError", "AdapterTable", "LiveRequest", "SchedulerClient"]
