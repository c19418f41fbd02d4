"""The configurations of families of Llama's structure, which are read without transformers.

Importing transformers' models takes half of the CPU time of an executor's start, most of it for modules that no server
needs, such as compilers (``docs/performance.md`` has the numbers). So a checkpoint whose config.json can be read here
is loaded without it. Nothing is guessed: each family is a struct of the keys that change results. If config.json has
another key, or an unknown value, transformers loads the checkpoint.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch

from pagewise_executor.models.config_checks import MOST_LAYERS

Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class NotReadableError(Exception):
    """A checkpoint cannot be loaded without transformers."""


class DefaultRope(msgspec.Struct, kw_only=True, tag_field="rope_type", tag="default", forbid_unknown_fields=True):
    """Rotary position embeddings as Su et al. defined them (RoFormer, 2021)."""

    rope_theta: Positive = 10_000.0

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the angle by which each pair of a head's dimensions turns per position: float32 [head_dim / 2]."""
        return 1.0 / (self.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


class LinearRope(DefaultRope, kw_only=True, tag="linear", forbid_unknown_fields=True):
    """The same for contexts that are ``factor`` times as long: positions are divided by ``factor``."""

    factor: Positive

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the angles per position float32 [head_dim / 2]."""
        return super().frequencies(head_dim) / self.factor


class Llama3Rope(DefaultRope, kw_only=True, tag="llama3", forbid_unknown_fields=True):
    """The same as Llama 3.1 has it: slow pairs turn ``factor`` times slower, fast ones as before, others in between."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the angles per position float32 [head_dim / 2]."""
        plain = super().frequencies(head_dim)
        wavelengths = 2 * torch.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        length = self.original_max_position_embeddings
        scaled = torch.where(wavelengths > length / low, plain / self.factor, plain)
        smooth = (length / wavelengths - low) / (high - low)
        between = (wavelengths >= length / high) & (wavelengths <= length / low)
        return torch.where(between, (1 - smooth) * scaled / self.factor + smooth * scaled, scaled)


class LlamaConfig(msgspec.Struct, kw_only=True, tag_field="model_type", forbid_unknown_fields=True):
    """The keys of config.json that all families of Llama's structure have, by their names there.

    A family derives from it, with its name as the tag, its architecture, and its own keys.

    ``own_dtype``: the type that the checkpoint names, of quantised ones for the weights that are not quantised.
    ``head_norm``: queries and keys have an RMSNorm by head. ``qkv_bias``: the projections to Q, K and V have a bias.
    """

    # Some families have these as keys of config.json, others always.
    head_norm: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False
    sliding_window: ClassVar[int | None] = None

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
    num_attention_heads: Count
    num_key_value_heads: Count
    max_position_embeddings: Count
    rms_norm_eps: Positive
    tie_word_embeddings: bool
    hidden_act: Literal["silu"]
    rope_parameters: DefaultRope | LinearRope | Llama3Rope = msgspec.field(default_factory=DefaultRope)
    head_dim: Count | None = None
    own_dtype: Any = None

    def __post_init__(self) -> None:
        """Refuse sizes that transformers refuses, which then reports them, and complete ``head_dim``."""
        if self.hidden_size % self.num_attention_heads or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("its heads are of unequal size")
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def dtype(self) -> torch.dtype | None:
        """The type that the checkpoint names; None: models do not compute in it."""
        return getattr(torch, self.own_dtype) if self.own_dtype in ("float32", "bfloat16", "float16") else None

    @property
    def windows(self) -> list[int | None]:
        """The length of each layer's sliding window, None for full attention."""
        return [self.sliding_window] * self.num_hidden_layers

    def get_text_config(self, *, decoder: bool) -> "LlamaConfig":
        """Return the part for the language model, which is the whole, as configurations of transformers do."""
        return self

    def decoder_layer(self, layer_idx: int, sliding_window: int | None) -> torch.nn.Module:
        """Return a layer whose weights have no data. A family whose layers have other weights overrides it."""
        from pagewise_executor.models.llama import LlamaDecoderLayer

        return LlamaDecoderLayer(self, layer_idx, sliding_window)


class Llama(LlamaConfig, kw_only=True, tag="llama", forbid_unknown_fields=True):
    """Llama."""

    architectures: tuple[Literal["LlamaForCausalLM"]]
    attention_bias: bool = False  # type: ignore[misc] # it hides the field of the class
    mlp_bias: bool = False  # type: ignore[misc]


class Mistral(LlamaConfig, kw_only=True, tag="mistral", forbid_unknown_fields=True):
    """Mistral. ``sliding_window`` is required, because transformers completes a window of its own."""

    architectures: tuple[Literal["MistralForCausalLM"]]
    sliding_window: Count | None  # type: ignore[misc]


class Qwen2(LlamaConfig, kw_only=True, tag="qwen2", forbid_unknown_fields=True):
    """Qwen2, of which some layers may have a window."""

    qkv_bias: ClassVar[bool] = True

    architectures: tuple[Literal["Qwen2ForCausalLM"]]
    sliding_window: Count | None = None  # type: ignore[misc]
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None

    def __post_init__(self) -> None:
        """Refuse windows that contradict the layers, as well."""
        super().__post_init__()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("it has layer_types for another number of layers")
        if self.use_sliding_window and self.sliding_window is None:
            raise ValueError("it does not say how long its sliding windows are")

    @property
    def windows(self) -> list[int | None]:
        """The length of each layer's sliding window, None for full attention."""
        layers = range(self.num_hidden_layers)
        types = self.layer_types or ["sliding_attention" if n >= self.max_window_layers else "" for n in layers]
        window = self.sliding_window if self.use_sliding_window else None
        return [window if kind == "sliding_attention" else None for kind in types]


class Qwen3(Qwen2, kw_only=True, tag="qwen3", forbid_unknown_fields=True):
    """Qwen3."""

    head_norm: ClassVar[bool] = True
    qkv_bias: ClassVar[bool] = False

    architectures: tuple[Literal["Qwen3ForCausalLM"]]  # type: ignore[assignment]
    head_dim: Count
    attention_bias: bool = False  # type: ignore[misc]
