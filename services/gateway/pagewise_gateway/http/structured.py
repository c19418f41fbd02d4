"""What a request wants its output to match, as a grammar."""

from time import perf_counter
from typing import NamedTuple

import msgspec
from pagewise_shared.json_errors import why_not_json

from pagewise_gateway.generation import Capacity
from pagewise_gateway.http.context import Service
from pagewise_gateway.http.errors import InvalidRequestError, OverloadedError, UnsupportedParameterError
from pagewise_gateway.http.schema import (
    GenerationFields,
    JSONObjectFormat,
    JSONSchemaFormat,
    StructuralTag,
    StructuredOutputs,
)
from pagewise_gateway.metrics import GrammarKind
from pagewise_gateway.structured.errors import GrammarError, TooManyGrammarsError
from pagewise_gateway.structured.grammars import (
    Make,
    Validate,
    choice_grammar,
    context_free_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    structural_tag_grammar,
)


class Wanted(NamedTuple):
    """A grammar that a request asks for. ``field``: where it does. ``make``: makes it."""

    kind: GrammarKind
    field: str
    make: Make


async def request_grammar(service: Service, body: GenerationFields, capacity: Capacity, key: str) -> str:
    """Return the grammar that the output of a request has to match; empty: it asks for none.

    ``key``: name of the API key.

    Raises:
        InvalidRequestError: the grammar cannot be used, or the request asks for several.
        UnsupportedParameterError: the executors follow no grammars.
    """
    return await grammar_of(service, wanted_grammar(body), capacity, key)


async def grammar_of(service: Service, wanted: Wanted | None, capacity: Capacity, key: str) -> str:
    """Return the grammar that a request asks for, checked; empty: it asks for none. As ``request_grammar``."""
    if wanted is None:
        return ""
    if capacity.no_grammars:
        raise UnsupportedParameterError(
            f"{wanted.field}: outputs cannot be structured here: {capacity.no_grammars}", wanted.field
        )
    return await checked_grammar(service, wanted, key)


async def checked_grammar(service: Service, wanted: Wanted, key: str) -> str:
    """Make a grammar, check it, and count it. ``key``: name of the API key.

    Raises:
        InvalidRequestError: it cannot be used.
        OverloadedError: too many of this key wait.
    """
    began = perf_counter()
    try:
        grammar = await service.grammars.checked(wanted.make, key)
    except GrammarError as error:
        raise InvalidRequestError(f"{wanted.field}: {error}", wanted.field) from error
    except TooManyGrammarsError as error:
        raise OverloadedError(str(error), wanted.field) from error
    service.metrics.structured_requests(wanted.kind).inc()
    service.metrics.grammar_check_seconds.observe(perf_counter() - began)
    return grammar


def wanted_grammar(body: GenerationFields) -> Wanted | None:
    """Return what the output of a request has to match; None: anything.

    Raises:
        InvalidRequestError: it asks for several grammars, or for none where one has to be.
    """
    outputs, given = body.structured_outputs, body.response_format
    if outputs is not None:
        wanted = _of_outputs(outputs)
        if given is not None and _of_format(given) is not None:
            raise InvalidRequestError(
                "structured_outputs and response_format cannot be used together", "structured_outputs"
            )
        return wanted
    return None if given is None else _of_format(given)


def _of_format(given: object) -> Wanted | None:
    match given:
        case JSONObjectFormat():
            return Wanted("json_object", "response_format", lambda _: json_object_grammar())
        case JSONSchemaFormat(json_schema):
            schema = json_schema.schema
            return Wanted("json", "response_format.json_schema.schema", lambda _: json_schema_grammar(schema))
        case StructuralTag():
            return Wanted("structural_tag", "response_format", lambda _: _tag_grammar(given))
        case _:
            return None


def _of_outputs(outputs: StructuredOutputs) -> Wanted:
    kinds: tuple[GrammarKind, ...] = ("json", "regex", "choice", "grammar", "structural_tag")
    chosen: list[GrammarKind] = [kind for kind in kinds if getattr(outputs, kind) is not None]
    if outputs.json_object:
        chosen.append("json_object")
    if len(chosen) != 1:
        raise InvalidRequestError(
            f"structured_outputs must have exactly one of {', '.join((*kinds, 'json_object'))}; "
            f"it has {', '.join(chosen) or 'none'}",
            "structured_outputs",
        )
    kind = chosen[0]
    for option in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(outputs, option) and kind not in ("json", "json_object"):
            field = f"structured_outputs.{option}"
            raise InvalidRequestError(f"{field} is only allowed with json and json_object", field)
    return Wanted(kind, f"structured_outputs.{kind}", lambda validate: _grammar_of(kind, outputs, validate))


def _grammar_of(kind: GrammarKind, outputs: StructuredOutputs, validate: Validate) -> str:
    if kind in ("json", "json_object"):
        return json_schema_grammar(
            outputs.json if kind == "json" else {"type": "object"},
            whitespace=not outputs.disable_any_whitespace,
            whitespace_pattern=outputs.whitespace_pattern,
            additional_properties=not outputs.disable_additional_properties,
        )
    if kind == "regex":
        return regex_grammar(outputs.regex or "")
    if kind == "choice":
        return choice_grammar(outputs.choice or ())
    if kind == "grammar":
        return context_free_grammar(outputs.grammar or "", validate)
    tag = given = outputs.structural_tag
    if isinstance(given, str):
        try:
            tag = msgspec.json.decode(given, type=StructuralTag)
        except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
            raise GrammarError(str(error)) from error
        except msgspec.DecodeError as error:
            raise GrammarError(why_not_json(given.encode(), error)) from error
    assert isinstance(tag, StructuralTag)
    return _tag_grammar(tag)


def _tag_grammar(tag: StructuralTag) -> str:
    return structural_tag_grammar([(one.begin, one.schema, one.end) for one in tag.structures], tag.triggers)
