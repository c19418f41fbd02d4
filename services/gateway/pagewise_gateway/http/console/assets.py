"""The files of the console's page, which are part of the package: no network is needed to show it."""

import hashlib
import mimetypes
from importlib.resources import files
from typing import ClassVar

from aiohttp import hdrs, web

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers keep the files, and ask each time whether they are still the same.
    "Cache-Control": "no-cache",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_INDEX = "index.html"


class Assets:
    """The files by name, read once."""

    KEY: ClassVar[web.AppKey["Assets"]] = web.AppKey("console_assets")

    def __init__(self) -> None:
        folder = files("pagewise_gateway").joinpath("console", "static")
        self._files = {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}
        self._tags = {name: f'"{hashlib.sha256(body).hexdigest()[:16]}"' for name, body in self._files.items()}

    def page(self, request: web.Request) -> web.Response:
        """Answer with the page."""
        return self.file(request, _INDEX)

    def file(self, request: web.Request, name: str) -> web.Response:
        """Answer with a file, or with 304 if the client has it.

        Raises:
            web.HTTPNotFound: there is no such file.
        """
        body = self._files.get(name)
        if body is None:
            raise web.HTTPNotFound
        headers = {**_HEADERS, hdrs.ETAG: self._tags[name]}
        if self._tags[name] in request.headers.get(hdrs.IF_NONE_MATCH, ""):
            return web.Response(status=304, headers=headers)
        suffix = name[name.rfind(".") :]
        kind = _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        charset = "utf-8" if kind.startswith("text/") else None
        return web.Response(body=body, content_type=kind, charset=charset, headers=headers)
