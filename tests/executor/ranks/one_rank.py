"""The answers of an executor of one rank, to compare with."""

from pagewise_executor.model_runner import ModelRunner
from pagewise_shared.model_files import resolve_model
from tokenizers import Tokenizer

from tests.executor.driver import request, run_requests
from tests.executor.ranks.groups import config_of


def texts_of_one_rank(prompts: list[list[int]], max_tokens: int) -> list[str]:
    """The greedy outputs of the bundled model."""
    path = resolve_model("pagewise-demo")
    runner = ModelRunner(config_of(path, 1))
    asked = [request(ids, max_tokens, name=f"r{number}") for number, ids in enumerate(prompts)]
    run_requests(runner, asked)
    runner.close()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [tokenizer.decode(one.sequences[0].output_token_ids.tolist()) for one in asked]
