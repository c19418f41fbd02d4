"""Completes many prompts without a server of one's own: ``python examples/python/batch.py [MODEL]``."""

import sys

from pagewise import LLM, SamplingParams


def main() -> None:
    """Print a model's answers to a few prompts, and to a conversation."""
    with LLM(*sys.argv[1:2]) as llm:
        prompts = [f"def {name}(self" for name in ("read", "write", "close", "seek")]
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        messages = [{"role": "user", "content": "Write a function named read_file."}]
        (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=48))
        print(answer.outputs[0].text)


if __name__ == "__main__":
    main()
