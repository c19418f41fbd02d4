"""``LLM``: starts the services on this machine, generates with them, and ends them."""

import difflib
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pagewise_shared.config import DEMO_MODEL, ServeConfig, build_config, options_of
from pagewise_shared.config.vllm import options_from
from pagewise_shared.generation_config import read_generation_config
from pagewise_shared.model_files import resolve_model, untyped_special_tokens
from tqdm.auto import tqdm

from pagewise.llm.client import Client
from pagewise.llm.server import Server
from pagewise.llm.types import LLMError, RequestOutput, SamplingParams, request_output

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or one of them as ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``, with a ``cache_salt``."""

_PER_EXECUTOR = 1024
"""Requests that are sent at the same time: as many as the largest batch of an executor."""
_FIXED: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "api_keys_file": None,
}
"""The server is for this process alone, whatever the environment variables are."""


class LLM:
    """A model that this machine serves to this process alone.

    ``model`` and ``options`` are the options of ``pagewise serve``, with underscores (``kv_memory="4GiB"``), and
    default to the same environment variables. The constructor returns when the model is ready. The services end with
    ``close()``, at the end of a ``with``, when the object is garbage, and with this process. All methods may be called
    from several threads, and beside a running event loop. Do not use the object after a fork.

    Raises:
        ConfigError: an option is unusable.
        LLMError: the services cannot start.
    """

    def __init__(self, model: str = DEMO_MODEL, **options: object) -> None:
        given = options_from({"log_level": "warning", "model": model} | options, options_of(ServeConfig).keys())
        _check_names(given)
        given |= _FIXED
        config = build_config(ServeConfig, given, os.environ)
        self._gateway = config.gateway
        self._defaults: SamplingParams | None = None
        self._decoded: dict[int, str] = {}
        self._tokenizer: Any = None
        self._server = Server(given)
        self._max_waiting = config.scheduler.max_waiting
        at_once = min(_PER_EXECUTOR * max(1, config.executors), self._max_waiting)
        try:
            self._client = Client(self._server.url, self._server.api_key, at_once)
        except BaseException:
            self._server.close()
            raise
        self._finalizer = weakref.finalize(self, _close, self._client, self._server, os.getpid())

    @property
    def url(self) -> str:
        """The address of the server, for other clients. They need ``api_key``."""
        return self._server.url

    @property
    def api_key(self) -> str:
        """The API key of the server, which only this process knows."""
        return self._server.api_key

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters: the model's, which the option ``generation_config`` selects."""
        if self._defaults is None:
            path = resolve_model(self._gateway.model, self._gateway.revision, tokenizer_only=True)
            given = read_generation_config(self._gateway, path).defaults.values()
            if "max_new_tokens" in given:
                given["max_tokens"] = given.pop("max_new_tokens")
            self._defaults = msgspec.convert(given, SamplingParams)
        return self._defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        model: str | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at the same time, and return their outputs in the same order.

        ``sampling_params``: for all prompts, or one for each; None: the model's. ``use_tqdm``: whether a terminal or a
        notebook shows a progress bar. ``model``: the name of an adapter. ``priority``: of each prompt; lower runs
        earlier.

        Raises:
            LLMError: a request was refused, or the services have ended.
            TypeError, ValueError: a prompt is of a kind that there is not, or lists differ in length.
        """
        given = _listed(prompts)
        return self._complete([_fields_of(prompt) for prompt in given], sampling_params, use_tqdm, model, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        model: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue one conversation or several. Outputs have the model's raw text: no tool call or reasoning is parsed.

        The last four parameters are for the model's chat template; all others, and errors, are as for ``generate``.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        rendering = {
            "model": model,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message or None,
        }
        common = _given(**rendering)
        bodies = [common | {"messages": list(conversation)} for conversation in conversations]
        rendered = self._post_all("/v1/chat/completions/render", bodies)
        fields = [{"prompt": one["prompt_token_ids"], "_text": one["prompt"]} for one in rendered]
        return self._complete(fields, sampling_params, use_tqdm, model, None)

    def close(self) -> None:
        """End the services. Further calls fail; closing twice does nothing."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _complete(
        self,
        prompts: list[dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        model: str | None,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = _each(
            sampling_params or self.get_default_sampling_params(), SamplingParams, len(prompts), "sampling_params"
        )
        if (most := max((one.n for one in params), default=1)) > self._max_waiting:
            # The server would refuse it forever, also with an empty queue.
            raise LLMError(f"n={most}: at most max_waiting={self._max_waiting} sequences may wait")
        texts = [prompt.pop("_text", prompt["prompt"]) for prompt in prompts]
        common = _given(return_token_ids=True, model=model)
        priorities = _each(priority or None, type(None), len(prompts), "priority")
        bodies = [
            one.body() | prompt | common | _given(priority=value)
            for prompt, one, value in zip(prompts, params, priorities, strict=True)
        ]
        answers = self._post_all("/v1/completions", bodies, shown=use_tqdm)
        return [
            request_output(text if isinstance(text, str) else None, answer, one.logprobs, self._decode)
            for text, answer, one in zip(texts, answers, params, strict=True)
        ]

    def _post_all(self, path: str, bodies: list[dict[str, Any]], *, shown: bool = False) -> list[Any]:
        """Post requests, and return the answers. ``shown``: by a bar, on a terminal or in a notebook."""
        if not self._finalizer.alive:
            raise LLMError("this LLM is closed")
        hidden = not shown or not ("ipykernel" in sys.modules or sys.stderr.isatty())
        try:
            with tqdm(total=len(bodies), unit="prompt", dynamic_ncols=True, disable=hidden) as bar:
                return self._client.post_all(path, bodies, bar.update)
        except OSError as error:
            code = self._server.exit_code
            ended = "" if code is None else f": they have ended with exit code {code}"
            lines = self._server.last_lines()
            raise LLMError(f"the services do not answer{ended}. Their last log lines:\n{lines}") from error

    def _decode(self, token: int) -> str:
        """Return the text of a token. The tokenizer is read when it is first needed."""
        if token not in self._decoded:
            if self._tokenizer is None:
                from transformers import PreTrainedTokenizerFast

                path = resolve_model(self._gateway.model, self._gateway.revision, tokenizer_only=True)
                read = PreTrainedTokenizerFast.from_pretrained(  # nosec B615 # a directory
                    path, local_files_only=True, **untyped_special_tokens(path)
                )
                self._tokenizer = read.backend_tokenizer
            text: str = self._tokenizer.decode([token], skip_special_tokens=False)
            # SentencePiece drops the space at the beginning of a text.
            begins = (self._tokenizer.id_to_token(token) or "").startswith("▁") and not text.startswith(" ")
            self._decoded[token] = f" {text}" if begins else text
        return self._decoded[token]


def _close(client: Client, server: Server, owner: int) -> None:
    """End the client and the server of an ``LLM``, unless this is a fork of the process that made it."""
    if os.getpid() != owner:
        return

    def end() -> None:
        client.close()
        server.close()

    # The garbage collector runs on any thread. These two threads cannot wait for their own end.
    if client.owns_thread() or server.owns_thread():
        threading.Thread(target=end, name="pagewise-close").start()
    else:
        end()


def _check_names(options: Mapping[str, Any]) -> None:
    """Check that these are names of options.

    Raises:
        TypeError: one is not; the text names the nearest one.
    """
    known = options_of(ServeConfig).keys()
    for name in options:
        if name in _FIXED or name == "api_keys":
            raise TypeError(f"LLM takes no {name}: its server is for this process alone; pagewise serve is for others")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise TypeError(f"LLM has no option {name!r}" + (f": did you mean {near[0]}?" if near else ""))


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return prompts as a list, also a single one: a text, a mapping, or token ids."""
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _fields_of(prompt: Prompt) -> dict[str, Any]:
    if not isinstance(prompt, Mapping):
        return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    known = {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown := sorted(prompt.keys() - known):
        raise ValueError(f"a prompt has {unknown[0]!r}; there are only {', '.join(sorted(known))}: models take text")
    given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
    if given is None:
        raise ValueError("a prompt needs prompt or prompt_token_ids")
    text = {"_text": prompt["prompt"]} if "prompt" in prompt and "prompt_token_ids" in prompt else {}
    salt = {"cache_salt": prompt["cache_salt"]} if prompt.get("cache_salt") else {}
    return {"prompt": given if isinstance(given, str) else list(given)} | text | salt


def _each(given: Any, kind: type, count: int, name: str) -> list[Any]:
    values = [given] * count if isinstance(given, kind) else list(given)
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} values for {count} prompts")
    return values


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
