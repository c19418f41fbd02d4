"""``pagewise explain``: where a request's time went, and where its cached prefix was lost, in sentences."""

import argparse
import json
import textwrap
import urllib.parse
from collections.abc import Sequence

from pagewise_shared.logs import printable

from pagewise.client import add_url, get

_WIDTH = 100


def explain(arguments: Sequence[str]) -> int:
    """Print the explanation of one request; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="pagewise explain",
        description="Say where the time of a request went, and where its cached prefix was lost. The last "
        "requests that have ended are known too.",
    )
    parser.add_argument(
        "request",
        help="id of the request: that of the response (cmpl-... or chatcmpl-...), or the X-Request-Id it was sent with",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    add_url(parser)
    options = parser.parse_args(arguments)
    report = get(options.url, f"/debug/explain/{urllib.parse.quote(options.request, safe='')}")
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    theirs = report.get("client_request_id")
    print(f"request {report['request_id']}" + (f" ({printable(theirs)})" if theirs else "") + f", {report['state']}")
    for sentence in report["sentences"]:
        print(textwrap.fill(sentence, _WIDTH, initial_indent="  ", subsequent_indent="    "))
    return 0
