"""Tools in the bodies of requests: their functions, the choice among them, and their calls."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

MAX_TOOLS = 1024
MAX_TOOL_CALLS = 1024
MAX_ID_LENGTH = 256
Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]
"""The id of a call."""
# In Python "$" also matches before a line break at the end; "(?!\n)" matches the end in all dialects of patterns.
FunctionName = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_.:/-]+$(?!\n)")]


class FunctionDefinition(Struct, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call. ``parameters``: the JSON schema of its arguments, which are an object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Meta(description="Whether arguments have to follow the schema.")] = None


class Tool(Struct, forbid_unknown_fields=True, frozen=True):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Struct, forbid_unknown_fields=True, frozen=True):
    """The name of a function."""

    name: FunctionName


class NamedToolChoice(Struct, forbid_unknown_fields=True, frozen=True):
    """The one function that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(Struct, forbid_unknown_fields=True, frozen=True):
    """A function that the model has called. ``arguments``: a JSON object as text, as in the answer.

    ``parsed_arguments``: added by OpenAI's SDK, without any effect.
    """

    name: FunctionName
    arguments: str
    parsed_arguments: Any = None


class AssistantToolCall(Struct, forbid_unknown_fields=True, frozen=True):
    """A call in an earlier message of the assistant."""

    id: Id
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


ToolList = Annotated[list[Tool], Meta(max_length=MAX_TOOLS, description="The functions that the model may call.")]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class DeclaredTool(Protocol):
    """A function as the other APIs declare it."""

    name: str
    description: str | None
    parameters: Any
    strict: bool | None


def function_tools(declared: Iterable[DeclaredTool]) -> list[Tool] | None:
    """Return the tools of a chat for the functions that a request of another API declares; None: there are none."""
    definitions = (FunctionDefinition(one.name, one.description, one.parameters, one.strict) for one in declared)
    return [Tool("function", definition) for definition in definitions] or None
