"""Loads and unloads adapters at runtime: ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as in vLLM.

They make the service read files and fetch from the hub. So an option has to allow them, and with API keys only
operators may use them.
"""

import asyncio
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct
from pagewise_shared.adapters import read_adapter
from pagewise_shared.config import GatewayConfig
from pagewise_shared.config.adapter_options import adapter_rights, max_adapter_rank
from pagewise_shared.errors import AdapterError as UnusableAdapterError
from pagewise_shared.errors import AdapterNotFoundError, ConfigError
from pagewise_shared.protocol import Adapter

from pagewise_gateway.http.context import CLIENT, Service
from pagewise_gateway.http.errors import ForbiddenError, InvalidRequestError, NotFoundError
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.scheduler_client import AdapterError


class LoadAdapterRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/load_lora_adapter``. ``load_inplace``: replace an adapter of the same name."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256, description="The model name for clients.")]
    lora_path: Annotated[
        str, Meta(min_length=1, max_length=1024, description="Its folder, as executors see it, or a hub id.")
    ]
    load_inplace: bool = False


class UnloadAdapterRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/unload_lora_adapter``. ``lora_int_id`` has no meaning here."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_int_id: int | None = None


async def load_adapter(request: web.Request) -> web.Response:
    """Load a LoRA adapter; for operators.

    Raises:
        APIError: it is not allowed, or the adapter cannot be served.
        AdmissionError: there is no scheduler, or no executor.
    """
    service = _check_rights(request)
    body, _ = await read_request(request, LoadAdapterRequest)
    if body.lora_name == service.limits.model_name:
        raise InvalidRequestError(f"lora_name: {body.lora_name!r} is the name of the model", "lora_name")
    if service.scheduler_client.adapters.find(body.lora_name) is not None and not body.load_inplace:
        raise InvalidRequestError(
            f"an adapter called {body.lora_name!r} is loaded already; unload it, or set load_inplace", "lora_name"
        )
    try:
        adapter = await asyncio.to_thread(read_adapter, body.lora_name, body.lora_path, service.limits.max_adapter_rank)
        await service.scheduler_client.queries.load_adapter(adapter, replace=body.load_inplace)
    except AdapterNotFoundError as error:
        raise NotFoundError(str(error), "lora_path") from None
    except (UnusableAdapterError, AdapterError) as error:
        raise InvalidRequestError(str(error), "lora_path") from None
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: web.Request) -> web.Response:
    """Unload a LoRA adapter; for operators.

    Running requests continue with it.

    Raises:
        APIError: it is not allowed, or there is no such adapter.
        AdmissionError: there is no scheduler.
    """
    service = _check_rights(request)
    body, _ = await read_request(request, UnloadAdapterRequest)
    try:
        await service.scheduler_client.queries.unload_adapter(body.lora_name)
    except AdapterError as error:
        raise NotFoundError(str(error), "lora_name") from None
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def read_modules(config: GatewayConfig) -> list[Adapter]:
    """Return the adapters of ``--lora-modules``.

    Raises:
        ConfigError: an adapter has the name of the model.
        AdapterError: an adapter cannot be read.
    """
    modules, model_name = adapter_rights(config).modules, config.served_model_name or config.model
    if model_name in modules:
        raise ConfigError(f"--lora-modules: {model_name!r} is the name of the model")
    return [read_adapter(name, path, max_adapter_rank(config)) for name, path in modules.items()]


def _check_rights(request: web.Request) -> Service:
    service, client = request.app[Service.KEY], request[CLIENT]
    if not service.limits.max_adapter_rank:
        raise ForbiddenError("no adapters are served: start the gateways with --enable-lora")
    if not service.limits.updates_adapters:
        raise ForbiddenError(
            "adapters cannot be loaded while the server runs: start the gateways with --allow-runtime-lora-updating"
        )
    if not client.operator:
        raise ForbiddenError(
            f"only operators load adapters, and the key {client.name!r} is not an operator's: "
            "put operator=yes in its line among the API keys"
        )
    return service
