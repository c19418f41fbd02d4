"""``pagewise chat``: a conversation with a served model, in a terminal."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pagewise.client import UnreachableError, add_url, connect, events, get

_TIMEOUT = 600.0
"""Seconds that a token may take: a request may wait in a queue, or for an executor that starts."""


def chat(arguments: Sequence[str]) -> int:
    """Read turns from standard input and print the answers; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="pagewise chat",
        description="Talk to a model that is served. A line is a turn; the answer is streamed, and the whole "
        "conversation is sent with the next turn. Ctrl-C ends an answer, Ctrl-D the conversation.",
    )
    add_url(parser)
    parser.add_argument("--model", help="name of the model or adapter (default: the first of /v1/models)")
    parser.add_argument("--system", help="text of a system message")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer (default: what the server allows)")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token (default: the model's)")
    options = parser.parse_args(arguments)
    model = options.model or get(options.url, "/v1/models")["data"][0]["id"]
    asked = {"model": model, "max_tokens": options.max_tokens, "temperature": options.temperature}
    asked = {name: value for name, value in asked.items() if value is not None}
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        import readline  # noqa: F401  # edits the line that is typed

        print(f"{model} at {options.url}; Ctrl-D ends the conversation.")
    messages = [{"role": "system", "content": options.system}] if options.system else []
    while (turn := _turn(terminal)) is not None:
        messages.append({"role": "user", "content": turn})
        try:
            text = _answer(options.url, asked | {"messages": messages}, terminal)
        except UnreachableError as error:
            if not terminal:
                raise
            messages.pop()
            print(f"pagewise chat: {error}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": text})
    return 0


def _turn(terminal: bool) -> str | None:
    """Return the next line that is not empty, and None at the end of the input."""
    while True:
        try:
            if line := input("> " if terminal else "").strip():
                return line
        except EOFError:
            return None


def _answer(url: str, asked: dict[str, Any], terminal: bool) -> str:
    """Print an answer while it comes, then a line about it to standard error; return the text without reasoning."""
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    began = time.monotonic()
    first = began
    text, usage = "", dict[str, Any]()
    try:
        with connect(url, "/v1/chat/completions", body, _TIMEOUT) as answer:
            for chunk in _chunks(events(answer)):
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    content, reasoning = choice["delta"].get("content"), choice["delta"].get("reasoning_content")
                    if (content or reasoning) and first == began:
                        first = time.monotonic()
                    text += content or ""
                    _print(reasoning, dim=terminal)
                    _print(content)
    except KeyboardInterrupt:
        pass
    print()
    if usage:
        _print_usage(usage, first - began, time.monotonic() - first)
    return text


def _print_usage(usage: dict[str, Any], first_token: float, others: float) -> None:
    """Print how many tokens an answer took, and the seconds until its first token and for the others."""
    tokens = usage["completion_tokens"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    rate = f", {(tokens - 1) / others:.1f} per second" if tokens > 1 else ""
    print(
        f"[{cached:,} of {usage['prompt_tokens']:,} prompt tokens were cached, the first token came after "
        f"{1e3 * first_token:.0f} ms; {tokens:,} tokens{rate}]",
        file=sys.stderr,
    )


def _chunks(stream: Iterator[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed chat, up to the end.

    Raises:
        UnreachableError: the stream brings an error.
    """
    for _, data in stream:
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise UnreachableError(chunk["error"]["message"])
        yield chunk


def _print(text: str | None, *, dim: bool = False) -> None:
    """Print a piece of a model's text, of which no character controls the terminal."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text or "")
    if shown:
        print(f"\x1b[2m{shown}\x1b[0m" if dim else shown, end="", flush=True)
