"""Turns prompts and conversations into token ids."""

from array import array

from pagewise_gateway.generation import Capacity
from pagewise_gateway.http.context import Service
from pagewise_gateway.http.errors import ContextLengthError, InvalidRequestError
from pagewise_gateway.http.schema import ChatRequest, CompletionRequest, TokenizeRequest
from pagewise_gateway.text.errors import ChatTemplateError

MAX_PROMPTS = 2048


def check_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Return the request's prompts: one text, one list of token ids, or several of either.

    Raises:
        InvalidRequestError: token ids and prompts are mixed in one list, a prompt is empty, or there are too many.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [prompt]  # type: ignore[list-item]
    elif any(isinstance(item, int) for item in prompt):
        raise InvalidRequestError("prompt: token ids and prompts are mixed in one list", "prompt")
    else:
        prompts = prompt  # type: ignore[assignment]
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt must not be empty", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"{len(prompts)} prompts are too many: at most {MAX_PROMPTS}", "prompt")
    return prompts


async def encode_prompt(
    service: Service, prompt: str | list[int], body: CompletionRequest, capacity: Capacity
) -> "array[int]":
    """Return the token ids (int32) of one of the request's prompts.

    Raises:
        InvalidRequestError: the prompt has no tokens, or ids outside the vocabulary.
        ContextLengthError: the text is so long that it cannot fit, however it is tokenized.
    """
    if isinstance(prompt, str):
        if body.truncate_prompt_tokens is None:
            check_text_length(service, prompt, capacity, "prompt")
        tokens = await service.encode(prompt, body.add_special_tokens is not False)
        if not tokens:
            raise InvalidRequestError("prompt has no tokens", "prompt")
        return tokens
    for token in prompt:
        if token >= capacity.vocab_size:
            raise InvalidRequestError(
                f"prompt: token id {token} is outside the vocabulary of {capacity.vocab_size}", "prompt"
            )
    return array("i", prompt)


async def encode_chat(service: Service, body: ChatRequest | TokenizeRequest, capacity: Capacity | None) -> "array[int]":
    """Return the token ids (int32) of a conversation, rendered with the model's chat template.

    Raises:
        InvalidRequestError: the conversation cannot be rendered, or has no tokens.
        ContextLengthError: as in ``encode_prompt``.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot be used together", "continue_final_message"
        )
    messages = [
        {"role": message.role, "content": _content(message.content)}
        | ({"name": message.name} if message.name is not None else {})
        for message in body.messages or ()
    ]
    add_prompt = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    try:
        text = service.tokenizer.render_chat(
            messages,
            add_generation_prompt=add_prompt,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs,
        )
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error), "messages") from error
    if capacity is not None and isinstance(body, ChatRequest) and body.truncate_prompt_tokens is None:
        check_text_length(service, text, capacity, "messages")
    # Chat templates contain the special tokens.
    tokens = await service.encode(text, bool(body.add_special_tokens))
    if not tokens:
        raise InvalidRequestError("the messages render to an empty prompt", "messages")
    return tokens


def check_text_length(service: Service, text: str, capacity: Capacity, param: str) -> None:
    """Refuse a text that would not fit even if all its tokens were as long as the longest one of the vocabulary.

    Raises:
        ContextLengthError: the text is that long.
    """
    if len(text) > (capacity.max_model_len + 1) * service.tokenizer.longest_token:
        raise ContextLengthError(
            f"This model's maximum context length is {capacity.max_model_len} tokens; "
            f"a text of {len(text)} characters has more",
            param,
        )


def _content(content: object) -> object:
    if isinstance(content, list):
        return [{"type": "text", "text": part.text} for part in content]
    return content
