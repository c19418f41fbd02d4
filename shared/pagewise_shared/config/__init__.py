"""Configuration: the one place that reads options and ``PAGEWISE_*`` environment variables.

A configuration is a frozen struct whose fields are the options: ``max_num_seqs`` is ``--max-num-seqs`` on the
command line and ``PAGEWISE_MAX_NUM_SEQS`` in the environment, in that order of precedence. The same option has
the same name, meaning and default in every command. A secret is read from the environment only, because all users of
a machine can see command lines.
"""

from pagewise_shared.config.checks import parse_size, size_text
from pagewise_shared.config.kv_events import KVEventsConfig, parse_kv_events
from pagewise_shared.config.options import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_NUM_SEQS,
    DEMO_MODEL,
    Device,
    ExecutorConfig,
    GatewayConfig,
    GatewaysConfig,
    SchedulerConfig,
    ServeConfig,
    UpConfig,
)
from pagewise_shared.config.reading import (
    VARIABLE_PREFIX,
    Option,
    build_config,
    misspelt_variables,
    options_of,
    parse_config,
    secret_variables,
    to_argv,
)
from pagewise_shared.config.speculative import DraftModelConfig, SpeculativeConfig, parse_speculative, prompt_lookup

__all__ = [
    "DEFAULT_BATCHED_TOKENS",
    "DEFAULT_NUM_SEQS",
    "DEMO_MODEL",
    "VARIABLE_PREFIX",
    "Device",
    "DraftModelConfig",
    "ExecutorConfig",
    "GatewayConfig",
    "GatewaysConfig",
    "KVEventsConfig",
    "Option",
    "SchedulerConfig",
    "ServeConfig",
    "SpeculativeConfig",
    "UpConfig",
    "build_config",
    "misspelt_variables",
    "options_of",
    "parse_config",
    "parse_kv_events",
    "parse_size",
    "parse_speculative",
    "prompt_lookup",
    "secret_variables",
    "size_text",
    "to_argv",
]
