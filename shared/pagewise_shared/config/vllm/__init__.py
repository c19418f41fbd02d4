"""The options of ``vllm serve``: what each is here, or why it is not there.

One list of them is what the command lines understand, what ``LLM`` takes, and the table of ``docs/vllm-flags.md``.
"""

from pagewise_shared.config.vllm.accepted import ACCEPTED
from pagewise_shared.config.vllm.kinds import Flag
from pagewise_shared.config.vllm.refused import REFUSED

VERSION = "0.33.0"
"""The release of vLLM whose options these are. Some that older releases had are among them."""

FLAGS: tuple[Flag, ...] = (*ACCEPTED, *REFUSED)

__all__ = ["FLAGS", "VERSION", "Flag"]
