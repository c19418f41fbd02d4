"""The options of logs and traces; ``docs/observability.md`` tells how they are used."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pagewise_shared.config.kinds import described
from pagewise_shared.errors import ConfigError

LogLevel = Annotated[Literal["debug", "info", "warning", "error"], described("lowest severity that is logged")]
LogFormat = Annotated[
    Literal["text", "json"],
    described(
        "how a line of the log is written; json: as an object, for programs that collect logs",
        more="[observability.md](observability.md#logs) lists the fields.",
    ),
]

ServiceStatusFile = Annotated[
    str | None,
    described(
        "file in which the program that starts the services says which of them keep failing; /health shows it",
        "FILE",
        "`pagewise serve` and `pagewise up` write one by themselves.",
    ),
]


TracesEndpoint = Annotated[
    str | None,
    described(
        "OpenTelemetry collector to which traces of requests are sent, such as http://collector:4318 (default: none)",
        "URL",
        "OTLP over HTTP; a URL without a path gets `/v1/traces`. It needs `pip install pagewise[otel]`. "
        "[observability.md](observability.md#traces) tells what is in a trace.",
    ),
]


def check_tracing(values: dict[str, object]) -> None:
    """Check the endpoint, if there is one.

    Raises:
        ConfigError: it is no URL of HTTP.
    """
    endpoint = values.get("otlp_traces_endpoint")
    if endpoint is None:
        return
    try:
        parts = urlsplit(str(endpoint))
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        usable = False
    if not usable:
        raise ConfigError(
            f"--otlp-traces-endpoint: {endpoint!r} is no URL such as http://collector:4318 (OTLP over HTTP, not gRPC)"
        )
