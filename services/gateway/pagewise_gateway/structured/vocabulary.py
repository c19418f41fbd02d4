"""Removes keywords of JSON schemas (drafts 4 to 2020-12) that forbid nothing, which generators of schemas write.

llguidance refuses many of them. A keyword forbids nothing by its value (``uniqueItems: false``), by the keywords beside
it (``minContains`` without ``contains``), or because ``type`` excludes the values that it is about. A few keywords that
forbid something are replaced by others that llguidance implements.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from pagewise_shared.sampling import MAX_GRAMMAR_BYTES

from pagewise_gateway.structured.accepted_values import (
    ASSERTIONS,
    TYPES,
    accepts_none,
    is_closed,
    is_number,
    is_zero,
    limits_texts,
    listed_names,
    listed_texts,
    number_of,
    of_other_types,
    properties_of,
    reach,
    required_of,
    types_of,
)
from pagewise_gateway.structured.lookahead import without_lookahead
from pagewise_gateway.structured.walk import GrammarError, nesting, objects, references, subschemas, target_of

_STRUCTURE = frozenset({"$defs", "$id", "$schema", "definitions"})
_USELESS_ALONE = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_APPLICATORS = ("if", "then", "else", "not", "contains")
"""Keywords that apply to the value only together with others."""
_EVALUATING = frozenset({"anyOf", "contains", "if", "patternProperties"})
"""Keywords that decide which items and properties are evaluated, even where they forbid nothing."""
_ANY_TEXT = ("", ".*", "^", "^.*", r"[\s\S]*", r"^[\s\S]*$")
"""Patterns that every text matches."""
_ANY_LINE = (*_ANY_TEXT, "^.*$", "^(.*)$", ".+", "^.+$", "^(.+)$")
"""Patterns that every text of one line matches, but for an empty one."""
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""The formats of llguidance. By JSON Schema an unknown one forbids nothing: it is removed where a ``pattern`` is."""
_HINTS = (
    *("binary", "commonmark", "directory-path", "enum", "file-path", "html", "markdown", "multi-line", "multiline"),
    *("password", "path", "string", "text", "textarea"),
)
"""Formats that do not limit the text."""
_EVALUATED_BESIDE = frozenset(
    {"$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "contains", "dependencies", "dependentSchemas", "if"}
    | {"not", "oneOf"}
)
"""Keywords that may evaluate items or properties beside the keywords of the same schema."""
_LARGEST = 9.22e18
"""A number that just fits 64 bits. llguidance takes no lower bound beyond it, and no upper bound beyond it for numbers
that need not be integers. They become this one, which excludes a few integers at the end of 64 bits."""
_BOUNDS = {"minimum": -_LARGEST, "exclusiveMinimum": -_LARGEST, "maximum": _LARGEST, "exclusiveMaximum": _LARGEST}
_URI = "!#$%&'()*+,-./:;=?@_~"
"""Characters of a reference that are not escaped."""
_DIALECTS = ("http://json-schema.org/draft-0", "https://json-schema.org/draft/20")
_MOST_REFERENCES = 64
"""References that are followed, one to the next, to find out whether a schema forbids anything."""
_MOST_NAMES = 4096
"""Names in ``propertyNames``, of all objects together."""


def simplified(schema: Any) -> Any:
    """Return a schema without keywords that forbid nothing, which accepts the same values but for numbers beyond 64
    bits. The given one is not changed. A keyword stays if a reference leads through it.

    Raises:
        GrammarError: it is nested too deeply, too large, or not Unicode.
    """
    nesting(schema, {})
    try:
        encoded = msgspec.json.encode(schema)
    except UnicodeEncodeError:
        raise GrammarError("a text in it is no valid Unicode text") from None
    if len(encoded) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it takes {len(encoded)} bytes as a schema, the limit is {MAX_GRAMMAR_BYTES}")
    schema = msgspec.json.decode(encoded)  # a tree, in which no two schemas are the same object
    if isinstance(schema, dict):
        work = _Simplification(schema)
        work.run()
        return False if accepts_none(schema) else schema
    return schema


class _Simplification:
    """Simplifies one schema, in place."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        dialect = root.get("$schema")
        self.counts_contained = not (isinstance(dialect, str) and "draft-0" in dialect)  # minContains is of 2019
        self._finds_unevaluated = any(  # forbids some of the items or properties that no other keyword evaluates
            (value := one.get(name, True)) is not True and value != {}
            for one in objects(root)
            for name in ("unevaluatedItems", "unevaluatedProperties")
        )
        self._done: set[int] = set()
        self._num_names = 0
        self._targets: dict[str, Any] = {}
        self._kept: set[int] = set()
        # By test and id of a schema, which is kept alive with the result: many schemas may refer to a large one.
        self._known: dict[tuple[Callable[[Any], Any], int], tuple[Any, Any]] = {}
        for reference in references(root):
            try:
                self._targets[reference] = target_of(root, reference, self._kept)
            except GrammarError:  # it is refused where it is checked
                continue

    def run(self) -> None:
        # Each schema comes after its subschemas. Targets of references come first of all, because the types that they
        # accept are needed to simplify the others.
        for schema in [*self._targets.values(), self.root]:
            for one in reversed(list(subschemas(schema, self._done))):
                self._drop(one)

    def _drop(self, schema: dict[str, Any]) -> None:
        self._rewrite(schema)
        types = types_of(schema)
        for keyword in list(schema):
            if self._forbids_nothing(schema, keyword, types):
                del schema[keyword]
        # ``if`` and ``contains`` need these to decide, so they go after them.
        for keyword, needed in _USELESS_ALONE.items():
            if needed not in schema and not self._keeps(schema.get(keyword)):
                schema.pop(keyword, None)
        if self._excludes_all(schema):
            for keyword in schema.keys() - {"$defs", "definitions"}:
                del schema[keyword]
            schema["allOf"] = [False]

    def _excludes_all(self, schema: dict[str, Any]) -> bool:
        if "$ref" in schema and accepts_none(self.resolved(schema)):
            return True
        return "not" in schema and not self._keeps(schema["not"]) and bool(self.decides(schema, schema["not"]))

    def _forbids_nothing(self, schema: dict[str, Any], keyword: str, types: frozenset[str]) -> bool:
        """Whether a keyword can be removed from a schema that allows values of these types."""
        if self._keeps(schema[keyword]):
            return False
        if (keyword not in ASSERTIONS and keyword not in _STRUCTURE) or of_other_types(keyword, types):
            return True
        test = _FORBIDS_NOTHING.get(keyword)
        evaluates = self._finds_unevaluated and keyword in _EVALUATING
        return test is not None and not evaluates and test(self, schema, schema[keyword])

    def _rewrite(self, schema: dict[str, Any]) -> None:
        """Replace keywords that llguidance does not implement by others."""
        self._rewrite_reference(schema)
        self._rewrite_pattern(schema)
        self._rewrite_bounds(schema)
        self._rewrite_unevaluated(schema)
        if not self._finds_unevaluated and not self._keeps(*map(schema.get, _APPLICATORS)):
            self._rewrite_not(schema)
            self._rewrite_condition(schema)
            self._rewrite_contains(schema)
        self._rewrite_patterns_of_names(schema)
        self._rewrite_names(schema)

    def _rewrite_reference(self, schema: dict[str, Any]) -> None:
        if isinstance(reference := schema.get("$ref"), str) and reference in self._targets:
            schema["$ref"] = quote(reference, safe=_URI)
            self._targets[schema["$ref"]] = self._targets[reference]

    def _rewrite_pattern(self, schema: dict[str, Any]) -> None:
        if isinstance(pattern := schema.get("pattern"), str):
            schema["pattern"], *others = without_lookahead(pattern)
            _add(schema, [{"pattern": one} for one in others])

    def _rewrite_bounds(self, schema: dict[str, Any]) -> None:
        of_numbers = "number" in types_of(schema)
        for name, most in _BOUNDS.items():
            bound = number_of(schema, name, 0)
            if bound < most < 0 or (of_numbers and bound > most > 0):
                schema[name] = most

    def _rewrite_unevaluated(self, schema: dict[str, Any]) -> None:
        # Where no other keyword evaluates items or properties, the unevaluated ones are simply the others.
        if _EVALUATED_BESIDE & schema.keys():
            return
        items = "additionalItems" if isinstance(schema.get("items"), list) else "items"
        for name, instead in ("unevaluatedItems", items), ("unevaluatedProperties", "additionalProperties"):
            free = instead not in schema and not of_other_types(name, types_of(schema))
            if name in schema and free and not self._keeps(schema[name]) and not self.accepts_all(schema[name]):
                schema[instead] = schema.pop(name)

    def _rewrite_condition(self, schema: dict[str, Any]) -> None:
        if "if" not in schema or (found := self.decides(schema, schema["if"])) is None:
            return
        follows = schema.get("then" if found else "else", True)
        for name in ("if", "then", "else"):
            schema.pop(name, None)
        self._add_if_needed(schema, follows)

    def _rewrite_not(self, schema: dict[str, Any]) -> None:
        refused = schema.get("not")
        if not isinstance(refused, dict):
            return
        asserted, values, texts = ASSERTIONS & refused.keys(), listed_texts(schema), listed_texts(refused)
        if asserted == {"not"}:
            self._add_if_needed(schema, schema.pop("not")["not"])
        elif values is not None and texts is not None and len(asserted) == 1:
            del schema["not"]
            schema.pop("const", None)
            schema["enum"] = [value for value in values if value not in texts]

    def _rewrite_contains(self, schema: dict[str, Any]) -> None:
        if "contains" not in schema or not self.counts_contained or not self.accepts_all(schema["contains"]):
            return
        least, most = number_of(schema, "minContains", 1), number_of(schema, "maxContains", math.inf)
        for name in ("contains", "minContains", "maxContains"):
            schema.pop(name, None)
        schema["minItems"] = max(number_of(schema, "minItems", 0), least)
        if most < math.inf:
            schema["maxItems"] = min(number_of(schema, "maxItems", most), most)

    def _rewrite_patterns_of_names(self, schema: dict[str, Any]) -> None:
        others, patterns = schema.get("additionalProperties", True), schema.get("patternProperties")
        if not isinstance(patterns, dict) or len(patterns) != 1 or self._keeps(patterns, others):
            return
        ((pattern, value),) = patterns.items()
        # Names with line breaks get the schema as well, which a pattern for any line leaves free.
        any_name = pattern in _ANY_TEXT or (pattern in _ANY_LINE and self.accepts_all(others))
        if any_name and ("properties" not in schema or self.accepts_all(value)):
            del schema["patternProperties"]
            schema["additionalProperties"] = value

    def _rewrite_names(self, schema: dict[str, Any]) -> None:
        names = schema.get("propertyNames")
        free = "patternProperties" not in schema and not self._finds_unevaluated
        if isinstance(names, dict | bool) and free and not self._keeps(names):
            listed = self.known(listed_names, self.resolved(names))
            if listed is not None and self._num_names + len(listed) <= _MOST_NAMES:
                self._num_names += len(listed)
                self._name_properties(schema, listed)

    def _add_if_needed(self, schema: dict[str, Any], other: Any) -> None:
        if not self.decides(schema, other):
            _add(schema, [other])

    def _keeps(self, *values: Any) -> bool:
        """Whether a reference leads through one of these values, which must not move then."""
        return not self._kept.isdisjoint(map(id, values))

    def _name_properties(self, schema: dict[str, Any], names: Collection[str]) -> None:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        definitions = self.root.get("$defs", {})
        if not isinstance(properties, dict) or not isinstance(definitions, dict):
            return
        if self._keeps(properties, others):
            return
        if isinstance(others, dict) and others:  # many names share it
            reference = f"values-of-names-{len(definitions)}"
            while reference in definitions:
                reference += "_"
            self.root["$defs"] = definitions
            definitions[reference] = self._targets[f"#/$defs/{reference}"] = others
            others = {"$ref": f"#/$defs/{reference}"}
        del schema["propertyNames"]
        schema["properties"] = {name: value for name, value in properties.items() if name in names}
        if others is not False:
            schema["properties"] |= {name: others for name in names if name not in properties}
        schema["additionalProperties"] = False

    def resolved(self, schema: Any) -> Any:
        """Follow the references of a schema that has no other keyword."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, dict) or ASSERTIONS & schema.keys() != {"$ref"}:
                return schema
            schema = self._targets.get(schema["$ref"]) if isinstance(schema["$ref"], str) else None
        return None

    def accepts_all(self, schema: Any) -> bool:
        return bool(self.known(reach, self.resolved(schema))[1] == TYPES)

    def decides(self, schema: Mapping[str, Any], other: Any) -> bool | None:
        """Return whether ``other`` accepts all values of the types of ``schema`` (True), or none of them (False); None:
        neither is certain."""
        types, (some, every) = types_of(schema), self.known(reach, self.resolved(other))
        return True if types <= every else None if types & some else False

    def evaluates_nothing_new(self, schema: Any) -> bool:
        # No keyword needs to know which items or properties are evaluated.
        return self.accepts_all(schema) and not self._finds_unevaluated

    def known(self, test: Callable[[Any], Any], schema: Any) -> Any:
        """Return the cached result of a test of a schema, which simplifying the schema does not change."""
        if (key := (test, id(schema))) not in self._known:
            self._known[key] = schema, test(schema)
        return self._known[key][1]


_Test = Callable[[_Simplification, dict[str, Any], Any], bool]


def _conditional(work: _Simplification, schema: dict[str, Any], value: Any) -> bool:
    # ``if`` forbids nothing if each branch that may be taken accepts every value.
    then, otherwise = work.accepts_all(schema.get("then", True)), work.accepts_all(schema.get("else", True))
    return (then or accepts_none(value)) and (otherwise or work.accepts_all(value))


def _depends_on_nothing(work: _Simplification, schema: dict[str, Any], value: Any) -> bool:
    # The schemas that a property requires accept everything, and the names are required anyway.
    required, closed, named = required_of(schema), is_closed(schema), properties_of(schema)
    return isinstance(value, dict) and all(
        (closed and of not in named)
        or (
            all(isinstance(name, str) and (name == of or name in required) for name in needed)
            if isinstance(needed, list)
            else work.accepts_all(needed)
        )
        for of, needed in value.items()
    )


_FORBIDS_NOTHING: dict[str, _Test] = {
    "$id": lambda work, schema, value: schema is not work.root and next(references(schema), None) is None,
    "$schema": lambda work, schema, value: schema is not work.root or not str(value).startswith(_DIALECTS),
    "additionalItems": lambda work, schema, value: (
        not isinstance(schema.get("items"), list) and "prefixItems" not in schema
    ),
    "allOf": lambda work, schema, value: isinstance(value, list) and all(work.decides(schema, one) for one in value),
    "anyOf": lambda work, schema, value: isinstance(value, list) and any(work.decides(schema, one) for one in value),
    "contains": lambda work, schema, value: (
        work.counts_contained
        and is_zero(schema.get("minContains"))
        and (
            accepts_none(value)
            or "maxContains" not in schema
            or number_of(schema, "maxItems", math.inf) <= number_of(schema, "maxContains", 0)
        )
    ),
    "dependencies": _depends_on_nothing,
    "dependentRequired": _depends_on_nothing,
    "dependentSchemas": _depends_on_nothing,
    "exclusiveMaximum": lambda work, schema, value: value is False,  # of draft 4
    "exclusiveMinimum": lambda work, schema, value: value is False,
    "format": lambda work, schema, value: (
        isinstance(value, str) and (value in _HINTS or (value not in _FORMATS and limits_texts(schema)))
    ),
    "if": _conditional,
    "maxProperties": lambda work, schema, value: (
        is_closed(schema) and is_number(value) and len(properties_of(schema)) <= value
    ),
    "minItems": lambda work, schema, value: is_zero(value),
    "minLength": lambda work, schema, value: is_zero(value),
    "minProperties": lambda work, schema, value: is_number(value) and value <= len(required_of(schema)),
    "not": lambda work, schema, value: work.decides(schema, value) is False,
    "oneOf": lambda work, schema, value: (
        isinstance(value, list)
        and sum(map(work.accepts_all, value)) == 1
        and all(work.accepts_all(one) or accepts_none(one) for one in value)
    ),
    "pattern": lambda work, schema, value: isinstance(value, str) and value in _ANY_TEXT,
    "patternProperties": lambda work, schema, value: (
        isinstance(value, dict)
        and (
            not value
            or (
                work.accepts_all(schema.get("additionalProperties", True))
                and all(map(work.accepts_all, value.values()))
            )
        )
    ),
    "propertyNames": lambda work, schema, value: "string" in work.known(reach, work.resolved(value))[1],
    "unevaluatedItems": lambda work, schema, value: (
        work.evaluates_nothing_new(value) or isinstance(schema.get("items"), dict | bool)
    ),
    "unevaluatedProperties": lambda work, schema, value: (
        work.evaluates_nothing_new(value) or "additionalProperties" in schema
    ),
    "uniqueItems": lambda work, schema, value: (
        value is False or (is_number(schema.get("maxItems")) and schema["maxItems"] <= 1)
    ),
}


def _add(schema: dict[str, Any], others: Sequence[Any]) -> None:
    if others and isinstance(found := schema.get("allOf", []), list):
        schema["allOf"] = [*found, *others]
