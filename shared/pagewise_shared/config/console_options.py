"""The options about the console: those of gateways, and which of them the scheduler has to allow."""

from typing import Annotated

from pagewise_shared.config.chat import ChatConfig
from pagewise_shared.config.kinds import described as _help

ConsoleShowsText = Annotated[
    bool,
    _help(
        "let the console show operators the text of cached blocks, which is that of clients' prompts",
        more="The gateway and the scheduler both need it: without it, the scheduler sends no gateway the tokens of "
        "cached blocks.",
    ),
]


class ConsoleConfig(ChatConfig, frozen=True, kw_only=True):
    """Options of ``pagewise-gateway`` about the console.

    It has those of conversations as its base because a struct of msgspec can have one base with fields only.
    """

    console: Annotated[
        bool,
        _help(
            "serve the console at /console, a page that shows memory, requests and processes",
            more="Its data is for operators, as that of `/debug` is. [console.md](console.md) tells what it shows.",
        ),
    ] = True
    console_shows_text: ConsoleShowsText = False
