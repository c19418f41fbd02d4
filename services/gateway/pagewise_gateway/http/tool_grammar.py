"""What an answer has to match, as a grammar: calls that the model has to make, and a format of the answer."""

from collections.abc import Mapping

from pagewise_gateway.http.chat_formats import Parsing
from pagewise_gateway.http.schema import ChatRequest
from pagewise_gateway.http.structured import Wanted, wanted_grammar
from pagewise_gateway.http.tool_schema import NamedToolChoice
from pagewise_gateway.structured.errors import GrammarError
from pagewise_gateway.structured.grammars import Validate
from pagewise_gateway.structured.schemas import check_schema
from pagewise_gateway.structured.vocabulary import simplified
from pagewise_gateway.text.output_parsing import Start
from pagewise_gateway.text.output_parsing.grammar import Function, after_reasoning, tool_call_grammar
from pagewise_gateway.text.output_parsing.parameters import UnsupportedSchemaError


def answer_grammar(
    body: ChatRequest, parsing: Parsing | None, start: Start, special_tokens: Mapping[str, int]
) -> Wanted | None:
    """Return what the output of a chat has to match; None: anything. Reasoning that is parsed is free.

    ``start``: where the output begins. ``special_tokens``: their ids by their texts.

    Raises:
        InvalidRequestError: it asks for several formats.
    """
    wanted = wanted_grammar(body)
    if parsing is None:
        return wanted
    choice, tools = body.tool_choice, body.tools or []
    has_to_call = choice == "required" or isinstance(choice, NamedToolChoice)
    answer = wanted.make if wanted is not None and not has_to_call else None
    if tools and choice != "none" and (has_to_call or answer or any(tool.function.strict for tool in tools)):
        named = choice.function.name if isinstance(choice, NamedToolChoice) else None
        functions = [
            Function(tool.function.name, tool.function.parameters, bool(tool.function.strict))
            for tool in tools
            if named in (None, tool.function.name)
        ]
        parallel = parsing.parallel and named is None

        def make(validate: Validate) -> str:
            followed = [_checked(each) if has_to_call or each.strict else each for each in functions]
            try:
                return tool_call_grammar(
                    parsing.tool_parser,
                    parsing.format,
                    followed,
                    special_tokens,
                    start=start,
                    required=has_to_call,
                    parallel=parallel,
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


def _checked(function: Function) -> Function:
    """The same function, with parameters that can be followed."""
    try:
        parameters = simplified(function.parameters if function.parameters is not None else {})
        check_schema(parameters)
        if parameters is False:
            raise GrammarError("no arguments match them")
    except GrammarError as error:
        raise GrammarError(f"the parameters of {function.name!r}: {error}") from error
    return function if function.parameters is None else function._replace(parameters=parameters)
