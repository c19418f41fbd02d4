"""Adds the draft model that an option asks for to the model that it drafts for."""

import logging

from pagewise_shared.config import DraftModelConfig, ExecutorConfig
from pagewise_shared.errors import ModelError

from pagewise_executor.models.eagle3 import load_head
from pagewise_executor.models.loader import LoadedModel, errors_of_loading
from pagewise_executor.models.mtp import MtpLayer, draft_model_config

log = logging.getLogger(__name__)

_NO_SEGMENTS = "the KV of its draft model cannot be moved: it depends on the token behind each token"


def add_draft_model(config: ExecutorConfig, loaded: LoadedModel) -> None:
    """Let the model ``loaded`` have the draft model that the option asks for, if it asks for one.

    Raises:
        ModelError: it cannot be read, or does not fit the model.
    """
    wanted = draft_model_config(config)
    if wanted is None:
        return
    try:
        with errors_of_loading(wanted.model or config.model, loaded.device):
            _add(config, wanted, loaded)
    except ModelError as error:
        raise ModelError(f"--speculative-config: {error}") from error
    loaded.rotations, loaded.no_segments = [], _NO_SEGMENTS
    log.info("drafts of up to %d tokens by %s", wanted.num_speculative_tokens, wanted.model or "the MTP layer")


def _add(config: ExecutorConfig, wanted: DraftModelConfig, loaded: LoadedModel) -> None:
    if wanted.method == "mtp":
        loaded.draft = MtpLayer(wanted, loaded.model, loaded.attention[-1])
        loaded.fingerprint += "-mtp"
    else:
        loaded.draft = head = load_head(config, wanted, loaded)
        if loaded.recurrent and head.shape.kv_shape != loaded.shapes[0]:
            raise ModelError(f"{wanted.model} has K and V of another shape than the model, which has recurrent layers")
        loaded.sources = [*(loaded.sources or range(len(loaded.layers))), len(loaded.layers)]
        loaded.attention, loaded.layers = [*loaded.attention, head.attention], [*loaded.layers, head.shape]
        loaded.fingerprint += head.fingerprint
