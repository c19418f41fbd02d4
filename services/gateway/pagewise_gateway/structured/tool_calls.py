"""Grammars of tool calls, in Lark's form as llguidance reads it. They allow calls in the model's own format.

A delimiter that is a special token of the vocabulary is written as that token, any other one as text. Free text may
contain no special token.
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from pagewise_shared.sampling import MAX_GRAMMAR_BYTES

from pagewise_gateway.structured.walk import references
from pagewise_gateway.text.output_parsing.deltas import schema_types
from pagewise_gateway.text.output_parsing.formats import HARMONY_TOOLS, OutputFormat, Start

_ANY_OBJECT = {"type": "object"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_PYTHON_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SPACE = r"[\s\x1c-\x1f]*"  # as Python sees it
_PYTHON_BLOCK = rf"/{_SPACE}```(tool_code|python)?{_SPACE}\[?{_SPACE}[A-Za-z_][A-Za-z0-9_.\-]*\((?s:.*)/"
"""A block of code that begins with a call. The parser reads it as calls, so an answer must not begin with it."""
_ANNOTATIONS = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "nullable", "readOnly"}
    | {"title", "writeOnly"}
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_OF_PARAMETERS = _ANNOTATIONS | _DEFINITIONS | {"type", "properties", "required", "additionalProperties"}
_OF_STRINGS = _ANNOTATIONS | _DEFINITIONS | {"type"}
_LOOSE = frozenset({"minProperties"})
_LOOSE_OF_STRINGS = frozenset({"contentEncoding", "contentMediaType", "format", "maxLength", "minLength", "pattern"})
"""Keywords that the grammar leaves to the model, if the function is not strict."""
_REFERENCES = ("#/$defs/", "#/definitions/")


class UnsupportedSchemaError(ValueError):
    """A schema says something that cannot be followed in the format of the model; the text names the function."""


class Parameter(NamedTuple):
    """A parameter. ``schema``: of its value. ``needed``: it is required."""

    name: str
    schema: dict[str, Any]
    needed: bool


class Function(NamedTuple):
    """A function that may be called. ``parameters``: the schema of its arguments; None: it has none.

    ``strict``: whether the model may choose to call it, but then has to follow the schema. If it has to call something,
    it has to follow the schemas of all functions.
    """

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool = False


@dataclass(slots=True, frozen=True)
class _Shape:
    """How calls are written: NAME and then the arguments stand between ``before`` and ``after``.

    Fields:
        between: stands between two calls. opening, closing: around all of them.
        trigger: what begins calls in free text; an empty text: calls are the whole text, which begins with ``begins``.
        arguments: how they are written: JSON, keyword arguments of Python, or GLM's tags.
    """

    before: str
    after: str
    between: str
    opening: str = ""
    closing: str = ""
    trigger: str = ""
    begins: str = ""
    arguments: Literal["json", "python", "glm"] = "json"

    def behind_trigger(self) -> "_Shape":
        """The same without the trigger."""
        if self.opening:
            return replace(self, opening=self.opening.removeprefix(self.trigger))
        return replace(self, before=self.before.removeprefix(self.trigger))


_MISTRAL_LIST = _Shape('{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]", trigger="[TOOL_CALLS]")
_BEGINS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_ENDS = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_BEGIN, _END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_SHAPES = {
    "deepseek_v3": _Shape(
        f"{_BEGIN}function{_SEPARATOR}NAME\n```json\n", f"\n```{_END}", "\n", _BEGINS, _ENDS, trigger=_BEGINS
    ),
    "deepseek_v31": _Shape(f"{_BEGIN}NAME{_SEPARATOR}", _END, "", _BEGINS, _ENDS, trigger=_BEGINS),
    "glm45": _Shape("<tool_call>NAME\n", "</tool_call>", "\n", trigger="<tool_call>", arguments="glm"),
    "hermes": _Shape('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", trigger="<tool_call>"),
    "llama3_json": _Shape('{"name": "NAME", "parameters": ', "}", "; ", begins="{"),
    "mistral": _Shape("[TOOL_CALLS]NAME[ARGS]", "", "", trigger="[TOOL_CALLS]"),
    HARMONY_TOOLS: _Shape("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", ""),
    "pythonic": _Shape("NAME(", ")", ", ", "[", "]", begins="[", arguments="python"),
}
"""By the names of parsers. gpt-oss makes one call at a time."""


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
        required: whether there is a call; if not, there may be text and calls.
        parallel: whether there may be several calls.
        answer: the grammar of an output without calls; None: it may be any text, and there may be text around calls.

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


def _shape(parser: str, special_tokens: Mapping[str, int], is_free: bool) -> _Shape:
    """Return how calls are written. In free text, the grammar begins behind a trigger that is no special token."""
    shape = _MISTRAL_LIST if parser == "mistral" and "[ARGS]" not in special_tokens else _SHAPES[parser]
    return shape.behind_trigger() if is_free and shape.trigger not in special_tokens else shape


def _callable_functions(shape: _Shape, functions: Sequence[Function], required: bool) -> Sequence[Function]:
    """Leave out functions that the model cannot call, unless they have to be followed, which is refused then."""
    if shape.arguments != "python" or required:
        return functions
    return [each for each in functions if each.strict or _PYTHON_NAME.fullmatch(each.name)] or functions


def after_reasoning(grammar: str, output: OutputFormat, special_tokens: Mapping[str, int], start: Start) -> str:
    """Return the grammar of outputs that match ``grammar`` once the model has stopped thinking (llguidance's JSON)."""
    before = _Grammar(special_tokens)
    if output.harmony:
        before.harmony(None, False, "@answer")
    else:
        before.rule("start", f"{before.reasoning(output, start)} @answer")
    return _with_answer(before, grammar)


class _Grammar:
    """A grammar in the making."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        self._rules: dict[str, str] = {}
        self._num_characters = 0  # of schemas
        texts = sorted((text for text in special_tokens if text), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def __str__(self) -> str:
        return "\n".join(f"{name}: {expression}" for name, expression in self._rules.items()) + "\n"

    def rule(self, name: str, expression: str, options: str = "") -> str:
        """Add a rule; return its name, which is made unique unless it is ``start``."""
        if name != "start":
            name = f"{name}{len(self._rules)}"
        self._rules[name + options] = expression.strip() or '""'
        return name

    def text(self, text: str) -> str:
        """Return the expression of a text, which may contain special tokens."""
        parts, at = [], 0
        for found in self._tokens.finditer(text):
            parts += [_quoted(text[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self._special[found[0]]}]>")
            at = found.end()
        parts += [_quoted(text[at:])] if at < len(text) else []
        return " ".join(parts)

    def until(self, delimiter: str) -> str:
        """Return the expression of any text that ends with this delimiter and does not contain it before."""
        if delimiter in self._special:
            return f"{self.rule('ANY', '/(?s:.+)/')}? {self.text(delimiter)}"
        return self.rule("until", "/(?s:.*)/", f"[suffix={_quoted(delimiter)}]")

    def reasoning(self, output: OutputFormat, start: Start) -> str:
        """Return the expression of the model's reasoning before its answer."""
        reasoning = output.reasoning
        if reasoning is None or start == "ended":
            return ""
        space = self.rule("SPACE", r"/\s{1,4}/")
        opening = f"{self.text(reasoning.opening)}"
        thought = f"{self.until(reasoning.closing)} {space}?"
        if start == "reasoning":
            return thought
        return f"({opening})? {thought}" if start == "implied" else f"({space}? {opening} {thought})?"

    def free(self, shape: _Shape, call: str, output: OutputFormat, parallel: bool) -> str:
        """Return the expression of text and calls; calls of a trigger that is no special token are without it."""
        opening = output.tools.opening
        written = [opening] if opening and opening not in self._special else []
        more = f"({self.text(shape.between)} {call})*" if parallel and (shape.closing or not shape.trigger) else ""
        group = f"{self.text(shape.opening)} {call} {more} {self.text(shape.closing)}"
        if not shape.trigger:
            other = rf"/\s*[^\s\x00-\x1f{re.escape(shape.begins)}](?s:.*)/{_without(written)}"
            other = self.rule("OTHER", f"{other} & ~{_PYTHON_BLOCK}" if shape.arguments == "python" else other)
            return f'({group} | {other} | "")'
        any_text = self.rule("ANY", "/(?s:.+)/")
        before = f"{any_text}?" if shape.trigger in self._special else self.until(shape.trigger)
        if parallel:
            return f"({before} {group})* {any_text}?"
        behind = self.rule("BEHIND", f"/(?s:.+)/{_without(written)}")
        return f"({before} {group} {behind}? | {any_text}?)"

    def harmony(self, calls: str | None, required: bool, answer: str | None = None) -> None:
        """Add the rules of gpt-oss: messages on other channels, and then calls or an answer."""
        ends = self.until("<|end|>")
        message = f'{self.text("<|channel|>")} ("analysis" | "commentary") {self.text("<|message|>")} {ends}'
        begun = self.rule("message", f"{message} {self.text('<|start|>assistant')}")
        answer = answer or f"{self.rule('ANY', '/(?s:.+)/')}?"
        final = f"{self.text('<|channel|>final<|message|>')} {answer}"
        last = calls if required else f"{calls} | {final}" if calls is not None else final
        self.rule("start", f"{begun}* ({last})")

    # ---- calls -------------------------------------------------------------------------------------

    def call(self, shape: _Shape, function: Function, required: bool) -> str:
        """Return the expression of a call of a function."""
        schema: Mapping[str, Any] = function.parameters if function.parameters is not None else _NO_PARAMETERS
        follows = required or function.strict
        if not follows:
            schema = _ANY_OBJECT
        before = self.text(shape.before.replace("NAME", function.name))
        if shape.arguments == "json":
            arguments = self._json(schema)
        elif shape.arguments == "python":
            if _PYTHON_NAME.fullmatch(function.name) is None:
                raise UnsupportedSchemaError(f"{function.name!r} cannot be called by this model: no name in Python")
            arguments = self._keywords(function, schema) if follows else self._any_keywords()
        else:
            arguments = self._tags(function, schema) if follows else self._any_tags()
        return f"{before} {arguments} {self.text(shape.after)}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of the JSON that a schema accepts.

        Raises:
            UnsupportedSchemaError: all are too long together: parameters repeat the definitions that they share.
        """
        text = json.dumps(schema)
        self._num_characters += len(text)
        if self._num_characters > MAX_GRAMMAR_BYTES:
            raise UnsupportedSchemaError(
                f"the schemas of the functions take more than {MAX_GRAMMAR_BYTES} bytes as a grammar, the limit"
            )
        return f"%json {text}"

    def _keywords(self, function: Function, schema: Mapping[str, Any]) -> str:
        """Arguments of a call in Python, whose values JSON and Python write alike."""
        # From the last property to the first: the rest of the arguments, behind another argument or as the first one.
        some = none = '""'
        for name, value, needed in reversed(python_parameters(function.name, schema, function.strict)):
            item = self.rule("argument", f"{_quoted(name + '=')} {self._json(self_contained(value, schema))}")
            after = self.rule("some", some)
            some = f'", " {item} {after}' if needed else f'(", " {item})? {after}'
            none = f"{item} {after}" if needed else f"{item} {after} | {self.rule('none', none)}"
        return self.rule("arguments", none)

    def _any_keywords(self) -> str:
        """Any arguments of a call in Python."""
        name = self.rule("NAME", "/[A-Za-z_][A-Za-z0-9_]*=/")
        one = self.rule("argument", f"{name} %json {{}}")
        return f'({one} (", " {one})*)?'

    def _tags(self, function: Function, schema: Mapping[str, Any]) -> str:
        """Arguments of GLM, of which strings are written as they are."""
        parts = []
        for parameter in listed_parameters(function.name, schema, function.strict):
            name, value, needed = parameter
            if not name or name != name.strip() or "<" in name:
                raise UnsupportedSchemaError(
                    f"the parameter {name!r} of {function.name!r} cannot be written: this model writes names in tags"
                )
            key = self.text(f"<arg_key>{name}</arg_key>\n<arg_value>")
            closing = "</arg_value>"
            if "string" not in schema_types(value):
                written = f"{self._json(self_contained(value, schema))} {self.text(closing)}"
            elif (choices := string_choices(function.name, parameter, function.strict)) is not None:
                written = f"({' | '.join(map(_quoted, choices))}) {self.text(closing)}"
            else:
                written = self.until(closing)
            pair = self.rule("pair", f"{key} {written} {_quoted(chr(10))}")
            parts.append(pair if needed else f"{pair}?")
        return " ".join(parts)

    def _any_tags(self) -> str:
        """Any arguments of GLM."""
        name = self.rule("NAME", r"/[^\s<]([^<\n]*[^\s<])?/")
        key = f"{self.text('<arg_key>')} {name} {self.text('</arg_key>' + chr(10) + '<arg_value>')}"
        pair = self.rule("pair", f"{key} {self.until('</arg_value>')} {_quoted(chr(10))}")
        return f"{pair}*"


def _with_answer(grammar: _Grammar, answer: str) -> str:
    """Return a grammar that refers to another one as ``@answer``, with that one, as llguidance's JSON."""
    parts = json.loads(answer)["grammars"] if answer.lstrip().startswith("{") else [{"lark_grammar": answer}]
    return json.dumps({"grammars": [{"lark_grammar": str(grammar)}, parts[0] | {"name": "answer"}, *parts[1:]]})


def _without(texts: Sequence[str]) -> str:
    """Return the end of a terminal's expression that excludes these texts."""
    return "".join(f" & ~/(?s:.*){_escaped(text)}(?s:.*)/" for text in texts)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ---- parameters of formats in which arguments are not one JSON object ----------------------------------
# The grammar of such a call is made parameter by parameter. So keywords about the object as a whole cannot be followed,
# and are refused by name: only the listed keywords are honoured, or forbid nothing. A function that is not strict may
# have some more, which are left to the model.


def listed_parameters(function: str, schema: Mapping[str, Any], strict: bool) -> list[Parameter]:
    """Return the parameters of a function one by one. ``schema``: of its arguments. ``strict``: all of it is followed.

    Raises:
        UnsupportedSchemaError: the schema says more of the arguments than which there are and which are required.
    """
    _check_keywords(f"the parameters of {function!r}", schema, _OF_PARAMETERS if strict else _OF_PARAMETERS | _LOOSE)
    if "object" not in (schema_types(schema) or ["object"]):
        raise UnsupportedSchemaError(f"the parameters of {function!r} are no object")
    properties, required = _properties(function, schema)
    for reference in references(schema):
        if not reference.startswith(_REFERENCES):
            raise UnsupportedSchemaError(
                f"$ref {reference[:100]!r} in the parameters of {function!r} cannot be followed: in the format of this "
                "model, those that refer to $defs can"
            )
    return [
        Parameter(name, dict(value) if isinstance(value, Mapping) else {}, name in required)
        for name, value in properties.items()
        if value is not False  # which says that it may not be there
    ]


def _properties(function: str, schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the schemas of the parameters by their names, and the names of the required ones."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise UnsupportedSchemaError(f"properties or required in the parameters of {function!r} are not what they name")
    for name in required:
        if not isinstance(name, str) or properties.get(name, False) is False:
            raise UnsupportedSchemaError(
                f"the parameters of {function!r} require {name!r}, which is not listed in properties"
            )
    for name, value in properties.items():
        if not isinstance(value, Mapping | bool):
            raise UnsupportedSchemaError(f"the schema of the parameter {name!r} of {function!r} is no schema")
    return properties, required


def self_contained(value: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a value, with the definitions in ``schema`` that it refers to, also by way of others."""
    found: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [value]
    while waiting:
        for reference in references(waiting.pop()):
            group, name = reference.split("/")[1:3]
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            definitions = schema.get(group)
            if isinstance(definitions, Mapping) and name in definitions and name not in found.setdefault(group, {}):
                found[group][name] = definitions[name]
                waiting.append(definitions[name])
    return {**value, **found}


def python_parameters(function: str, schema: Mapping[str, Any], strict: bool) -> list[Parameter]:
    """The same for calls in Python, whose parameters have names as Python has them. Words such as ``from`` are some.

    Raises:
        UnsupportedSchemaError: as ``listed_parameters``, or a name is none in Python.
    """
    found = listed_parameters(function, schema, strict)
    for each in found:
        name = each.name
        if not name.isidentifier() or not unicodedata.is_normalized("NFKC", name):
            raise UnsupportedSchemaError(
                f"the parameter {name!r} of {function!r} cannot be written: this model calls functions in Python"
            )
    return found


def string_choices(function: str, parameter: Parameter, strict: bool) -> Sequence[str] | None:
    """Return the values of a parameter that is written as it is, without quotes: the values of its enum; None: any
    string.

    ``strict``: as for ``listed_parameters``.

    Raises:
        UnsupportedSchemaError: its schema says anything else of strings.
    """
    what, known = _of(function, parameter), _OF_STRINGS if strict else _OF_STRINGS | _LOOSE_OF_STRINGS
    choices = _choices(what, parameter.schema, known)
    if choices is None:
        _check_string(what, parameter.schema, known)
    elif any("</arg_value>" in each for each in choices):
        raise UnsupportedSchemaError(
            f"{what} may be a text with '</arg_value>', which ends values in the format of this model"
        )
    return choices


def _choices(what: str, schema: Mapping[str, Any], known: frozenset[str]) -> list[str] | None:
    """Return the values of an enum or a const, which may also be null; None: there is none."""
    if isinstance(schema.get("anyOf"), list):
        return _choices_or_null(what, schema, known)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(each, str | None) for each in values):
        return None
    null = None in values and "null" in schema_types(schema)
    found = [each for each in values if each is not None] + ["null"] * null
    if not found:
        return None
    _check_keywords(what, schema, known | {"enum", "const"})
    return found


def _choices_or_null(what: str, schema: Mapping[str, Any], known: frozenset[str]) -> list[str] | None:
    """Return the same of an ``anyOf`` of one schema, with null or without it."""
    union = schema["anyOf"]
    others = [each for each in union if isinstance(each, Mapping) and each.get("type") != "null"]
    if len(others) != 1 or len(union) > 2 or (found := _choices(what, others[0], known)) is None:
        return None
    _check_keywords(what, schema, _ANNOTATIONS | _DEFINITIONS | {"anyOf"})
    return found + ["null"] * (len(union) - 1)


def _check_string(what: str, schema: Any, known: frozenset[str]) -> None:
    """Check that all strings match a schema that some do."""
    if not isinstance(schema, Mapping):
        return
    unions = [name for name in ("anyOf", "oneOf") if name in schema]
    if unions == ["anyOf"]:
        _check_keywords(what, schema, _ANNOTATIONS | _DEFINITIONS | {"anyOf"})
        free = [each for each in schema["anyOf"] if "string" in schema_types(each)]
        if len(free) == 1:
            _check_string(what, free[0], known)
            return
    _check_keywords(what, schema, known)


def _check_keywords(what: str, schema: Mapping[str, Any], known: frozenset[str]) -> None:
    names = map(str, schema.keys() - known)
    if unknown := sorted(name for name in names if not name.startswith("x-")):
        raise UnsupportedSchemaError(
            f"{', '.join(unknown)[:200]} in {what} cannot be followed in the format of this model"
        )


def _of(function: str, parameter: Parameter) -> str:
    return f"the parameter {parameter.name!r} of {function!r}"
