"""Makes the grammar that the output of a request has to match."""

from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple

import msgspec
from pagewise_shared.json_errors import why_not_json

from pagewise_gateway.generation import Capacity
from pagewise_gateway.http import schema
from pagewise_gateway.http.context import Service
from pagewise_gateway.http.conversation import Parsing
from pagewise_gateway.http.errors import InvalidRequestError, OverloadedError, UnsupportedParameterError
from pagewise_gateway.http.schema import ChatRequest, GenerationFields, StructuralTag, StructuredOutputs
from pagewise_gateway.http.tools_schema import NamedToolChoice
from pagewise_gateway.metrics import GrammarKind
from pagewise_gateway.structured import grammars
from pagewise_gateway.structured.call_parameters import UnsupportedSchemaError
from pagewise_gateway.structured.grammars import Make, Validate
from pagewise_gateway.structured.schemas import check_schema
from pagewise_gateway.structured.tool_calls import Function, after_reasoning, tool_call_grammar
from pagewise_gateway.structured.vocabulary import simplified
from pagewise_gateway.structured.walk import GrammarError, TooManyGrammarsError
from pagewise_gateway.text.output_parsing import Start


class Wanted(NamedTuple):
    """A grammar that a request asks for. ``field``: the name of the field that does. ``make``: makes the grammar."""

    kind: GrammarKind
    field: str
    make: Make


async def grammar_of(service: Service, wanted: Wanted | None, capacity: Capacity, key: str) -> str:
    """Make a grammar, check it, and count it; empty if ``wanted`` is None. ``key``: name of the API key.

    Raises:
        InvalidRequestError: the grammar cannot be used.
        UnsupportedParameterError: the executors support no grammars.
        OverloadedError: too many grammars of this key wait.
    """
    if wanted is None:
        return ""
    if capacity.no_grammars:
        raise UnsupportedParameterError(
            f"{wanted.field}: outputs cannot be structured here: {capacity.no_grammars}", wanted.field
        )
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
    """Return the grammar that a request asks for, or None.

    Raises:
        InvalidRequestError: it asks for several grammars, or ``structured_outputs`` has none.
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
        case schema.JSONObjectFormat():
            return Wanted("json_object", "response_format", lambda _: grammars.json_object_grammar())
        case schema.JSONSchemaFormat(json_schema):
            given_schema = json_schema.schema
            return Wanted(
                "json", "response_format.json_schema.schema", lambda _: grammars.json_schema_grammar(given_schema)
            )
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
    match kind:
        case "regex":
            return grammars.regex_grammar(outputs.regex or "")
        case "choice":
            return grammars.choice_grammar(outputs.choice or ())
        case "grammar":
            return grammars.context_free_grammar(outputs.grammar or "", validate)
        case "structural_tag":
            assert outputs.structural_tag is not None
            return _tag_grammar(outputs.structural_tag)
        case _:
            return grammars.json_schema_grammar(
                outputs.json if kind == "json" else {"type": "object"},
                whitespace=not outputs.disable_any_whitespace,
                whitespace_pattern=outputs.whitespace_pattern,
                additional_properties=not outputs.disable_additional_properties,
            )


def _tag_grammar(given: StructuralTag | str) -> str:
    try:
        tag = msgspec.json.decode(given, type=StructuralTag) if isinstance(given, str) else given
    except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
        raise GrammarError(str(error)) from error
    except msgspec.DecodeError as error:
        raise GrammarError(why_not_json(str(given).encode(), error)) from error
    return grammars.structural_tag_grammar([(one.begin, one.schema, one.end) for one in tag.structures], tag.triggers)


def answer_grammar(
    body: ChatRequest, parsing: Parsing | None, start: Start, special_tokens: Mapping[str, int]
) -> Wanted | None:
    """Return the grammar that the output of a chat has to match, or None. Reasoning that is parsed is free.

    ``start``: the part of the message with which the output begins. ``special_tokens``: their ids by their texts.

    Raises:
        InvalidRequestError: it asks for several formats.
    """
    wanted = wanted_grammar(body)
    if parsing is None:
        return wanted
    choice, functions = body.tool_choice, _callable_functions(body)
    named = isinstance(choice, NamedToolChoice)
    required = named or choice == "required"
    answer = None if required or wanted is None else wanted.make
    if functions and any((required, answer, *(function.strict for function in functions))):

        def make(validate: Validate) -> str:
            try:
                return tool_call_grammar(
                    parsing.tool_parser,
                    parsing.format,
                    [_checked(function) if required or function.strict else function for function in functions],
                    special_tokens,
                    start=start,
                    required=required,
                    parallel=parsing.parallel and not named,
                    answer=answer(validate) if answer is not None else None,
                )
            except UnsupportedSchemaError as error:
                raise GrammarError(str(error)) from error

        return Wanted("tool_calls", "tools", make)
    if wanted is None:
        return None
    make_answer = wanted.make
    return wanted._replace(
        make=lambda validate: after_reasoning(make_answer(validate), parsing.format, special_tokens, start)
    )


def _callable_functions(body: ChatRequest) -> list[Function]:
    choice = body.tool_choice
    if choice == "none":
        return []
    return [
        Function(tool.function.name, tool.function.parameters, bool(tool.function.strict))
        for tool in body.tools or ()
        if not isinstance(choice, NamedToolChoice) or tool.function.name == choice.function.name
    ]


def _checked(function: Function) -> Function:
    """Return the function with simplified parameters, which a grammar can express."""
    try:
        parameters = simplified(function.parameters if function.parameters is not None else {})
        check_schema(parameters)
        if parameters is False:
            raise GrammarError("no arguments match them")
    except GrammarError as error:
        raise GrammarError(f"the parameters of {function.name!r}: {error}") from error
    return function if function.parameters is None else function._replace(parameters=parameters)
