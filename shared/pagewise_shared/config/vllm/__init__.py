"""The options of ``vllm serve``: what each is here, or why it is not there.

One list of them is what the command lines understand, what ``LLM`` takes, and the table of ``docs/vllm-flags.md``.
"""

from pagewise_shared.config.vllm.accepted import ACCEPTED
from pagewise_shared.config.vllm.kinds import Flag
from pagewise_shared.config.vllm.refused import REFUSED

VERSION = "0.33.0"
"""The release of vLLM whose options these are. Some that older releases had are among them."""

FLAGS: tuple[Flag, ...] = (*ACCEPTED, *REFUSED)

_SAME = (
    "--model --revision --served-model-name --trust-remote-code --dtype --max-model-len --quantization --block-size "
    "--gpu-memory-utilization --max-num-seqs --max-num-batched-tokens --speculative-config --enable-lora "
    "--lora-modules --max-loras --max-lora-rank --max-cpu-loras --host --port --ssl-certfile --ssl-keyfile "
    "--enable-auto-tool-choice --tool-call-parser --reasoning-parser --default-chat-template-kwargs "
    "--shutdown-timeout --log-level --otlp-traces-endpoint"
)
SAME = tuple(_SAME.split())
"""Options that have the same name and the same meaning here. ``ACCEPTED`` has those that take more values there."""

__all__ = ["FLAGS", "SAME", "VERSION", "Flag"]
