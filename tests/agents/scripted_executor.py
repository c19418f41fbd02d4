"""An executor whose model follows a script: it writes the text that the last message of the user asks for, to the
letter.

Everything but the runner is the executor as shipped: requests come as step plans, and its text returns token by token.
A message of the user contains a script between ``Write:`` and ``End.``, in steps that ``Then:`` separates::

    Write:
    <tool_call>{"name": "get_weather", "arguments": {"city": "Kiel"}}</tool_call>
    Then:
    The tools say: {results}
    End.

The first step is the answer to the message. Each answer behind it in the conversation makes the next step the current
one, and ``{results}`` is the results of tools since. A text that the request's grammar forbids is not written: an
answer reports that instead.
"""

import sys
from pathlib import Path

import msgspec
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from pagewise_executor import main as executor
from pagewise_executor.simulated import SimulatedRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.curve import Keys

END = 0
"""The token that ends a message and an answer."""


class ScriptedRunner(SimulatedRunner):
    """A simulated runner, but its tokens come from a script that is in the prompt."""

    def __init__(self, config: ExecutorConfig) -> None:
        super().__init__(config)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(Path(config.model) / "tokenizer.json"))
        self._grammars = LLTokenizer(self._tokenizer.to_str(), eos_token=END)
        self.info = msgspec.structs.replace(
            self.info, vocab_size=self._tokenizer.get_vocab_size(), max_model_len=65_536, no_grammars=""
        )
        self._answers: dict[tuple[bytes, str], list[int]] = {}

    def _token(self, row: int, position: int) -> int:
        held = self._batch.sequences[row]
        prompt = held.tokens[: held.num_prompt_tokens]
        key = (prompt.tobytes(), held.sampling.grammar)
        if key not in self._answers:
            self._answers[key] = self._answer(prompt.tolist(), held.sampling.grammar)
        answer = self._answers[key]
        written = position - held.num_prompt_tokens
        return answer[written] if written < len(answer) else END

    def _answer(self, prompt: list[int], grammar: str) -> list[int]:
        text = scripted(self._tokenizer.decode(prompt, skip_special_tokens=False))
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        if grammar:
            matcher = LLMatcher(self._grammars, grammar)
            taken = matcher.try_consume_tokens(tokens)
            if taken < len(tokens) or not matcher.is_accepting():
                allowed = self._tokenizer.decode(tokens[:taken], skip_special_tokens=False)
                return self._tokenizer.encode(f"The grammar forbids the script behind: {allowed}").ids
        return tokens


def scripted(prompt: str) -> str:
    """Return the text that the model has to write behind this prompt."""
    messages = [part.partition("<|end|>")[0].split(": ", 1) for part in prompt.split("<|user|>")[1:]]
    scripts = [number for number, (role, text) in enumerate(messages) if role == "user" and "Write:\n" in text]
    if not scripts:
        return "There is no script in this conversation."
    behind = messages[scripts[-1] + 1 :]
    script = messages[scripts[-1]][1].partition("Write:\n")[2].partition("\nEnd.")[0]
    steps = script.split("\nThen:\n")
    answers = sum(role == "assistant" for role, _ in behind)
    if answers >= len(steps):
        return "The script has ended."
    results = " and ".join(text for role, text in behind if role == "tool")
    return steps[answers].replace("{results}", results)


def build_runner(config: ExecutorConfig, keys: Keys | None = None) -> ScriptedRunner:
    return ScriptedRunner(config)


if __name__ == "__main__":
    executor.build_runner = build_runner
    sys.exit(executor.main())
