"""The option of KV events, by vLLM's names; ``docs/operations.md`` describes them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pagewise_shared.config.kinds import described
from pagewise_shared.errors import ConfigError

KVEventsOption = Annotated[
    str | None,
    described(
        "publish which blocks executors store and evict, for routers, over ZeroMQ; JSON as for vLLM (default: do not)",
        "CONFIG",
        'Such as `{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}`. The events have the tokens of all '
        "prompts, unencrypted. [operations.md](operations.md#routers-in-front) describes the fields.",
    ),
]
_Count = Annotated[int, Meta(ge=1, le=10_000_000)]
_Endpoint = Annotated[str, Meta(min_length=1)]


class KVEventsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether and how KV events are published.

    Fields:
        enable_kv_cache_events: whether events are published. publisher: "null" turns events off, too; None: "zmq".
        endpoint: the address of the PUB socket. The socket is bound to an address with ``*`` or ``::``, or with ipc,
            and connected to any other address.
        replay_endpoint: the address to which the socket that sends batches again is bound; None: no such socket.
        buffer_steps: the number of the last batches that are kept to be sent again.
        hwm: maximum number of batches that wait for a slow subscriber. max_queue_size: maximum number of batches that
            wait to be published.
        topic: the first frame of each message.
        encoding: the format of events, as in vLLM since 0.24 ("map"), or before ("array"). vLLM has no such field.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: _Endpoint = "tcp://*:5557"
    replay_endpoint: _Endpoint | None = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 100_000
    max_queue_size: _Count = 100_000
    topic: str = ""
    encoding: Literal["map", "array"] = "map"

    @property
    def publishes(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_kv_events(text: str) -> KVEventsConfig:
    """Parse the value of ``--kv-events-config``.

    Raises:
        ConfigError: the value is not a JSON object of a ``KVEventsConfig``.
    """
    try:
        return msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.MsgspecError as error:
        example = '{"enable_kv_cache_events": true}'
        raise ConfigError(f"--kv-events-config: {error} (got {text!r}; {example} is an example)") from error


def check_kv_events(values: Mapping[str, Any]) -> None:
    """Check the option, if it was given.

    Raises:
        ConfigError: it is unusable.
    """
    if values.get("kv_events_config") is not None:
        parse_kv_events(values["kv_events_config"])
