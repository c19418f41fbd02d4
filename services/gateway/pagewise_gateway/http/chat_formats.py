"""What this gateway does with conversations by its options: template variables, tool calls, reasoning."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pagewise_shared.config import GatewayConfig
from pagewise_shared.errors import ConfigError

from pagewise_gateway.http.conversation import check_depth, check_tool_list
from pagewise_gateway.http.errors import APIError, InvalidRequestError
from pagewise_gateway.http.schema import ChatRequest
from pagewise_gateway.http.tool_schema import NamedToolChoice, Tool
from pagewise_gateway.text.chat_template import RESERVED_NAMES
from pagewise_gateway.text.output_parsing import MessageParser, OutputFormat, Start, Tools, make_format
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Parsing:
    """How the outputs of one request are parsed.

    Fields:
        format: of the text. tool_parser: the name of the parser of its calls.
        shown: special tokens that the parser has to see.
        tools: that may be called. parallel: whether one answer may have several calls.
        reasoning: whether the answer has the reasoning.
        calls_first: whether calls are the whole answer or none of it, as where a grammar says what the answer is.
    """

    format: OutputFormat
    tool_parser: str
    shown: frozenset[int]
    tools: Tools
    parallel: bool = True
    reasoning: bool = True
    calls_first: bool = False

    def parser(self, start: Start, continues: bool) -> MessageParser:
        """Return a parser of one output. ``start``, ``continues``: as ``MessageParser`` takes them."""
        return MessageParser(
            self.format,
            start,
            self.tools,
            continues=continues,
            parallel=self.parallel,
            calls_first=self.calls_first,
        )

    @property
    def id_length(self) -> int:
        """How many characters the ids of calls have; 0: any number."""
        return self.format.tools.id_length if self.format.tools is not None else 0


class ChatFormats:
    """The options of conversations.

    Fields:
        template_kwargs: variables of the chat template that requests need not give.
        tool_parser: the name of the format in which the model calls tools; None: it is not known.
    """

    def __init__(self, config: GatewayConfig, tokenizer: Tokenizer) -> None:
        """Raises:
        ConfigError: the options contradict each other.
        """
        if config.enable_auto_tool_choice and config.tool_call_parser is None:
            raise ConfigError("--enable-auto-tool-choice requires --tool-call-parser")
        self.template_kwargs = _template_kwargs(config.default_chat_template_kwargs)
        self.tool_parser = config.tool_call_parser
        self._told = False
        self._auto = config.enable_auto_tool_choice
        self._with_tools = make_format(config.tool_call_parser, config.reasoning_parser)
        self._without_tools = make_format(None, config.reasoning_parser)
        self._special_tokens = tokenizer.special_tokens
        self._writes_tools = tokenizer.chat_template.writes_tools
        if config.tool_call_parser is not None and not self._writes_tools:
            log.warning("the chat template never writes tools, so the model does not see those of requests")

    def leaves_out(self, tools: Sequence[Tool] | None) -> bool:
        """Whether the chat template does not write these tools. A warning says so, once."""
        if not tools or self._writes_tools:
            return False
        if not self._told:
            self._told = True
            log.warning("a request has tools that the chat template never writes: the model does not see them")
        return True

    def check(self, body: ChatRequest) -> None:
        """Check the fields about tools.

        Raises:
            InvalidRequestError: they contradict each other, or need an option that is not set.
        """
        check_tool_list(body.tools)
        choice = body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise InvalidRequestError("tool_choice needs tools to choose from: tools is empty", "tool_choice")
            return
        if isinstance(choice, NamedToolChoice):
            name = choice.function.name
            if all(tool.function.name != name for tool in body.tools):
                raise InvalidRequestError(f"tool_choice: there is no function {name!r} in tools", "tool_choice")
        if choice == "none":
            return
        if choice in (None, "auto") and not self._auto:
            raise InvalidRequestError(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set', "tool_choice"
            )
        if self.tool_parser is None:
            raise InvalidRequestError("tool_choice requires --tool-call-parser to be set", "tool_choice")

    def parsing(self, body: ChatRequest) -> Parsing | None:
        """Return how the outputs of a request are parsed; None: they are content as they are."""
        calls = bool(body.tools) and body.tool_choice != "none"
        chosen = self._with_tools if calls else self._without_tools
        if chosen is None:
            return None
        delimiters = chosen.delimiters
        shown = frozenset(self._special_tokens[text] for text in delimiters if text in self._special_tokens)
        tools = Tools({tool.function.name: tool.function.parameters for tool in (body.tools or ()) if calls})
        return Parsing(
            chosen,
            self.tool_parser or "",
            shown,
            tools,
            parallel=body.parallel_tool_calls is not False,
            reasoning=body.include_reasoning is not False,
        )


def _template_kwargs(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        check_depth(given, "it")
        if reserved := RESERVED_NAMES & given.keys():
            raise ConfigError(f"--default-chat-template-kwargs may not set {min(reserved)}")
    except (msgspec.MsgspecError, APIError) as error:
        raise ConfigError(f"--default-chat-template-kwargs is no JSON object that can be used: {error}") from error
    return given
