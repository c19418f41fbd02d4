"""Grammars of tool calls in the model's own format, in Lark's form as llguidance reads it.

A delimiter that is a special token of the vocabulary is written as that token, any other one as text. Free text may
contain no special token.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pagewise_shared.sampling import MAX_GRAMMAR_BYTES

from pagewise_gateway.structured.call_parameters import (
    ANY_OBJECT,
    PYTHON_NAME,
    Inliner,
    UnsupportedSchemaError,
    listed_parameters,
    python_parameters,
    self_contained,
    string_choices,
)
from pagewise_gateway.structured.call_shapes import MISTRAL_LIST, SHAPES, Pair, Shape
from pagewise_gateway.structured.gemma_values import GemmaValues
from pagewise_gateway.text.output_parsing.deltas import schema_types
from pagewise_gateway.text.output_parsing.formats import OutputFormat, Start

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_SPACE = r"[\s\x1c-\x1f]*"  # as Python sees it
_PYTHON_BLOCK = rf"/{_SPACE}```(tool_code|python)?{_SPACE}\[?{_SPACE}[A-Za-z_][A-Za-z0-9_.\-]*\((?s:.*)/"
"""A block of code that begins with a call. The parser would read it as calls, so no answer may begin with it."""


class Function(NamedTuple):
    """A function that may be called. ``parameters``: the schema of its arguments; None: it has none.

    ``strict``: whether calls have to follow the schema where the model may choose to call the function. Where it has to
    make a call, calls follow the schemas of all functions.
    """

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool = False


def tool_call_grammar(
    parser: str,
    output: OutputFormat,
    functions: Sequence[Function],
    special_tokens: Mapping[str, int],
    *,
    start: Start = "main",
    required: bool = True,
    parallel: bool = True,
    answer: str | None = None,
) -> str:
    """Return the grammar of outputs that call functions.

    Args:
        parser: the name of the parser of tool calls, and ``output`` the format that it reads.
        functions: of which calls may be made. special_tokens: their ids by their texts.
        start: where the output begins.
        required: whether there has to be a call; otherwise, there may be text and calls.
        parallel: whether there may be several calls.
        answer: the grammar of an output without calls; None: any text, also before and after calls.

    Raises:
        UnsupportedSchemaError: a schema cannot be followed.
    """
    grammar = _Grammar(special_tokens)
    is_free = not required and answer is None
    shape = _shape(parser, special_tokens, is_free)
    calls = " | ".join(grammar.call(shape, one, required) for one in _callable_functions(shape, functions, required))
    if output.harmony:
        grammar.harmony(calls, required, "@answer" if answer is not None else None)
    else:
        thinking, one = grammar.reasoning(output, start), grammar.rule("call", calls)
        if is_free:
            found = grammar.free(shape, one, output, parallel)
        else:
            more = f" ({grammar.text(shape.between)} {one})*" if parallel else ""
            found = f"{grammar.text(shape.opening)} {one}{more} {grammar.text(shape.closing)}"
            found = found if required else f"({found} | @answer)"
        grammar.rule("start", f"{thinking} {found}")
    return str(grammar) if answer is None else _with_answer(grammar, answer)


def _shape(parser: str, special_tokens: Mapping[str, int], is_free: bool) -> Shape:
    # In free text, the grammar of calls begins after the trigger, unless that is a special token.
    shape = MISTRAL_LIST if parser == "mistral" and "[ARGS]" not in special_tokens else SHAPES[parser]
    special = any(text and text in shape.trigger for text in special_tokens)
    if is_free and not special and shape.opening and isinstance(shape.arguments, Pair):
        # The parser reads such calls without the tags around them, too, so the tags are a part of the text.
        shape = replace(shape, opening="", closing="", trigger=shape.before.partition("NAME")[0].removesuffix('"'))
    return shape.without_trigger() if is_free and shape.trigger not in special_tokens else shape


def _callable_functions(shape: Shape, functions: Sequence[Function], required: bool) -> Sequence[Function]:
    # Functions that cannot be called in Python are left out, unless their schemas have to be followed: then they are an
    # error.
    if shape.arguments != "python" or required:
        return functions
    return [each for each in functions if each.strict or PYTHON_NAME.fullmatch(each.name)] or functions


def after_reasoning(grammar: str, output: OutputFormat, special_tokens: Mapping[str, int], start: Start) -> str:
    """Return the grammar of outputs that match ``grammar`` after the model's reasoning, as llguidance's JSON."""
    before = _Grammar(special_tokens)
    if output.harmony:
        before.harmony(None, False, "@answer")
    else:
        before.rule("start", f"{before.reasoning(output, start)} @answer")
    return _with_answer(before, grammar)


class _Grammar:
    """A grammar under construction. Methods return expressions, and add the rules that these refer to."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        self._rules: dict[str, str] = {}
        self._num_characters = 0  # of schemas
        self._texts: dict[str, str] = {}  # the rules of text up to a text
        texts = sorted((text for text in special_tokens if text), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def __str__(self) -> str:
        return "\n".join(f"{name}: {expression}" for name, expression in self._rules.items()) + "\n"

    def rule(self, name: str, expression: str, options: str = "") -> str:
        if name != "start":
            name = f"{name}{len(self._rules)}"
        self._rules[name + options] = expression.strip() or '""'
        return name

    def declare(self, name: str) -> str:
        """Return the name of a new rule, which ``define`` defines, so that it may refer to itself."""
        return self.rule(name, "")

    def define(self, name: str, expression: str) -> None:
        self._rules[name] = expression

    def text(self, text: str) -> str:
        parts, at = [], 0
        for found in self._tokens.finditer(text):
            parts += [_quoted(text[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self._special[found[0]]}]>")
            at = found.end()
        parts += [_quoted(text[at:])] if at < len(text) else []
        return " ".join(parts)

    def until(self, delimiter: str) -> str:
        """Match any text up to the first delimiter, with it."""
        if (token := self._tokens.search(delimiter)) is None:
            return self._up_to(delimiter)
        before, rest = delimiter[: token.start()], self.text(delimiter[token.start() :])
        # Text has no special tokens, so it may contain the part of the delimiter before a special token.
        return f"{self._up_to(before)}+ {rest}" if before else f"{self.rule('ANY', '/(?s:.+)/')}? {rest}"

    def _up_to(self, text: str) -> str:
        if text not in self._texts:  # all parameters end with the same tag
            self._texts[text] = self.rule("until", "/(?s:.*)/", f"[suffix={_quoted(text)}]")
        return self._texts[text]

    def reasoning(self, output: OutputFormat, start: Start) -> str:
        reasoning = output.reasoning
        if reasoning is None or start == "ended":
            return ""
        space = self.rule("SPACE", r"/\s{1,4}/")
        opening = self.text(reasoning.opening)
        thought = f"{self.until(reasoning.closing)} {space}?"
        if start == "reasoning":
            return thought
        return f"({opening})? {thought}" if start == "implied" else f"({space}? {opening} {thought})?"

    def free(self, shape: Shape, call: str, output: OutputFormat, parallel: bool) -> str:
        """Match text and calls; where the trigger is no special token, ``call`` is without it."""
        opening = output.tools.opening
        written = [opening] if opening and opening not in self._special else []
        more = f"({self.text(shape.between)} {call})*" if parallel and (shape.closing or not shape.trigger) else ""
        group = f"{self.text(shape.opening)} {call} {more} {self.text(shape.closing)}"
        if not shape.trigger:
            other = rf"/\s*[^\s\x00-\x1f{re.escape(shape.begins)}](?s:.*)/{_without(written)}"
            other = self.rule("OTHER", f"{other} & ~{_PYTHON_BLOCK}" if shape.arguments == "python" else other)
            return f'({group} | {other} | "")'
        any_text = self.rule("ANY", f"/(?s:.+)/{_without(written if shape.trigger in self._special else [])}")
        before = f"{any_text}?" if shape.trigger in self._special else self.until(shape.trigger)
        if (token := self._tokens.search(shape.trigger)) is not None and token.start():
            any_text = f"({self._up_to(shape.trigger[: token.start()])}* {any_text}?)"
        if parallel:
            return f"({before} {group})* {any_text}?"
        behind = self.rule("BEHIND", f"/(?s:.+)/{_without(written)}")
        return f"({before} {group} {behind}? | {any_text}?)"

    def harmony(self, calls: str | None, required: bool, answer: str | None = None) -> None:
        # gpt-oss writes messages on other channels, and then calls or an answer.
        ends = self.until("<|end|>")
        message = f'{self.text("<|channel|>")} ("analysis" | "commentary") {self.text("<|message|>")} {ends}'
        begun = self.rule("message", f"{message} {self.text('<|start|>assistant')}")
        answer = answer or f"{self.rule('ANY', '/(?s:.+)/')}?"
        final = f"{self.text('<|channel|>final<|message|>')} {answer}"
        last = calls if required else f"{calls} | {final}" if calls is not None else final
        self.rule("start", f"{begun}* ({last})")

    # ---- calls -------------------------------------------------------------------------------------

    def call(self, shape: Shape, function: Function, required: bool) -> str:
        schema: Mapping[str, Any] = function.parameters if function.parameters is not None else _NO_PARAMETERS
        follows = required or function.strict
        if not follows:
            schema = ANY_OBJECT
        parts = shape.before.replace("NAME", function.name).split("NUMBER")
        before = (
            f" {self.rule('NUMBER', '/[0-9]{1,4}/')} ".join(map(self.text, parts)) if parts[1:] else self.text(*parts)
        )
        if shape.arguments == "json":
            arguments = self.json(schema)
        elif shape.arguments == "python":
            if PYTHON_NAME.fullmatch(function.name) is None:
                raise UnsupportedSchemaError(f"{function.name!r} cannot be called by this model: no name in Python")
            arguments = self._keywords(function, schema) if follows else self._any_keywords()
        elif shape.arguments == "gemma":
            values = GemmaValues(self, function.name, schema, function.strict)
            arguments = values.parameters() if follows else values.any_members()
        elif follows:
            arguments = self._pairs(shape.arguments, function, schema)
        else:
            arguments = self._any_pairs(shape.arguments)
        return f"{before} {arguments} {self.text(shape.after)}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """Match JSON that follows a schema."""
        text = json.dumps(schema)
        self._num_characters += len(text)  # parameters repeat the definitions that they share
        if self._num_characters > MAX_GRAMMAR_BYTES:
            raise UnsupportedSchemaError(
                f"the schemas of the functions take more than {MAX_GRAMMAR_BYTES} bytes as a grammar, the limit"
            )
        return f"%json {text}"

    def _keywords(self, function: Function, schema: Mapping[str, Any]) -> str:
        """Match the arguments of a call in Python, whose values are written as JSON."""
        items = [
            (f"{_quoted(name + '=')} {self.json(self_contained(value, schema))}", required)
            for name, value, required in python_parameters(function.name, schema, function.strict)
        ]
        return self.listed(items, ", ")

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Match items in this order, with ``separator`` between two items. An item is an expression, and whether it is
        required."""
        # From the last item to the first: the rest of the items after another one, and as the first ones.
        some = none = '""'
        for expression, required in reversed(items):
            item, after = self.rule("argument", expression), self.rule("some", some)
            some = f"{_quoted(separator)} {item} {after}" if required else f"({_quoted(separator)} {item})? {after}"
            none = f"{item} {after}" if required else f"{item} {after} | {self.rule('none', none)}"
        return self.rule("arguments", none)

    def _any_keywords(self) -> str:
        name = self.rule("NAME", "/[A-Za-z_][A-Za-z0-9_]*=/")
        one = self.rule("argument", f"{name} %json {{}}")
        return f'({one} (", " {one})*)?'

    def _pairs(self, pair: Pair, function: Function, schema: Mapping[str, Any]) -> str:
        """Match parameters in tags, in which strings are written without quotes."""
        parts = []
        inliner = Inliner(schema)
        for each in listed_parameters(function.name, schema, function.strict):
            parameter = each._replace(schema=inliner.inlined(each.schema))
            name, value, required = parameter
            if not name or name != name.strip() or any(sign in name for sign in "<>\"'\n"):
                raise UnsupportedSchemaError(
                    f"the parameter {name!r} of {function.name!r} cannot be written: this model writes names in tags"
                )
            before = pair.before.replace("NAME", name)
            of_text, of_others = (self.text(before.replace("STRING", kind)) for kind in ("true", "false"))
            closing = self.text(pair.padding + pair.closing)
            types = schema_types(value, schema)
            if "string" not in types:
                written = f"{of_others} {self.json(self_contained(value, schema))} {closing}"
            elif (choices := string_choices(function.name, parameter, function.strict, pair.closing)) is not None:
                written = f"{of_text} ({' | '.join(map(_quoted, choices))}) {closing}"
            else:
                written = f"{of_text} {self.until(pair.closing)}"
            if of_text != of_others and {"string", "null"} <= set(types):
                written = f'({written} | {of_others} "null" {closing})'  # as a string, null would be a text
            one = self.rule("pair", f"{written} {self.text(pair.after)}")
            parts.append(one if required else f"{one}?")
        return " ".join(parts)

    def _any_pairs(self, pair: Pair) -> str:
        name = self.rule("NAME", r"""/[^\s<>"']([^<>"'\n]*[^\s<>"'])?/""")
        before, after = pair.before.split("NAME")
        behind = " | ".join({self.text(after.replace("STRING", each)): None for each in ("true", "false")})
        one = f"{self.text(before)} {name} ({behind}) {self.until(pair.closing)} {self.text(pair.after)}"
        return f"{self.rule('pair', one)}*"


def _with_answer(grammar: _Grammar, answer: str) -> str:
    """Return a grammar and the one to which it refers as ``@answer``, as llguidance's JSON."""
    parts = json.loads(answer)["grammars"] if answer.lstrip().startswith("{") else [{"lark_grammar": answer}]
    return json.dumps({"grammars": [{"lark_grammar": str(grammar)}, parts[0] | {"name": "answer"}, *parts[1:]]})


def _without(texts: Sequence[str]) -> str:
    """Return the end of a terminal's expression that excludes texts with any of these in them."""
    return "".join(f" & ~/(?s:.*){_escaped(text)}(?s:.*)/" for text in texts)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
