"""The class ``LLM``: a model for scripts and notebooks, with vLLM's names; see ``docs/python.md``."""

from pagewise.llm.llm import LLM
from pagewise.llm.types import CompletionOutput, LLMError, Logprob, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "LLMError", "Logprob", "RequestOutput", "SamplingParams"]
