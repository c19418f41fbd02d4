"""Adapters while the server runs: ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them.

They make the service read files and fetch from the hub, so they have to be allowed by an option, and with API keys only
operators may use them.
"""

import asyncio

from aiohttp import web
from pagewise_shared.adapters import read_adapter
from pagewise_shared.errors import AdapterError as UnusableAdapterError
from pagewise_shared.errors import AdapterNotFoundError

from pagewise_gateway.http.context import CLIENT, Service
from pagewise_gateway.http.errors import ForbiddenError, InvalidRequestError, NotFoundError
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.schema import LoadAdapterRequest, UnloadAdapterRequest
from pagewise_gateway.link import AdapterError


async def load_lora_adapter(request: web.Request) -> web.Response:
    """Load an adapter on all executors, and serve it from then on.

    Raises:
        APIError: it is not allowed, or the adapter cannot be served.
        AdmissionError: there is no scheduler, or no executor.
    """
    service = _checked(request)
    body, _ = await read_request(request, LoadAdapterRequest)
    if body.lora_name == service.limits.model_name:
        raise InvalidRequestError(f"lora_name: {body.lora_name!r} is the name of the model", "lora_name")
    if service.link.adapters.find(body.lora_name) is not None and not body.load_inplace:
        raise InvalidRequestError(
            f"an adapter called {body.lora_name!r} is loaded already; unload it, or set load_inplace", "lora_name"
        )
    rank = service.limits.max_lora_rank
    try:
        adapter = await asyncio.to_thread(read_adapter, body.lora_name, body.lora_path, rank)
        await service.link.adapters.load(adapter, replace=body.load_inplace)
    except AdapterNotFoundError as error:
        raise NotFoundError(str(error), "lora_path") from None
    except (UnusableAdapterError, AdapterError) as error:
        raise InvalidRequestError(str(error), "lora_path") from None
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(request: web.Request) -> web.Response:
    """Serve an adapter no more. Requests that run go on with it.

    Raises:
        APIError: it is not allowed, or there is no such adapter.
        AdmissionError: there is no scheduler.
    """
    service = _checked(request)
    body, _ = await read_request(request, UnloadAdapterRequest)
    try:
        await service.link.adapters.unload(body.lora_name)
    except AdapterError as error:
        raise NotFoundError(str(error), "lora_name") from None
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _checked(request: web.Request) -> Service:
    """Return the service if this client may load and unload adapters.

    Raises:
        ForbiddenError: nobody may, or this client may not.
    """
    service, client = request.app[Service.KEY], request[CLIENT]
    if not service.limits.max_lora_rank:
        raise ForbiddenError("no adapters are served: start the gateways with --enable-lora")
    if not service.limits.updates_adapters:
        raise ForbiddenError(
            "adapters cannot be loaded while the server runs: start the gateways with --allow-runtime-lora-updating"
        )
    if not client.rights.operator:
        raise ForbiddenError(
            f"only operators load adapters, and the key {client.name!r} is not an operator's: "
            "put operator=yes in its line among the API keys"
        )
    return service
