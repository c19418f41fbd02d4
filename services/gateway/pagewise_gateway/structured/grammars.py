"""Makes grammars in llguidance's own form, and checks them without a tokenizer.

They travel as texts in the sampling parameters; executors compile them for the model's tokenizer.
"""

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from llguidance import LLMatcher, LLParserLimits, StructTag, grammar_from
from pagewise_shared.sampling import MAX_GRAMMAR_BYTES

from pagewise_gateway.structured.errors import GrammarError
from pagewise_gateway.structured.schemas import MAX_LEVELS, check_schema, without_additional_properties
from pagewise_gateway.text.turns import Turns

T = TypeVar("T")

_STACK_BYTES = 64 * 1024 * 1024
"""The library compiles rules recursively, about 8 KiB for each level."""
_MAX_REASON = 400
_MOST_CHECKED = 256
_MOST_CHARACTERS = 4 * 1024 * 1024
"""Grammars that are known to be good, and characters of them together."""
_MOST_GBNF_RULES = 512
"""The converter looks at all of them once for each link of the longest chain."""
_EMBEDDED = re.compile(r"%json\s*")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_LIMITS = LLParserLimits(verbose_errors=False)


def json_schema_grammar(
    schema: Any,
    *,
    whitespace: bool = True,
    whitespace_pattern: str | None = None,
    additional_properties: bool = True,
) -> str:
    """Return the grammar of the JSON texts that a schema allows.

    ``schema``: decoded, or as text. ``whitespace``: whether there may be any between tokens of JSON, or what
    ``whitespace_pattern`` matches, a regular expression. ``additional_properties``: whether objects that do not say
    otherwise may have properties that are not named; if not, this is noted in the schema.

    Raises:
        GrammarError: it is no schema, or has a keyword that is not honoured.
    """
    if isinstance(schema, str):
        schema = _decoded(schema)
    check_schema(schema)
    if schema is False:
        raise GrammarError("nothing matches the schema false")
    if schema is True:
        schema = {}
    if not additional_properties:
        without_additional_properties(schema)
    options: dict[str, Any] = {} if whitespace else {"whitespace_flexible": False}
    if whitespace_pattern is not None:
        options["whitespace_pattern"] = whitespace_pattern
    text = msgspec.json.encode(schema).decode()
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=options or None)  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarError(_reason(str(error))) from error


def json_object_grammar(*, whitespace: bool = True, whitespace_pattern: str | None = None) -> str:
    """Return the grammar of any JSON object."""
    return json_schema_grammar({"type": "object"}, whitespace=whitespace, whitespace_pattern=whitespace_pattern)


def regex_grammar(regex: str) -> str:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of these texts.

    Raises:
        GrammarError: one of them is no text that can be written in UTF-8.
    """
    for choice in choices:
        if not _is_text(choice):
            raise GrammarError(f"{choice[:100]!r} is no valid Unicode text")
    texts = list(dict.fromkeys(choice for choice in choices if choice))
    # One lexeme: there may be any number of them. A lexeme must not be empty.
    lines = ["start: CHOICE" if texts else 'start: ""']
    if len(texts) < len(set(choices)) and texts:
        lines = ['start: CHOICE | ""']
    if texts:
        lines.append("CHOICE: " + " | ".join(map(json.dumps, texts)))
    return LLMatcher.grammar_from_lark("\n".join(lines))


def context_free_grammar(text: str) -> str:
    """Return a grammar that is written in Lark's form, or in GBNF, which is converted.

    Raises:
        GrammarError: it is in neither form, has too many rules, or contains a schema that is not honoured.
    """
    if text.lstrip().startswith("{"):
        raise GrammarError("it is in neither Lark's nor GBNF's form")
    if text.count("::=") > _MOST_GBNF_RULES:
        raise GrammarError(f"a grammar in GBNF may have at most {_MOST_GBNF_RULES} rules")
    # To tell the forms apart, the converter searches with a regular expression that takes quadratic time for empty
    # lines, and holds the interpreter's lock meanwhile.
    text = "\n".join(line for line in text.split("\n") if line.strip())
    try:
        lark = grammar_from("grammar", text)
    except Exception as error:  # a converter in Python, which raises whatever it stumbles over
        raise GrammarError(_reason(str(error))) from error
    rest = _without_schemas(lark)
    if rest.count(":") > MAX_LEVELS:
        raise GrammarError(f"a grammar may have at most {MAX_LEVELS} rules")
    return lark


def structural_tag_grammar(structures: Sequence[tuple[str, Any, str]], triggers: Sequence[str]) -> str:
    """Return the grammar of texts in which each of ``triggers`` begins one of the structures.

    ``structures``: what begins each, the schema of the JSON text that follows, and what ends it.

    Raises:
        GrammarError: no trigger begins a structure, or a schema is not honoured.
    """
    tags = []
    for begin, schema, end in structures:
        trigger = next((one for one in triggers if begin.startswith(one)), None)
        if not trigger:
            raise GrammarError(f"no trigger begins the structure {begin[:100]!r}")
        if not (_is_text(begin) and _is_text(end)):
            raise GrammarError(f"{begin[:100]!r} or {end[:100]!r} is no valid Unicode text")
        decoded = _decoded(schema) if isinstance(schema, str) else schema
        check_schema(decoded)
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=json.dumps(decoded), end=end))
    return StructTag.to_grammar(tags, assume_special=False)


def check_grammar(grammar: str) -> None:
    """Check a grammar as far as that is possible without a tokenizer. This takes up to 0.2 s, without the GIL.

    Raises:
        GrammarError: it is too large, or makes no sense.
    """
    if (size := len(grammar.encode())) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it takes {size} bytes as a grammar, the limit is {MAX_GRAMMAR_BYTES}")
    if flaw := LLMatcher.validate_grammar(grammar, limits=_LIMITS):
        raise GrammarError(_reason(flaw))


class Grammars:
    """Makes and checks grammars off the event loop, on a thread with a stack that is deep enough."""

    def __init__(self) -> None:
        self._turns = Turns(1)
        self._thread: ThreadPoolExecutor | None = None
        self._checked: OrderedDict[str, None] = OrderedDict()
        self._characters = 0

    async def checked(self, make: Callable[[], str], key: str) -> str:
        """Return the grammar that ``make`` returns, checked. ``key``: name of the API key for which this is done.

        Raises:
            GrammarError: it cannot be used.
        """
        await self._turns.take(key)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._started(), self._make, make)
        except BaseException:
            self._turns.pass_on()
            raise
        work.add_done_callback(lambda _: self._turns.pass_on())
        return await asyncio.shield(work)

    def close(self) -> None:
        """Stop the thread. It is started again if it is needed."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def _started(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
            default = threading.stack_size(_STACK_BYTES)
            try:
                self._thread.submit(int)
            finally:
                threading.stack_size(default)
        return self._thread

    def _make(self, make: Callable[[], str]) -> str:
        grammar = make()
        if grammar in self._checked:
            self._checked.move_to_end(grammar)
            return grammar
        check_grammar(grammar)
        self._checked[grammar] = None
        self._characters += len(grammar)
        while len(self._checked) > _MOST_CHECKED or self._characters > _MOST_CHARACTERS:
            self._characters -= len(self._checked.popitem(last=False)[0])
        return grammar


def _without_schemas(lark: str) -> str:
    """Check the JSON schemas in a grammar, and return the rest of it."""
    rest, at = [], 0
    decoder = json.JSONDecoder()
    levels = 0
    while found := _EMBEDDED.search(lark, at):
        rest.append(lark[at : found.start()])
        try:
            schema, at = decoder.raw_decode(lark, found.end())
        except ValueError:  # in a comment or a string; else the library says what is wrong
            at = found.end()
            continue
        except RecursionError:
            raise GrammarError("a schema in it is nested too deeply") from None
        levels += check_schema(schema)
        if levels > MAX_LEVELS:
            raise GrammarError(f"the schemas in it have more than {MAX_LEVELS} levels together")
    return "".join([*rest, lark[at:]])


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise GrammarError(f"it is not valid JSON: {_reason(str(error))}") from error


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason(text: str) -> str:
    """Why the library refuses a grammar, on one line."""
    if keywords := _UNIMPLEMENTED.match(text):
        return f"keywords that are not supported: {keywords[1].replace(chr(34), '')}"
    if text.startswith("oneOf constraints"):
        return "oneOf is only supported where its schemas exclude each other for certain; anyOf always is"
    return " ".join(text.split())[:_MAX_REASON]
