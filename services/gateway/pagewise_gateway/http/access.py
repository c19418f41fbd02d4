"""Access control: if API keys are configured, every path but the health probes and the console's page needs a key.

Without keys, requests that a page of another site makes a browser send are refused.
"""

import ipaddress
import re
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pagewise_shared.config import GatewayConfig
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import KeyLimits

from pagewise_gateway.http.context import CLIENT, is_messages
from pagewise_gateway.http.credentials import ANONYMOUS, Keyring
from pagewise_gateway.http.errors import ForbiddenError, InvalidKeyError, MediaTypeError
from pagewise_gateway.metrics import Metrics

ANY_HOST = "*"
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[^:\[\]/@\s]+")
_WITH_PORT = re.compile(rf"({_HOST.pattern})(?::\d*)?")
_FORMS = frozenset({"", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain"})
"""Types of bodies that a page may send to another site without a preflight request."""
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN = frozenset({"same-origin", "none"})
_PORTS = {"http": 80, "https": 443}
_PROBES = frozenset({"/health", "/version"})
_PAGE = frozenset({"/", "/console", "/console/assets/{name}"})
"""The console's page and its files, which hold no data: the page asks its user for a key."""
_SCHEME = "bearer"
_MODELS = re.compile("/v1/models(/|$)")


class BrowserGuard:
    """Checks the requests of a server without API keys."""

    def __init__(self, config: GatewayConfig) -> None:
        """Read ``--allowed-hosts``. Without it, all hosts are allowed unless the server listens on loopback.

        Raises:
            ConfigError: an entry is not the name of a host.
        """
        entries = [
            entry.strip().lower().rstrip(".") for entry in (config.allowed_hosts or "").split(",") if entry.strip()
        ]
        for entry in entries:
            if entry != ANY_HOST and (_HOST.fullmatch(entry) is None or ANY_HOST in entry):
                raise ConfigError(f"--allowed-hosts: {entry!r} is no name of a host; give names without a port")
        self._any = ANY_HOST in entries or not (entries or _is_loopback(config.host))
        self._names = {*entries, config.host.lower()}

    def check(self, request: web.Request) -> None:
        """Check the origin of a request.

        Raises:
            ForbiddenError: it comes from a page of another site, or is for a host that is not allowed.
            MediaTypeError: it may have an effect, and has no Content-Type, or a type that pages may send.
        """
        host = request.headers.get("Host")
        if host is not None and not self._is_allowed(host):
            raise ForbiddenError(
                f"the host {host[:100]!r} is not allowed: this server has no API keys, so it answers to localhost, "
                "addresses and names without a dot only; start it with --allowed-hosts to allow more, or with API keys"
            )
        # A request that no handler takes (404, 405) has no effect either.
        reads = request.method in _READING or request.match_info.http_exception is not None
        _check_page(request, host, reads)
        media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if not reads and media_type in _FORMS:
            raise MediaTypeError(
                f"the Content-Type of the request is {media_type or 'missing'}: send Content-Type: application/json"
            )

    def _is_allowed(self, host: str) -> bool:
        if (found := _WITH_PORT.fullmatch(host.lower())) is None:
            return self._any
        name = found[1].rstrip(".")
        # An attacker's page (DNS rebinding) needs a registered name. Names without a dot, and names below .internal
        # (host.docker.internal), cannot be registered, and an address is no name.
        private = "." not in name or name.endswith((".localhost", ".internal"))
        return self._any or private or name in self._names or _is_address(name)


def _check_page(request: web.Request, host: str | None, reads: bool) -> None:
    """Check that no page of another site makes a browser send a request. ``reads``: whether it has no effect.

    Raises:
        ForbiddenError: a page does, and it is not a link that a user has followed.
    """
    site = request.headers.get("Sec-Fetch-Site", "none").lower()
    # The browser compares whole origins, and sets this header rightly even if a proxy rewrites Host.
    if site not in _OWN and not (reads and request.headers.get("Sec-Fetch-Mode", "").lower() == "navigate"):
        raise ForbiddenError("a page of another site sends this: a server without API keys does not take it")
    origin = request.headers.get("Origin")
    if origin is not None and not (site == "same-origin" or _is_own(origin, host)):
        raise ForbiddenError(f"a page of {origin[:100]!r} sends this: a server without API keys does not take it")


def _is_own(origin: str, host: str | None) -> bool:
    """Return whether an Origin is the host of a request, over HTTP, or over HTTPS, which a proxy may terminate."""
    try:
        parts = urlsplit(origin.lower())
        default = _PORTS[parts.scheme]
        own = urlsplit(f"//{host}".lower())
        return host is not None and (parts.hostname, parts.port or default) == (own.hostname, own.port or default)
    except (KeyError, ValueError):
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback)


def make_keyring(config: GatewayConfig, metrics: Metrics) -> Keyring | None:
    """Return the API keys of a configuration, or None if it has none; every request is accepted then.

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
    """Return the middleware that finds the client of a request, and refuses requests without a valid key. If there are
    no keys, it refuses requests that web pages of other sites make browsers send.

    Raises:
        ConfigError: as in ``make_keyring``, or an entry of ``--allowed-hosts`` is not the name of a host.
    """
    keyring, guard = make_keyring(config, metrics), BrowserGuard(config)
    public = _PROBES | _PAGE | ({"/metrics"} if config.public_metrics else set())

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if keyring is None:
            guard.check(request)
        if keyring is None or (resource is not None and resource.canonical in public):
            request[CLIENT] = ANONYMOUS
            return await handler(request)
        key = _key_of(request)
        if (client := keyring.find(key) if key else None) is None:
            metrics.unauthorized.inc()
            raise InvalidKeyError(
                "the API key is not valid" if key else "an API key is needed: send Authorization: Bearer KEY"
            )
        request[CLIENT] = client
        return await handler(request)

    return check


def _key_of(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    # Anthropic's clients send their key in another header, also when they list models.
    if not scheme and (is_messages(request) or _MODELS.match(request.path)):
        return request.headers.get("X-Api-Key", "").strip()
    return key.strip() if scheme.lower() == _SCHEME else ""


def check_operator(request: web.Request, shows: str, otherwise: str = "") -> None:
    """Check that a request comes with an operator's key, or that there are no API keys.

    ``shows``: subject and verb of the error: ``/metrics shows``. ``otherwise``: another way to see it, for the error.

    Raises:
        ForbiddenError: it comes with another key.
    """
    if not request[CLIENT].operator:
        raise ForbiddenError(
            f"{shows} what all API keys do, and the key {request[CLIENT].name!r} is not an operator's: "
            f"put operator=yes in its line among the API keys{otherwise}"
        )
