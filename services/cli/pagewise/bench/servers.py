"""The servers under load: where they are, and what they can do."""

import os
import re
import urllib.parse
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field

KEY_VARIABLES = ("PAGEWISE_API_KEY", "OPENAI_API_KEY")
"""Where an API key is looked for unless ``--api-key-env`` names a variable."""


class BenchError(Exception):
    """A benchmark cannot be run; the text says why, and what to do."""


@dataclass(slots=True)
class Server:
    """One server.

    Fields:
        name: as results call it.
        url: without the path of the API and without credentials.
        endpoint: the path that requests go to.
        model: the name of its model; empty: not known yet.
        key, key_variable: its API key, and the environment variable that held it.
        streams_usage: whether it takes ``stream_options`` and tells token counts at the end of a stream.
        ignores_eos: whether it is asked to generate beyond the end of a text.
        length_field: the field of a body that bounds the output.
        version: what it says of itself, None if it says nothing.
    """

    name: str
    url: str
    endpoint: str = "/v1/completions"
    model: str = ""
    key: str = ""
    key_variable: str = KEY_VARIABLES[0]
    streams_usage: bool = True
    ignores_eos: bool = True
    length_field: str = "max_tokens"
    version: str | None = None
    max_model_len: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages."""
        return self.endpoint.endswith("/chat/completions")

    @property
    def is_local(self) -> bool:
        """Whether it shares this machine with the load generator."""
        return urllib.parse.urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")


def servers_of(options: Namespace) -> list[Server]:
    """Return the servers that the options name, in their order.

    Raises:
        BenchError: a URL is none, two servers have one name, a variable for a key is not set, or an option that may be
            given once for each server is not given as often.
    """
    urls = options.base_url or [f"http://{options.host}:{options.port}"]
    variables = _for_each("--api-key-env", options.api_key_env, len(urls))
    models = _for_each("--model", options.model, len(urls))
    servers = []
    for number, (given, asked_variable, model) in enumerate(zip(urls, variables, models, strict=True)):
        name, url = _named(given)
        variable, key = _key(asked_variable)
        name = name or (urllib.parse.urlsplit(url).netloc if len(urls) == len(set(urls)) else f"server {number + 1}")
        servers.append(Server(name, url, options.endpoint, model or "", key, variable))
    if len({server.name for server in servers}) < len(servers):
        raise BenchError("two servers have one name: write --base-url NAME=URL")
    return servers


def _for_each(option: str, given: list[str] | None, count: int) -> Sequence[str | None]:
    """Return the value of an option for each server: that one which is for all, or its own."""
    values: Sequence[str | None] = given or [None]
    if len(values) not in (1, count):
        raise BenchError(f"{option} is given {len(values)} times for {count} servers: give one, or one for each")
    return values if len(values) == count else [*values] * count


def _named(given: str) -> tuple[str, str]:
    """Return the name, which may be empty, and the URL of ``NAME=URL`` or ``URL``."""
    matched = re.fullmatch(r"(?:([\w. :-]+)=)?(https?://.+)", given)
    parts = urllib.parse.urlsplit(matched[2]) if matched else None
    if matched is None or parts is None or not parts.hostname:
        raise BenchError(f"--base-url {given}: it begins with http:// or https://, perhaps after NAME=")
    if parts.username or parts.password:
        raise BenchError("--base-url: no credentials in URLs, which results show: set an API key (--api-key-env)")
    return matched[1] or "", matched[2].rstrip("/").removesuffix("/v1").rstrip("/")


def _key(variable: str | None) -> tuple[str, str]:
    """Return the variable of an API key, and the key; it is empty if there is none and none was asked for."""
    if variable is not None:
        if not os.environ.get(variable):
            raise BenchError(f"--api-key-env {variable}: this environment variable is not set")
        return variable, os.environ[variable]
    found = next((name for name in KEY_VARIABLES if os.environ.get(name)), KEY_VARIABLES[0])
    return found, os.environ.get(found, "")
