"""The KV and the states of hybrid models at their real sizes, from the values that their configurations publish.

Qwen3-Next and Qwen3.5-35B-A3B: the defaults of ``Qwen3NextConfig`` and ``Qwen3_5MoeTextConfig`` of transformers 5.23.
Nemotron 3 Nano: the values of its published configuration (the defaults of ``NemotronHConfig`` have four layers).
Recurrent states are FP32, as these models compute them; convolutions keep their last three inputs in bf16.
"""

from typing import Any, NamedTuple

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import ArenaShape, WindowShape
from pagewise_scheduler.replay.costs import modelled
from pagewise_scheduler.server.executor_handle import MAX_STEPS_IN_FLIGHT

BLOCK_SIZE = 16
STEP_TOKENS = 2048


class Model(NamedTuple):
    """``layers``: of attention, of states. ``kv_heads``, ``head_dim``: of attention. ``state``: FP32 values of the
    recurrent state of a layer. ``channels``: of its convolution, which has ``kernel`` taps. ``parameters``: active
    ones, from which the cost of a token is modelled."""

    layers: tuple[int, int]
    kv_heads: int
    head_dim: int
    heads: int
    state: int
    channels: int
    parameters: float
    kernel: int = 4

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV of a token."""
        return self.layers[0] * 2 * self.kv_heads * self.head_dim * 2

    @property
    def state_bytes(self) -> int:
        """Bytes of a snapshot."""
        return self.layers[1] * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of the states of a layer."""
        return self.state * 4 + self.channels * (self.kernel - 1) * 2

    @property
    def align(self) -> int:
        """Tokens of a block of vLLM: the KV of as many tokens in one layer takes at least the states of one layer."""
        each = 2 * self.kv_heads * self.head_dim * 2 * BLOCK_SIZE
        return -(-self.layer_bytes // each) * BLOCK_SIZE

    def scheduler(self, num_bytes: int, **options: Any) -> Scheduler:
        """A scheduler whose executor has ``num_bytes`` bytes. A page has the KV of a block."""
        page = self.kv_bytes * BLOCK_SIZE
        states = WindowShape(2, -(-self.state_bytes // page), state=True)
        shape = ArenaShape(num_bytes // page, 1, (states,), MAX_STEPS_IN_FLIGHT * STEP_TOKENS)
        costs = modelled(
            parameters=self.parameters,
            layers=self.layers[0],
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=BLOCK_SIZE,
            flops=400e12,
            memory_bandwidth=4e12,
            link_bandwidth=50e9,
        )
        return Scheduler(
            num_blocks=shape.num_pages,
            block_size=BLOCK_SIZE,
            max_num_seqs=1,
            max_num_batched_tokens=STEP_TOKENS,
            shape=shape,
            costs=costs.prefill,
            **options,
        )


MODELS = {
    # 32 heads of 128 x 128; channels: keys and queries of 16 heads, values of 32.
    "Qwen3-Next-80B-A3B": Model((12, 36), 2, 256, 16, 32 * 128 * 128, (2 * 16 + 32) * 128, 3e9),
    "Qwen3.5-35B-A3B": Model((10, 30), 2, 256, 16, 32 * 128 * 128, (2 * 16 + 32) * 128, 3e9),
    # 64 heads of 64 x 128; channels: the heads, and B and C of 8 groups.
    "Nemotron-3-Nano-30B-A3B": Model((6, 23), 2, 128, 32, 64 * 64 * 128, 64 * 64 + 2 * 8 * 128, 3.5e9),
}
