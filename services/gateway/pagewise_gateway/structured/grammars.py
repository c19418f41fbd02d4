"""Makes grammars in llguidance's own form, and checks them without a tokenizer.

They travel as texts in the sampling parameters; executors compile them for the model's tokenizer.
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
from pagewise_gateway.structured.errors import GrammarError, TooManyGrammarsError
from pagewise_gateway.structured.schemas import MAX_LEVELS, MAX_TEXT, check_schema, without_additional_properties
from pagewise_gateway.structured.vocabulary import simplified
from pagewise_gateway.text.turns import Turns

T = TypeVar("T")

_MAX_REASON = 400
_MOST_SCHEMAS = 32
"""Whose grammars are remembered, before they are checked."""
_MOST_CHECKED = 256
_MOST_CHARACTERS = 4 * 1024 * 1024
"""Grammars that have been checked and are remembered, and characters of them together."""
MAX_GRAMMAR_CHARACTERS = 65_536
"""Of a grammar in Lark's form or in GBNF, without the schemas in it. Each state of a lexeme takes as long to make as it
is long: 5 ms for one of 30,000 characters."""
MAX_GRAMMAR_SYMBOLS = 4096
"""Symbols in the rules of a grammar. They may all be possible at once, and are then compared with each other."""
MAX_REGEX_CHARACTERS = 32_768
MAX_GBNF_RULES = 512
_MOST_GBNF_WORK = 8 * 1024 * 1024
"""Rules times characters: the converter looks at all rules once for each link of the longest chain."""
_EMBEDDED = re.compile(r"%json\s*")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_ANY_SYMBOLS = 500_000
_CHECKERS = 2
MAX_WAITING_GRAMMARS = 4096
"""Of one API key."""

Validate = Callable[[str, int], str]
"""Returns the flaw of a grammar, whose rules may have so many symbols; an empty text: it has none."""
Make = Callable[[Validate], str]
"""Makes a grammar, or raises ``GrammarError``. The other function does the part that takes long."""


def validate_here(grammar: str, max_symbols: int = _ANY_SYMBOLS) -> str:
    """Return the flaw of a grammar, found in this process: it may take any time and memory."""
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

    ``schema``: decoded, or as text. ``whitespace``: whether there may be any between tokens of JSON, or what
    ``whitespace_pattern`` matches, a regular expression. ``additional_properties``: whether objects that do not say
    otherwise may have properties that are not named; if not, this is noted in the schema.

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
    """The same of a schema as JSON. Merging large unions takes up to a second, and clients send a schema again."""
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
        GrammarError: one of them is too long, or no text that can be written in UTF-8.
    """
    for choice in choices:
        if len(choice) > MAX_TEXT:
            raise GrammarError(f"a text has {len(choice)} characters, the limit is {MAX_TEXT}")
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


def context_free_grammar(text: str, validate: Validate = validate_here) -> str:
    """Return a grammar that is written in Lark's form, or in GBNF, which is converted.

    Raises:
        GrammarError: it is in neither form, has too many rules, or contains a schema that is not honoured.
    """
    if text.lstrip().startswith("{"):
        raise GrammarError("it is in neither Lark's nor GBNF's form")
    # To tell the forms apart, the library searches with a regular expression that takes quadratic time for empty
    # lines, and holds the interpreter's lock meanwhile.
    text = "\n".join(line for line in text.split("\n") if line.strip())
    if not is_lark_syntax(text):
        _check_gbnf_size(text)
    try:
        lark = grammar_from("grammar", text)
    except Exception as error:  # a converter in Python, which raises whatever it stumbles over
        raise GrammarError(_reason(str(error))) from error
    lark, rest = _with_schemas(lark)
    if rest.count(":") > MAX_LEVELS:
        raise GrammarError(f"a grammar may have at most {MAX_LEVELS} rules")
    if len(rest) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarError(f"a grammar may have at most {MAX_GRAMMAR_CHARACTERS} characters beside schemas")
    check_terminals(rest)
    if flaw := validate(LLMatcher.grammar_from_lark(rest), MAX_GRAMMAR_SYMBOLS):
        raise GrammarError(_reason(flaw))
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
        _check_size(taken := taken + len(encoded))  # before anything goes through all of it
        decoded = simplified(decoded)
        check_schema(decoded)
        if decoded is False:
            raise GrammarError("nothing matches the schema false")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar={} if decoded is True else decoded, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


def check_grammar(grammar: str, validate: Validate = validate_here) -> None:
    """Check a grammar as far as that is possible without the model's tokenizer.

    Raises:
        GrammarError: it is too large, or makes no sense.
    """
    _check_size(len(grammar.encode()))
    if flaw := validate(grammar, _ANY_SYMBOLS):
        raise GrammarError(_reason(flaw))


class Grammars:
    """Makes grammars on threads, with a stack that is deep enough, and checks them in processes that can be ended.

    A key has one process at a time. So one that asks for expensive grammars delays no other, and of several keys each
    other one has to wait for one grammar of each.
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
        """Return the grammar that ``make`` returns, checked. ``key``: name of the API key for which this is done.

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
        work.add_done_callback(pass_on)  # also if the client leaves, which ends no work
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
            checker = self._checkers.pop()  # the last that was used: a second one starts when two are needed
        try:
            grammar = make(checker.validate)
            if (flaw := self._checked.get(grammar)) is None:
                flaw = self._flaw(grammar, checker)
            if flaw:
                raise GrammarError(flaw)
            return grammar
        finally:
            with self._lock:
                self._checkers.append(checker)

    def _flaw(self, grammar: str, checker: Checker) -> str:
        """Check a grammar, and remember its flaw."""
        try:
            check_grammar(grammar, checker.validate)
            flaw = ""
        except GrammarError as error:
            flaw = str(error)
        with self._lock:
            if grammar not in self._checked:
                self._checked[grammar] = flaw
                self._characters += len(grammar)
            while len(self._checked) > _MOST_CHECKED or self._characters > _MOST_CHARACTERS:
                self._characters -= len(self._checked.popitem(last=False)[0])
        return flaw


def _sized(schema: Any) -> tuple[Any, bytes]:
    """A schema, decoded if it is a text, and its JSON.

    Raises:
        GrammarError: it is not JSON, or not Unicode.
    """
    if isinstance(schema, str):
        schema = _decoded(schema)
    try:
        return schema, msgspec.json.encode(schema)
    except UnicodeEncodeError:
        raise GrammarError("a text in it is no valid Unicode text") from None


def _check_size(size: int) -> None:
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it takes {size} bytes as a grammar, the limit is {MAX_GRAMMAR_BYTES}")


def _check_gbnf_size(text: str) -> None:
    """Check that converting a grammar from GBNF, which is done in Python, takes no more than a second or two."""
    num_rules = text.count("::=")
    if num_rules > MAX_GBNF_RULES:
        raise GrammarError(f"a grammar in GBNF may have at most {MAX_GBNF_RULES} rules")
    if len(text) > min(MAX_GRAMMAR_CHARACTERS, most := _MOST_GBNF_WORK // max(num_rules, 1)):
        raise GrammarError(
            f"a grammar in GBNF with {num_rules} rules may have at most {min(MAX_GRAMMAR_CHARACTERS, most)} characters"
        )


def _with_schemas(lark: str) -> tuple[str, str]:
    """Check the JSON schemas in a grammar; returns it with them, simplified, and with any text in the place of each."""
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
        except ValueError:  # in a comment or a string; else the library names the error
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


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise GrammarError(why_not_json(text.encode(), error)) from error
    except (UnicodeError, RecursionError) as error:
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
