"""Makes grammars in llguidance's own form, and checks them without a tokenizer.

They are texts in the sampling parameters; executors compile them for the model's tokenizer.
"""

import asyncio
import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from llguidance import LLMatcher, LLParserLimits, StructTag, grammar_from
from llguidance.gbnf_to_lark import is_lark_syntax
from pagewise_shared.json_errors import why_not_json
from pagewise_shared.sampling import MAX_GRAMMAR_BYTES

from pagewise_gateway.structured.checker import STACK_BYTES, Checker
from pagewise_gateway.structured.conjunctions import check_terminals
from pagewise_gateway.structured.schemas import MAX_LEVELS, MAX_TEXT, check_schema, without_additional_properties
from pagewise_gateway.structured.vocabulary import simplified
from pagewise_gateway.structured.walk import GrammarError, TooManyGrammarsError
from pagewise_gateway.text.tokenizer import Turns

T = TypeVar("T")

_MAX_REASON = 400
_MOST_SCHEMAS = 32
"""Schemas whose grammars are cached before they are checked."""
_MOST_CHECKED = 256
_MOST_CHARACTERS = 4 * 1024 * 1024
"""Checked grammars that are cached, and their characters together."""
MAX_GRAMMAR_CHARACTERS = 65_536
"""Of a grammar in Lark's form or in GBNF, without the schemas in it. The time to make each state of a lexeme grows with
its length: 5 ms for 30,000 characters."""
MAX_GRAMMAR_SYMBOLS = 4096
"""Symbols in the rules of a grammar. All of them may be possible at once, and are then compared with each other."""
MAX_REGEX_CHARACTERS = 32_768
MAX_GBNF_RULES = 512
_MOST_GBNF_WORK = 8 * 1024 * 1024
"""Rules times characters: the converter reads all rules once for each link of the longest chain."""
_EMBEDDED = re.compile(r"%json\s*")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_ANY_SYMBOLS = 500_000
_CHECKERS = 2
MAX_WAITING_GRAMMARS = 4096
"""Of one API key."""

Validate = Callable[[str, int], str]
"""Returns the error in a grammar whose rules may have so many symbols; an empty text: it is valid."""
Make = Callable[[Validate], str]
"""Makes a grammar, or raises ``GrammarError``. The validation, which may take long, is passed to it."""


def validate_here(grammar: str, max_symbols: int = _ANY_SYMBOLS) -> str:
    """Validate a grammar in this process, which may take any time and memory. Returns as ``Validate``."""
    return LLMatcher.validate_grammar(
        grammar, limits=LLParserLimits(verbose_errors=False, max_grammar_size=max_symbols)
    )


def json_schema_grammar(
    schema: Any,
    *,
    whitespace: bool = True,
    whitespace_pattern: str | None = None,
    additional_properties: bool = True,
) -> str:
    """Return the grammar of the JSON texts that a schema allows.

    ``schema``: decoded, or as text. ``whitespace``: whether any is allowed between tokens of JSON.
    ``whitespace_pattern``: a regular expression of the allowed whitespace. ``additional_properties``: the default of
    additionalProperties.

    Raises:
        GrammarError: it is no schema, or has a keyword that is not honoured.
    """
    _, encoded = _sized(schema)
    _check_size(len(encoded))
    return _schema_grammar(encoded, whitespace, whitespace_pattern, additional_properties)


@lru_cache(maxsize=_MOST_SCHEMAS)
def _schema_grammar(
    encoded: bytes, whitespace: bool, whitespace_pattern: str | None, additional_properties: bool
) -> str:
    # Cached because merging large unions takes up to a second, and clients send a schema with every request.
    schema = simplified(msgspec.json.decode(encoded))
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
    """Return the grammar of the texts that a regular expression matches as a whole.

    Raises:
        GrammarError: it is too long.
    """
    if len(regex) > MAX_REGEX_CHARACTERS:
        raise GrammarError(f"a regular expression may have at most {MAX_REGEX_CHARACTERS} characters")
    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of these texts.

    Raises:
        GrammarError: one of them is too long, or cannot be encoded in UTF-8.
    """
    for choice in choices:
        if len(choice) > MAX_TEXT:
            raise GrammarError(f"a text has {len(choice)} characters, the limit is {MAX_TEXT}")
        if not _is_text(choice):
            raise GrammarError(f"{choice[:100]!r} is no valid Unicode text")
    texts = list(dict.fromkeys(choice for choice in choices if choice))
    if not texts:
        return LLMatcher.grammar_from_lark('start: ""')
    # One lexeme has all texts, because the number of lexemes is limited. A lexeme must not be empty.
    start = 'start: CHOICE | ""' if "" in choices else "start: CHOICE"
    return LLMatcher.grammar_from_lark(f"{start}\nCHOICE: {' | '.join(map(json.dumps, texts))}")


def context_free_grammar(text: str, validate: Validate = validate_here) -> str:
    """Return the grammar of a text in Lark's form or in GBNF, which is converted.

    Raises:
        GrammarError: it is in neither form, has too many rules, or contains a schema that is not honoured.
    """
    if text.lstrip().startswith("{"):
        raise GrammarError("it is in neither Lark's nor GBNF's form")
    # The library recognizes the form by a regular expression that takes quadratic time for empty lines, and holds the
    # GIL meanwhile.
    text = "\n".join(line for line in text.split("\n") if line.strip())
    if not is_lark_syntax(text):
        _check_gbnf_size(text)
    try:
        lark = grammar_from("grammar", text)
    except Exception as error:  # the converter is written in Python, and raises any kind of error
        raise GrammarError(_reason(str(error))) from error
    lark, rest = _with_schemas(lark)
    if rest.count(":") > MAX_LEVELS:
        raise GrammarError(f"a grammar may have at most {MAX_LEVELS} rules")
    if len(rest) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarError(f"a grammar may have at most {MAX_GRAMMAR_CHARACTERS} characters beside schemas")
    check_terminals(rest)
    if invalid := validate(LLMatcher.grammar_from_lark(rest), MAX_GRAMMAR_SYMBOLS):
        raise GrammarError(_reason(invalid))
    return lark


def structural_tag_grammar(structures: Sequence[tuple[str, Any, str]], triggers: Sequence[str]) -> str:
    """Return the grammar of texts in which each of ``triggers`` begins one of the structures.

    ``structures``: the text that begins each, the schema of the JSON text in it, and the text that ends it.

    Raises:
        GrammarError: no trigger begins a structure, or a schema is not honoured.
    """
    tags, taken = [], 0
    for begin, schema, end in structures:
        trigger = next((one for one in triggers if begin.startswith(one)), None)
        if not trigger:
            raise GrammarError(f"no trigger begins the structure {begin[:100]!r}")
        if not (_is_text(begin) and _is_text(end)):
            raise GrammarError(f"{begin[:100]!r} or {end[:100]!r} is no valid Unicode text")
        decoded, encoded = _sized(schema)
        _check_size(taken := taken + len(encoded))  # first, because the other checks read all of it
        decoded = simplified(decoded)
        check_schema(decoded)
        if decoded is False:
            raise GrammarError("nothing matches the schema false")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar={} if decoded is True else decoded, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


def check_grammar(grammar: str, validate: Validate = validate_here) -> None:
    """Check a grammar as far as that is possible without the model's tokenizer.

    Raises:
        GrammarError: it is too large, or invalid.
    """
    _check_size(len(grammar.encode()))
    if invalid := validate(grammar, _ANY_SYMBOLS):
        raise GrammarError(_reason(invalid))


class Grammars:
    """Makes grammars on threads with a deep stack, and checks them in processes that can be ended.

    An API key has one process at a time. So a key that sends expensive grammars delays no other key, and several such
    keys delay another key by one grammar each.
    """

    def __init__(self) -> None:
        self._turns = Turns(_CHECKERS)
        self._own: dict[str, Turns] = {}
        self._waiting: Counter[str] = Counter()
        self._threads: ThreadPoolExecutor | None = None
        self._checkers: list[Checker] = []
        self._lock = threading.Lock()
        self._checked: OrderedDict[str, str] = OrderedDict()
        self._characters = 0

    async def checked(self, make: Make, key: str) -> str:
        """Return the grammar that ``make`` returns, checked. ``key``: name of the API key of the request.

        Raises:
            GrammarError: it cannot be used.
            TooManyGrammarsError: too many of this key wait.
        """
        if self._waiting[key] >= MAX_WAITING_GRAMMARS:
            raise TooManyGrammarsError(f"{MAX_WAITING_GRAMMARS} grammars of this API key wait to be compiled")
        own = self._own.setdefault(key, Turns(1))
        self._waiting[key] += 1
        try:
            await own.take(key)
            try:
                await self._turns.take(key)
            except BaseException:
                own.pass_on()
                raise
        finally:
            self._waiting -= Counter((key,))

        def pass_on(_: object = None) -> None:
            self._turns.pass_on()
            own.pass_on()

        try:
            work = asyncio.get_running_loop().run_in_executor(self._started(), self._make, make)
        except BaseException:
            pass_on()
            raise
        # The turn lasts as long as the work, which continues when the client disconnects and this coroutine is
        # cancelled.
        work.add_done_callback(pass_on)
        return await asyncio.shield(work)

    def close(self) -> None:
        """Stop the threads and processes. They are started again if they are needed."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        while self._checkers:
            self._checkers.pop().close()

    def _started(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_CHECKERS, thread_name_prefix="grammars")
            self._checkers = [Checker() for _ in range(_CHECKERS)]
            default = threading.stack_size(STACK_BYTES)
            try:
                started = threading.Barrier(_CHECKERS + 1)
                for _ in range(_CHECKERS):
                    self._threads.submit(started.wait)
                started.wait()
            finally:
                threading.stack_size(default)
        return self._threads

    def _make(self, make: Make) -> str:
        with self._lock:
            checker = self._checkers.pop()  # the last used one: the other one starts when two are needed
        try:
            grammar = make(checker.validate)
            if (invalid := self._checked.get(grammar)) is None:
                invalid = self._check(grammar, checker)
            if invalid:
                raise GrammarError(invalid)
            return grammar
        finally:
            with self._lock:
                self._checkers.append(checker)

    def _check(self, grammar: str, checker: Checker) -> str:
        """Check a grammar, and cache the result: its error, or an empty text."""
        try:
            check_grammar(grammar, checker.validate)
            invalid = ""
        except GrammarError as error:
            invalid = str(error)
        with self._lock:
            if grammar not in self._checked:
                self._checked[grammar] = invalid
                self._characters += len(grammar)
            while len(self._checked) > _MOST_CHECKED or self._characters > _MOST_CHARACTERS:
                self._characters -= len(self._checked.popitem(last=False)[0])
        return invalid


def _sized(schema: Any) -> tuple[Any, bytes]:
    """Return a schema, decoded if it is a text, and its JSON."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.MsgspecError as error:
            raise GrammarError(why_not_json(schema.encode(), error)) from error
        except (UnicodeError, RecursionError) as error:
            raise GrammarError(f"it is not valid JSON: {_reason(str(error))}") from error
    try:
        return schema, msgspec.json.encode(schema)
    except UnicodeEncodeError:
        raise GrammarError("a text in it is no valid Unicode text") from None


def _check_size(size: int) -> None:
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it takes {size} bytes as a grammar, the limit is {MAX_GRAMMAR_BYTES}")


def _check_gbnf_size(text: str) -> None:
    # Converting a grammar from GBNF, which is done in Python, is to take no more than a second or two.
    num_rules = text.count("::=")
    if num_rules > MAX_GBNF_RULES:
        raise GrammarError(f"a grammar in GBNF may have at most {MAX_GBNF_RULES} rules")
    if len(text) > min(MAX_GRAMMAR_CHARACTERS, most := _MOST_GBNF_WORK // max(num_rules, 1)):
        raise GrammarError(
            f"a grammar in GBNF with {num_rules} rules may have at most {min(MAX_GRAMMAR_CHARACTERS, most)} characters"
        )


def _with_schemas(lark: str) -> tuple[str, str]:
    """Check the JSON schemas in a grammar. Returns it with simplified schemas, and with ``/./`` in place of each."""
    whole: list[str] = []
    rest: list[str] = []
    at = 0
    decoder = json.JSONDecoder()
    levels = 0
    while found := _EMBEDDED.search(lark, at):
        rest += lark[at : found.start()], " /./ "
        whole.append(lark[at : found.end()])
        try:
            schema, at = decoder.raw_decode(lark, found.end())
        except ValueError:  # it is in a comment or a string; otherwise, the library refuses it
            rest[-1], at = found[0], found.end()
            continue
        except RecursionError:
            raise GrammarError("a schema in it is nested too deeply") from None
        schema = simplified(schema)
        levels += check_schema(schema)
        whole.append(json.dumps(schema))
        if levels > MAX_LEVELS:
            raise GrammarError(f"the schemas in it have more than {MAX_LEVELS} levels together")
    return "".join([*whole, lark[at:]]), "".join([*rest, lark[at:]])


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reason(text: str) -> str:
    if keywords := _UNIMPLEMENTED.match(text):
        return f"keywords that are not supported: {keywords[1].replace(chr(34), '')}"
    if text.startswith("oneOf constraints"):
        return "oneOf is only supported where its schemas exclude each other for certain; anyOf always is"
    return " ".join(text.split())[:_MAX_REASON]
