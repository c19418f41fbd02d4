"""The class ``LLM``: a model for scripts and notebooks, by vLLM's names; ``docs/python.md`` tells how it is used."""

from pagewise.llm.llm import LLM
from pagewise.llm.outputs import CompletionOutput, LLMError, Logprob, RequestOutput
from pagewise.llm.sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "LLMError", "Logprob", "RequestOutput", "SamplingParams"]
