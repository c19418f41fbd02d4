"""The options of the scheduler about what gateways may do with more than their own requests."""

from typing import Annotated

from pagewise_shared.config.console_options import ConsoleShowsText
from pagewise_shared.config.kinds import described
from pagewise_shared.config.lora_options import AllowRuntimeLoraUpdating, LoraModules
from pagewise_shared.config.observability_options import TracingOptions


class GatewayRights(TracingOptions, frozen=True, kw_only=True):
    """Rights of gateways, which are off by default: a gateway faces the clients, and its key may be stolen.

    It has the options of traces as its base because a struct of msgspec can have one base with fields only.
    """

    console_shows_text: ConsoleShowsText = False
    gateways_end_any_request: Annotated[
        bool,
        described(
            "let each gateway's operators end requests of all gateways",
            more="Without it, a gateway ends its own requests only. `pagewise serve` and `pagewise up` set it, because "
            "they start all gateways, unless others may join (`--listen-gateways`).",
        ),
    ] = False
    lora_modules: LoraModules = ()
    allow_runtime_lora_updating: AllowRuntimeLoraUpdating = False
