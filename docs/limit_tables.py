"""What the table of limits says, from the options and constants that limit."""

import importlib
from collections.abc import Iterator

from docs import option_tables

_QUEUE = "all together; with several API keys, up to twice as much and one request"

LIMITS = (
    ("requests of an API key at once", "", "key_concurrent"),
    ("requests of an API key per minute", "", "key_requests_per_minute"),
    ("tokens of an API key per minute, prompts and outputs", "", "key_tokens_per_minute"),
    ("lowest priority that an API key may ask for", "", "pagewise_gateway.http.credentials:LOWEST_PRIORITY"),
    ("API keys", "", "pagewise_gateway.http.credentials:MOST_KEYS"),
    ("HTTP connections", "each gateway", "max_connections"),
    ("seconds for the head of a request, or between two requests", "each connection", "keepalive_timeout"),
    ("seconds for the body of a request", "each request", "pagewise_gateway.http.parsing:BODY_SECONDS"),
    ("seconds between two parts of a body", "each request", "pagewise_gateway.http.parsing:PART_SECONDS"),
    ("seconds in which a client reads nothing", "each connection", "write_timeout"),
    (
        "bytes of a stream that are not read",
        "each request",
        "pagewise_gateway.scheduler_client.live_request:MOST_UNREAD",
    ),
    ("bytes of a body", "each request", "max_body_bytes"),
    ("bytes of bodies that are read or parsed", "each gateway; a quarter for each API key", "max_body_memory"),
    (
        "bytes of answers that are collected or written",
        "each gateway; a quarter for each API key, and for one answer",
        "max_answer_memory",
    ),
    ("arrays and objects of a body", "each request", "pagewise_gateway.http.parsing:MAX_CONTAINERS"),
    ("strings of a body", "each request", "pagewise_gateway.http.parsing:MAX_STRINGS"),
    ("values of a body", "each request", "pagewise_gateway.http.parsing:MAX_VALUES"),
    ("headers of a request", "each request", "pagewise_gateway.http.listening:MAX_HEADERS"),
    ("bytes of a first line, and of a header", "each request", "pagewise_gateway.http.listening:MAX_LINE"),
    (
        "seconds for which the rest of a refused body is read and thrown away",
        "each connection",
        "pagewise_gateway.http.parsing:LINGER_SECONDS",
    ),
    ("messages", "each request", "pagewise_gateway.http.schema:MAX_MESSAGES"),
    ("parts of a message", "each message", "pagewise_gateway.http.schema:MAX_CONTENT_PARTS"),
    ("tools", "each request", "pagewise_gateway.http.tools_schema:MAX_TOOLS"),
    ("tool calls", "each message", "pagewise_gateway.http.tools_schema:MAX_TOOL_CALLS"),
    ("bytes of `chat_template_kwargs`", "each request", "pagewise_gateway.http.schema:MAX_TEMPLATE_KWARGS_BYTES"),
    (
        "levels of `chat_template_kwargs`, and of a tool's schema",
        "each request",
        "pagewise_gateway.http.schema:MAX_TEMPLATE_KWARGS_DEPTH",
    ),
    ("characters of a text", "each token of the context", "pagewise_gateway.http.schema:CHARACTERS_PER_TOKEN"),
    ("stop strings", "each request", "pagewise_gateway.http.schema:MAX_STOP_STRINGS"),
    ("characters of a stop string or bad word", "each request", "pagewise_gateway.http.schema:MAX_STOP_CHARACTERS"),
    ("`stop_token_ids`", "each request", "pagewise_gateway.http.schema:MAX_STOP_TOKENS"),
    ("`bad_words`", "each request", "pagewise_gateway.http.schema:MAX_BAD_WORDS"),
    ("tokens of all `bad_words`", "each request", "pagewise_shared.sampling:MAX_BAD_TOKENS"),
    ("entries of `logit_bias`", "each request", "pagewise_shared.sampling:MAX_LOGIT_BIASES"),
    ("bytes of a grammar or JSON schema", "each request", "pagewise_shared.sampling:MAX_GRAMMAR_BYTES"),
    ("levels of a JSON schema", "each request", "pagewise_gateway.structured.walk:MAX_DEPTH"),
    (
        "levels of a JSON schema with what it refers to, or rules of a grammar",
        "each request",
        "pagewise_gateway.structured.schemas:MAX_LEVELS",
    ),
    ("rules of a grammar in GBNF", "each request", "pagewise_gateway.structured.grammars:MAX_GBNF_RULES"),
    (
        "characters of a grammar beside schemas",
        "each request",
        "pagewise_gateway.structured.grammars:MAX_GRAMMAR_CHARACTERS",
    ),
    ("symbols in the rules of a grammar", "each request", "pagewise_gateway.structured.grammars:MAX_GRAMMAR_SYMBOLS"),
    (
        "combinations of character classes that a text has to match together, times characters",
        "each string of a schema, each terminal",
        "pagewise_gateway.structured.conjunctions:MAX_WORK",
    ),
    ("seconds of a processor to compile a grammar", "each request", "pagewise_gateway.structured.checker:SECONDS"),
    (
        "bytes of memory of a process that compiles grammars",
        "each of two of a gateway",
        "pagewise_gateway.structured.checker:MEMORY_BYTES",
    ),
    (
        "grammars that wait to be compiled",
        "each API key of a gateway",
        "pagewise_gateway.structured.grammars:MAX_WAITING_GRAMMARS",
    ),
    ("characters of a `regex`", "each request", "pagewise_gateway.structured.grammars:MAX_REGEX_CHARACTERS"),
    (
        "optional properties of an object, alternatives of `anyOf`",
        "each schema",
        "pagewise_gateway.structured.schemas:MAX_OPTIONAL",
    ),
    ("characters of a text in `choice`, `enum` or `const`", "each", "pagewise_gateway.structured.schemas:MAX_TEXT"),
    ("texts of `choice`", "each request", "pagewise_gateway.http.schema:MAX_CHOICES"),
    ("structures of a `structural_tag`", "each request", "pagewise_gateway.http.schema:MAX_STRUCTURES"),
    ("characters of an error", "each response", "pagewise_gateway.http.errors:MAX_MESSAGE_CHARACTERS"),
    ("prompts", "each request", "pagewise_gateway.http.schema:MAX_PROMPTS"),
    ("outputs (`n`)", "each prompt", "max_n"),
    ("sequences", "each request", "pagewise_gateway.http.params:MAX_SEQUENCES"),
    (
        "beams, times the number of `stop_token_ids` plus 2",
        "each prompt",
        "pagewise_gateway.http.params:MAX_CANDIDATES",
    ),
    ("log-probabilities", "each token", "pagewise_shared.sampling:MAX_LOGPROBS"),
    ("characters of a client's `X-Request-Id`", "each request", "pagewise_gateway.http.context:MAX_CLIENT_REQUEST_ID"),
    ("entries of `/debug/requests/{id}`, unless for an operator", "", "pagewise_gateway.http.debug:MOST_OF_OWN"),
    (
        "hashes of earlier prompts, 8 bytes each ([why](docs/operations.md#repeated-text))",
        "each gateway",
        "pagewise_gateway.repeats:REMEMBERED_KEYS",
    ),
    (
        "tokens of prompts that wait to be searched for repeated text",
        "each gateway",
        "pagewise_gateway.repeats:MOST_WAITING_TOKENS",
    ),
    ("tokens of a sequence", "", "max_model_len"),
    ("waiting sequences", _QUEUE, "max_waiting"),
    ("prompt tokens that wait", _QUEUE, "max_waiting_tokens"),
    ("running sequences", "each executor", "max_num_seqs"),
    (
        "rows and KV blocks of an executor",
        "each API key, while several have requests there ([below](#shares-of-an-executor))",
        "text: an equal share",
    ),
    (
        "steps that a request waits for room before sequences of keys above their share are preempted for it",
        "each request that is next and whose key has less than its share",
        "pagewise_scheduler.core.features.fair_shares:PATIENCE_STEPS",
    ),
    (
        "output tokens of a sequence before it is preempted again for another key",
        "each sequence",
        "pagewise_scheduler.core.features.fair_shares:LEAST_PROGRESS",
    ),
    ("tokens of a step, at most", "each executor", "pagewise_shared.protocol.limits:MAX_BATCHED_TOKENS"),
    ("gateways", "", "pagewise_scheduler.server.gateways:MAX_GATEWAYS"),
    ("executors", "", "pagewise_scheduler.server.executor_checks:MAX_EXECUTORS"),
    ("bytes of a frame to the scheduler", "", "pagewise_shared.protocol.limits:MAX_FRAME_TO_SCHEDULER"),
    ("bytes of the result of a step", "each executor", "pagewise_shared.protocol.limits:MAX_STEP_RESULT_BYTES"),
    ("bytes of the objects that a frame becomes", "", "pagewise_shared.protocol.limits:MAX_DECODED_BYTES"),
    ("bytes of a frame from the scheduler", "", "pagewise_shared.protocol.limits:MAX_FRAME_FROM_SCHEDULER"),
    ("bytes of a request on its way to the scheduler", "", "pagewise_shared.protocol.limits:MAX_SUBMIT_BYTES"),
    ("seconds without a heartbeat", "each executor", "executor_timeout"),
    ("seconds without a heartbeat", "each gateway", "gateway_timeout"),
    ("seconds without an executor", "each request", "placement_timeout"),
    ("seconds of a step", "each executor", "step_timeout"),
)
"""What is limited, for whom, and where the limit stands: an option of a service, a constant (``module:NAME``), or
``text:`` and the limit in words."""


def described() -> Iterator[tuple[str, str, str, str]]:
    """What is limited, with the defaults of the options and the constants that limit it."""
    options = {option.name: option for option, _ in option_tables.options()}
    for what, whose, source in LIMITS:
        module, _, constant = source.partition(":")
        if module == "text":
            value, set_by = constant.strip(), ""
        elif constant:
            number = getattr(importlib.import_module(module), constant)
            value, set_by = f"{number:,g}" if isinstance(number, float) else f"{number:,}", ""
        else:
            default = options[source].default
            value = f"{default:,g}" if isinstance(default, float) else f"{default:,}" if default is not None else ""
            value, set_by = value or option_tables.default_of(options[source]), f"`{options[source].flag}`"
        yield what, whose, value, set_by
