"""Operators list and release cached prefixes: ``/debug/cache``, and ``/reset_prefix_cache`` as in vLLM."""

from typing import Annotated, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct
from pagewise_shared.block_hash import MAX_SALT_TAGS

from pagewise_gateway.http.access import check_operator
from pagewise_gateway.http.context import CLIENT, Service
from pagewise_gateway.http.debug import limit_of
from pagewise_gateway.http.errors import ForbiddenError, InvalidRequestError
from pagewise_gateway.http.parsing import read_request

Query = TypeVar("Query", bound=Struct)

_LONGEST_SALT = 1024
_RUNNING = "reset_running_requests"
_Salt = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=_LONGEST_SALT,
        description="A cache salt as `pagewise wipe` takes it: key:NAME, group:NAME or all, and a request's own "
        "cache_salt behind a slash.",
    ),
]
_Key = Annotated[str, Meta(min_length=1, max_length=256, description="The name of an API key, for key:NAME.")]


class ResetCacheRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters or body of ``POST /reset_prefix_cache``. Without ``salt`` and ``key``, all cached blocks are released.

    vLLM's fields: ``reset_external`` reaches disks and stores too, and ``reset_running_requests`` may only be false.
    """

    salt: _Salt | None = None
    key: _Key | None = None
    reset_running_requests: bool | None = None
    reset_external: bool | None = None


class _Asked(Struct, forbid_unknown_fields=True):
    """The parameters of ``/debug/cache``."""

    salt: _Salt | None = None
    key: _Key | None = None
    limit: str = ""


async def debug_cache(request: web.Request) -> web.Response:
    """The cached prefixes of every executor; ?salt= or ?key= selects prefixes, ?limit=N cuts lists."""
    check_operator(request, "/debug/cache shows")
    asked = _parameters(request, _Asked)
    salt, limit = _salt(asked.salt, asked.key), limit_of(request)
    queries = request.app[Service.KEY].scheduler_client.queries
    return _json(await queries.report("cache", salt, limit))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Release cached blocks that are not in use; for operators.

    Raises:
        ForbiddenError: the client is no operator.
        InvalidRequestError: a value is not supported, or blocks are selected in two ways.
    """
    if not request[CLIENT].operator:
        raise ForbiddenError(
            f"only operators reset the cache, and the key {request[CLIENT].name!r} is not an operator's: "
            "put operator=yes in its line among the API keys"
        )
    asked = _parameters(request, ResetCacheRequest)
    if request.can_read_body:
        if request.query:  # one of them would be ignored, and more released than is meant
            raise InvalidRequestError("give parameters or a body, not both")
        asked, _ = await read_request(request, ResetCacheRequest)
    if asked.reset_running_requests:
        raise InvalidRequestError(
            f"{_RUNNING} is not supported: blocks in use stay; repeat the call when their requests have ended", _RUNNING
        )
    queries, salt = request.app[Service.KEY].scheduler_client.queries, _salt(asked.salt, asked.key)
    if asked.reset_external and salt.count("/") > MAX_SALT_TAGS - 3:
        raise InvalidRequestError("reset_external finds salts of at most 30 parts between slashes", "salt")
    return _json(await queries.reset_cache(salt, external=bool(asked.reset_external)))


def _salt(salt: str | None, key: str | None) -> str:
    """Return the cache salt that a request selects; empty: all salts.

    Raises:
        InvalidRequestError: the request has both a salt and a key.
    """
    if salt is not None and key is not None:
        raise InvalidRequestError("give salt or key, not both", "key")
    return salt or (f"key:{key}" if key is not None else "")


def _parameters(request: web.Request, kind: type[Query]) -> Query:
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error)) from None


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
