"""Access control: if API keys are configured, every path needs one but the health probes and the console's page."""

import re

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pagewise_shared.config import GatewayConfig
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import KeyLimits

from pagewise_gateway.http.browser_guard import BrowserGuard
from pagewise_gateway.http.client_connection import ClientConnection
from pagewise_gateway.http.clients import EVERYBODY, Keyring
from pagewise_gateway.http.context import CLIENT, is_messages
from pagewise_gateway.http.errors import ForbiddenError, InvalidKeyError
from pagewise_gateway.metrics import Metrics

_PROBES = frozenset({"/health", "/version"})
_PAGE = frozenset({"/", "/console", "/console/assets/{name}"})
"""The console's page and its files, which hold no data: the page asks its user for a key."""
_SCHEME = "bearer"
_MODELS = re.compile("/v1/models(/|$)")


def make_keyring(config: GatewayConfig, metrics: Metrics) -> Keyring | None:
    """Return the API keys of a configuration, or None if it has none; every request is let in then.

    Raises:
        ConfigError: the keys cannot be read, or there are limits but no keys.
    """
    usual = KeyLimits(config.key_concurrent, config.key_requests_per_minute, config.key_tokens_per_minute)
    if config.api_keys or config.api_keys_file:
        return Keyring(config.api_keys, config.api_keys_file, usual, metrics, share_cache=config.share_cache)
    if usual != KeyLimits():
        raise ConfigError("the --key-... options limit API keys, and there are none: give --api-keys-file")
    return None


def access_check(config: GatewayConfig, metrics: Metrics) -> Middleware:
    """Return the middleware that finds out which client sends a request, and refuses requests without a valid key. If
    there are no keys, it refuses requests that web pages of other sites make browsers send.

    Raises:
        ConfigError: as in ``make_keyring``, or a host that is allowed is none.
    """
    keyring, guard = make_keyring(config, metrics), BrowserGuard(config)
    public = _PROBES | _PAGE | ({"/metrics"} if config.public_metrics else set())

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.transport
        if isinstance(connection, ClientConnection):
            connection.begin(request.content)
        resource = request.match_info.route.resource
        if keyring is None:
            guard.check(request)
        if keyring is None or (resource is not None and resource.canonical in public):
            request[CLIENT] = EVERYBODY
            return await handler(request)
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        # Anthropic's clients send their key like this, also to list models.
        if not scheme and (is_messages(request) or _MODELS.match(request.path)):
            scheme, key = _SCHEME, request.headers.get("X-Api-Key", "")
        client = keyring.find(key.strip()) if scheme.lower() == _SCHEME else None
        if client is None:
            metrics.unauthorized.inc()
            raise InvalidKeyError(
                "the API key is not valid" if key else "an API key is needed: send Authorization: Bearer KEY"
            )
        request[CLIENT] = client
        if isinstance(connection, ClientConnection):
            connection.key = client.name
        return await handler(request)

    return check


def check_operator(request: web.Request, what: str, otherwise: str = "") -> None:
    """Check that a request comes with an operator's key, or that there are no API keys.

    ``what``: what only operators may see. ``otherwise``: another way to see it, for the error.

    Raises:
        ForbiddenError: it comes with another key.
    """
    if not request[CLIENT].rights.operator:
        raise ForbiddenError(
            f"{what} what all API keys do, and the key {request[CLIENT].name!r} is not an operator's: "
            f"put operator=yes in its line among the API keys{otherwise}"
        )
