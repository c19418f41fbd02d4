"""``pagewise segments``: reads a file of requests and says what declaring segments would save."""

import argparse
import json
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import resolve_model

from pagewise_gateway.repeats.finder import RepeatFinder
from pagewise_gateway.segment_report.counts import Segment, SegmentCounts
from pagewise_gateway.segment_report.trace import Refused, TraceError, read_trace
from pagewise_gateway.text.tokenizer import Tokenizer

_BEGINNING = 24
"""Tokens of a segment that are shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the process's exit code."""
    options = _parser().parse_args(argv)
    try:
        if options.json is not None and not options.json.parent.is_dir():
            raise TraceError(f"{options.json}: there is no directory {options.json.parent}")
        tokenizer = None
        if options.model is not None:
            tokenizer = Tokenizer.load(resolve_model(options.model, options.revision, tokenizer_only=True))
        report = report_on(options.trace, tokenizer, options)
    except (TraceError, ModelError) as error:
        print(f"pagewise segments: {error}", file=sys.stderr)
        return 2
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def report_on(path: Path, tokenizer: Tokenizer | None, options: argparse.Namespace) -> dict[str, Any]:
    """Return what there is to say of a trace.

    Raises:
        TraceError: it cannot be read, holds no request, or none that a gateway would take.
    """
    began = time.perf_counter()
    num_slots = 1 << max(2, (options.remember - 1).bit_length())
    finder, counts = RepeatFinder(num_slots), SegmentCounts(num_slots)
    places: list[array[int]] = [array("q"), array("q")]  # of each prompt: its line, and its number in its request
    tokens, prefix, repeated = 0, 0, 0
    refused: list[Refused] = []
    for one in read_trace(path, tokenizer, limit=options.limit):
        if isinstance(one, Refused):
            refused.append(one)
            continue
        repeats = finder.examine(one.tokens, one.salt)
        counts.count(len(places[0]), repeats)
        places[0].append(one.line)
        places[1].append(one.number)
        tokens, prefix = tokens + repeats.num_tokens, prefix + repeats.prefix
        repeated += repeats.repeated
    if not places[0]:
        why = f"a gateway would refuse all of them: line {refused[0].line}: {refused[0].reason}" if refused else ""
        raise TraceError(f"{path}: {why or 'it holds no requests'}")
    parts = {
        "reached_by_prefixes": prefix,
        "repeated_beyond_prefixes": repeated,
        "new": tokens - prefix - repeated,
    }
    report: dict[str, Any] = {
        "trace": path.name,
        "settings": {"model": options.model, "remember": num_slots},
        "requests": len(set(places[0])),
        "prompts": len(places[0]),
        "tokens": {"all": tokens} | parts,
        "shares": {name: round(number / max(1, tokens), 4) for name, number in parts.items()},
        "segments": _described(counts.segments(options.top), places, path, tokenizer),
    }
    if refused:
        first = f"line {refused[0].line}: {refused[0].reason}"
        report["refused"] = {"requests": len(refused), "first": first}
    return report | {"forgotten": finder.seen.forgotten, "examined_in_seconds": round(time.perf_counter() - began, 1)}


def _described(
    segments: list[Segment], places: "list[array[int]]", path: Path, tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """Return what the report says of segments. The lines that hold them are read once more."""
    wanted = {(places[0][one.prompt], places[1][one.prompt]) for one in segments}
    prompts: dict[tuple[int, int], array[int]] = {}
    if wanted:
        for read in read_trace(path, tokenizer, lines={line for line, _ in wanted}):
            if not isinstance(read, Refused) and (read.line, read.number) in wanted:
                prompts[read.line, read.number] = read.tokens
    described = []
    for one in segments:
        line, number = places[0][one.prompt], places[1][one.prompt]
        beginning = prompts[line, number][one.offset : one.offset + min(_BEGINNING, one.num_tokens)]
        described.append(
            {
                "tokens": one.num_tokens,
                "repeated": one.times,
                "first": {"line": line, "prompt": number, "token": one.offset},
                "begins": list(beginning) if tokenizer is None else tokenizer.decode(beginning, False),
            }
        )
    return described


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewise segments",
        description="Say how much of the prompts of a trace earlier prompts contain: as prefixes, which are reused in "
        "any case, and behind other prefixes, which is reused only if requests declare segments. Prints JSON.",
    )
    parser.add_argument(
        "trace",
        type=Path,
        help="JSON lines of OpenAI's request bodies (alone, or as body of OpenAI's batches), or of lists of token ids; "
        ".gz too",
    )
    parser.add_argument("--model", metavar="MODEL", help="whose tokenizer and chat template make tokens of texts")
    parser.add_argument("--revision", metavar="REV", help="hub revision of the model")
    parser.add_argument("--limit", type=_count, metavar="N", help="first N requests only")
    parser.add_argument("--top", type=_count, default=10, metavar="N", help="segments to list (default: 10)")
    parser.add_argument(
        "--remember",
        type=_count,
        default=1 << 23,
        metavar="N",
        help="hashes to remember, 20 bytes each; 16 tokens of new text have about three (default: 8388608)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
