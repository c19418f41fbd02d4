"""Requests of the scheduler's core, built and changed in one call."""

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.protocol import RequestParams
from pagewise_shared.sampling import SamplingParams


def make_request(name: str, prompt: Iterable[int], max_tokens: int, sampling: SamplingParams, **fields: Any) -> Request:
    """A request; ``fields`` are its own fields, or fields of its parameters."""
    params = {field: fields.pop(field) for field in RequestParams.__struct_fields__ if field in fields}
    return Request(name, array("i", prompt), max_tokens, RequestParams(sampling, **params), **fields)


def change(request: Request, **params: Any) -> None:
    """Let a request have these parameters instead."""
    request.params = msgspec.structs.replace(request.params, **params)
