"""The pagewise command: starts the services as separate processes.

``from pagewise import LLM, SamplingParams`` does the same from a script or a notebook. They are imported when they are
asked for, so that ``import pagewise`` stays cheap.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagewise.llm import LLM, CompletionOutput, LLMError, Logprob, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "LLMError", "Logprob", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pagewise' has no attribute {name!r}")
    from pagewise import llm

    return getattr(llm, name)
