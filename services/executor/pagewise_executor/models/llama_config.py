"""Reads config.json of Llama's structure, without transformers: only where everything it says is understood here.

Importing transformers' models takes longer than the rest of an executor's start: half of its CPU time, most of it for
what no server needs, such as compilers (``docs/performance.md`` has the numbers). So a checkpoint that this module can
read is loaded without it. Nothing is guessed: if config.json has a key that is not known here, or a value that would
change the computation, transformers loads the checkpoint.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
_OWN = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window"},
    "qwen2": _WINDOWS,
    "qwen3": {"attention_bias", *_WINDOWS},
}
"""Keys that the configuration of some of these families has and that of others has not."""
_IRRELEVANT = {
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "pad_token_id",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
}
"""Keys that do not change what is computed: ``--dtype`` says the type, the gateway knows which tokens end a text."""
_READ_ELSEWHERE = {"quantization_config", "compression_config"}
"""What they say is read by ``quantised_checkpoint.py``."""
_USUAL = {"pretraining_tp": 1, "rope_interleaved": False, "use_mrope": False}
"""Keys that change nothing as long as they have this value."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class NotReadableError(Exception):
    """A checkpoint is not one that is loaded without transformers; the text says why."""


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
        """See ``DefaultRope``."""
        return super().frequencies(head_dim) / self.factor


class Llama3Rope(DefaultRope, kw_only=True, tag="llama3", forbid_unknown_fields=True):
    """The same as Llama 3.1 has it: slow pairs turn ``factor`` times slower, fast ones as before, others in between."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """See ``DefaultRope``."""
        plain = super().frequencies(head_dim)
        wavelengths = 2 * torch.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        length = self.original_max_position_embeddings
        scaled = torch.where(wavelengths > length / low, plain / self.factor, plain)
        smooth = (length / wavelengths - low) / (high - low)
        between = (wavelengths >= length / high) & (wavelengths <= length / low)
        return torch.where(between, (1 - smooth) * scaled / self.factor + smooth * scaled, scaled)


Rope = DefaultRope | LinearRope | Llama3Rope


class LlamaConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The shape of a decoder of Llama's structure. Names are those of config.json."""

    architectures: tuple[str, ...]
    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    hidden_act: Literal["silu"]
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    max_position_embeddings: Count
    rms_norm_eps: Positive
    tie_word_embeddings: bool
    rope_parameters: Rope = msgspec.field(default_factory=DefaultRope)
    head_dim: Count | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Count | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    own_dtype: Literal["float32", "bfloat16", "float16"] | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """The type that the checkpoint says it is in; quantised ones mean what is not quantised."""
        return None if self.own_dtype is None else getattr(torch, self.own_dtype)

    @property
    def windows(self) -> list[int | None]:
        """The length of each layer's sliding window, None for full attention."""
        layers = range(self.num_hidden_layers)
        if self.model_type in ("llama", "mistral"):
            return [self.sliding_window for _ in layers]
        if not self.use_sliding_window:
            return [None for _ in layers]
        types = self.layer_types or ["sliding_attention" if n >= self.max_window_layers else "" for n in layers]
        return [self.sliding_window if kind == "sliding_attention" else None for kind in types]


def read_llama_config(path: Path) -> LlamaConfig:
    """Read config.json in the folder ``path``.

    Raises:
        NotReadableError: something in it is not known here.
    """
    try:
        settings = msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NotReadableError(f"config.json cannot be read: {error}") from error
    if (path / "adapter_config.json").exists():
        raise NotReadableError("it has an adapter")
    family = str(settings.get("model_type"))
    if family not in _CLASSES or settings.get("architectures") != [_CLASSES[family]]:
        raise NotReadableError(f"its architecture is {settings.get('architectures')}")
    for key, usual in _USUAL.items():
        if settings.pop(key, usual) not in (usual, None):
            raise NotReadableError(f"config.json sets {key}")
    relevant = {key: value for key, value in settings.items() if key not in _IRRELEVANT | _READ_ELSEWHERE}
    if foreign := relevant.keys() & set().union(*_OWN.values()) - _OWN[family]:
        raise NotReadableError(f"config.json sets {min(foreign)}")
    if family == "mistral" and "sliding_window" not in relevant:
        raise NotReadableError("config.json does not say whether it has a sliding window")
    _join_rope(relevant)
    dtype = settings.get("dtype") or settings.get("torch_dtype")
    relevant["own_dtype"] = dtype if dtype in ("float32", "bfloat16", "float16") else None
    try:
        config = msgspec.convert(relevant, LlamaConfig)
    except msgspec.ValidationError as error:
        raise NotReadableError(f"config.json: {error}") from error
    _check(config)
    if config.head_dim is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def _join_rope(settings: dict[str, Any]) -> None:
    """Bring what files of transformers 4 say about RoPE, in two keys, into the form of transformers 5."""
    theta, scaling = settings.pop("rope_theta", None), settings.pop("rope_scaling", None)
    found = scaling or settings.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise NotReadableError(f"config.json: RoPE is described by {found!r}")
    rope = dict(found)
    kind = rope.pop("type", "default")
    rope.setdefault("rope_type", kind)
    if theta is not None:
        rope.setdefault("rope_theta", theta)
    settings["rope_parameters"] = rope


def _check(config: LlamaConfig) -> None:
    """Leave to transformers what it would refuse, or what it would complete by defaults of its own."""
    if config.hidden_size % config.num_attention_heads or config.num_attention_heads % config.num_key_value_heads:
        raise NotReadableError("its heads are of unequal size")
    if config.model_type == "qwen3" and config.head_dim is None:
        raise NotReadableError("config.json does not say head_dim")
    if config.layer_types is not None and len(config.layer_types) != config.num_hidden_layers:
        raise NotReadableError("config.json has layer_types for another number of layers")
    if config.use_sliding_window and config.sliding_window is None:
        raise NotReadableError("config.json does not say how long its sliding windows are")
