"""The options of LoRA adapters, by vLLM's names; ``docs/lora.md`` describes their use."""

from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from pagewise_shared.config.kinds import Positive, described
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import NO_ADAPTERS, AdapterCapacity

if TYPE_CHECKING:
    from pagewise_shared.config.options import ExecutorConfig, GatewayConfig, SchedulerConfig

MAX_LORAS = 1024
"""The most slots for adapters on one executor."""
MAX_LORA_RANK = 512

SERVE_ADAPTER = "--enable-lora --lora-modules NAME={}"
"""The options by which the adapter in a folder is served."""

EnableLora = Annotated[bool, described("serve LoRA adapters of the model")]
LoraModules = Annotated[
    tuple[str, ...],
    described(
        "adapters to serve: their names for clients, and their folders or hub ids",
        "NAME=PATH",
        "Executors read them from the same paths ([lora.md](lora.md)). The scheduler needs the same list: it takes no "
        "other adapters from gateways, unless `--allow-runtime-lora-updating` is given to it.",
    ),
]
AllowRuntimeLoraUpdating = Annotated[
    bool,
    described(
        "let operators load and unload adapters while the server runs",
        more="Then every client with an operator's API key, or every client if there are no keys, can have any folder "
        "that executors see, or any hub id, loaded as an adapter. The gateway and the scheduler both need this option: "
        "without it, the scheduler lets no gateway load adapters.",
    ),
]
MaxLoraRank = Annotated[int, Meta(ge=1, le=MAX_LORA_RANK), described("greatest rank of an adapter", "N")]
MaxLoras = Annotated[
    int, Meta(ge=1, le=MAX_LORAS), described("adapters on the device at a time: the most that a batch mixes", "N")
]
MaxCpuLoras = Annotated[Positive | None, described("adapters kept in host memory (default: --max-loras)", "N")]


def check_adapters(values: dict[str, object], *, loads: bool) -> None:
    """Check the values of these options together. ``loads``: the command has ``--enable-lora``.

    Raises:
        ConfigError: they contradict each other, or a module is not NAME=PATH; the text names the option.
    """
    slots, on_host = values.get("max_loras", 1), values.get("max_cpu_loras")
    if isinstance(slots, int) and isinstance(on_host, int) and on_host < slots:
        raise ConfigError(
            f"--max-cpu-loras {on_host} is less than --max-loras {slots}: what is on the device is kept on the host"
        )
    if values.get("deterministic") and values.get("enable_lora"):
        raise ConfigError("--deterministic: not with --enable-lora, whose sums depend on the batch")
    modules = values.get("lora_modules", ())
    assert isinstance(modules, tuple)
    if modules and loads and not values.get("enable_lora"):
        raise ConfigError("--lora-modules needs --enable-lora")
    _named_modules(modules)


def adapter_capacity(config: "ExecutorConfig") -> AdapterCapacity:
    """Return which adapters an executor can serve."""
    return AdapterCapacity(config.max_loras, config.max_lora_rank) if config.enable_lora else NO_ADAPTERS


class AdapterRights(NamedTuple):
    """Which adapters a service may have served: ``modules`` (paths by name), and any if ``updating``."""

    modules: dict[str, str]
    updating: bool


def adapter_rights(config: "GatewayConfig | SchedulerConfig") -> AdapterRights:
    """Return which adapters a gateway may ask for, or a scheduler takes from gateways."""
    return AdapterRights(_named_modules(config.lora_modules), config.allow_runtime_lora_updating)


def max_adapter_rank(config: "GatewayConfig") -> int:
    """Return the greatest rank of adapters that a gateway serves; 0: it serves none."""
    return config.max_lora_rank if config.enable_lora else 0


def _named_modules(modules: tuple[str, ...]) -> dict[str, str]:
    """Return the paths of ``--lora-modules`` by name.

    Raises:
        ConfigError: one is not NAME=PATH, or two have one name.
    """
    found: dict[str, str] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if not name or not path:
            raise ConfigError(f"--lora-modules: {module!r} is not NAME=PATH")
        if name in found:
            raise ConfigError(f"--lora-modules: two adapters are called {name!r}")
        found[name] = path
    return found
