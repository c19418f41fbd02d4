"""Incremental detokenizing, against decoding everything at once."""

import gc
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_gateway.text.detokenizer import IncrementalDetokenizer, StopMatcher, StopStrings
from pagewise_gateway.text.tokenizer import Tokenizer

from tests.gateway.text import tokenizer_builders as builders

BYTE_LEVEL = builders.byte_level()
SENTENCEPIECE = builders.sentencepiece()
GEMMA = builders.sentencepiece(strip=False)
WORDPIECE = builders.wordpiece()
WINDOW = builders.byte_level()
WINDOW.token_bytes = None

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("abé世🙂 \n", max_size=40)


def run(detokenizer: IncrementalDetokenizer, ids: list[int]) -> str:
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, GEMMA], ids=["byte-level", "llama", "gemma"])
@settings(max_examples=50)
@given(text=TEXTS)
def test_text_survives_any_split(tokenizer: Tokenizer, text: str) -> None:
    prompt = tokenizer.encode("the fox")
    x = tokenizer.encode("x")
    ids = tokenizer.encode("x" + text)[len(x) :]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    out = ""
    for token in ids:
        out += detokenizer.push(token)
        expected = tokenizer.decode([*tokenizer.encode("x"), *ids]).removeprefix(
            tokenizer.decode(tokenizer.encode("x"))
        )
        assert expected.startswith(out)
    assert out + detokenizer.finish() == expected if ids else out == ""


@given(data=st.data(), skip=st.booleans())
def test_any_tokens_decode_as_at_once(data: st.DataObject, skip: bool) -> None:
    """Bytes that are no UTF-8, special tokens and unknown ids included; the prompt may end inside a character."""
    ids = st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=12)
    prompt, output = data.draw(ids), data.draw(ids)
    text = run(IncrementalDetokenizer(BYTE_LEVEL, prompt, skip_special_tokens=skip), output)
    whole = BYTE_LEVEL.decode([*prompt, *output], skip)
    before = BYTE_LEVEL.decode(prompt, skip)
    complete = len(before.rstrip("\ufffd"))  # an incomplete end of the prompt belongs to the output
    assert whole.endswith(text)
    assert complete <= len(whole) - len(text) <= len(before)


@given(data=st.data())
def test_tokens_decode_as_at_once_without_a_byte_table(data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, WORDPIECE.vocab_size - 1), max_size=12)
    prompt, output = data.draw(ids.filter(len)), data.draw(ids)
    text = run(IncrementalDetokenizer(WORDPIECE, prompt), output)
    assert WORDPIECE.decode(prompt) + text == WORDPIECE.decode([*prompt, *output])


@settings(max_examples=50)
@given(text=TEXTS | st.text("0\x80𐀀", min_size=20), skip=st.booleans())
def test_window_decoder_agrees_with_byte_decoder(text: str, skip: bool) -> None:
    assert run(IncrementalDetokenizer(WINDOW, [5, 6], skip), BYTE_LEVEL.encode(text)) == text


def model_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Character by character: the first moment at which some stop string is a suffix."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    text=st.text("abé🙂", max_size=30),
    stops=st.lists(st.text("abé🙂", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings(text: str, stops: list[str], include: bool) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [5], stop=StopStrings(tuple(stops), include))
    expected, stop = model_stop(text, tuple(stops), include)
    out = ""
    for token in BYTE_LEVEL.encode(text):
        out += detokenizer.push(token)
        assert expected.startswith(out), "emitted text that a stop string takes back"
    out += detokenizer.finish()
    assert (out, detokenizer.stopped_by) == (expected, stop)
    assert run(detokenizer, BYTE_LEVEL.encode("more")) == "" or stop is None


def test_text_is_not_held_back_without_need() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [5], stop=StopStrings(("###",)))
    assert "".join(map(detokenizer.push, BYTE_LEVEL.encode("fox #"))) == "fox "
    assert "".join(map(detokenizer.push, BYTE_LEVEL.encode("1"))) == "#1"
    *first, last = BYTE_LEVEL.encode("🙂")
    assert first, "the test needs a character of several tokens"
    assert [detokenizer.push(token) for token in first] == [""] * len(first)
    assert detokenizer.push(last) == "🙂"


def test_stop_strings_are_ignored_in_the_first_min_tokens() -> None:
    ids = BYTE_LEVEL.encode("abab")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [5], stop=StopStrings(("a",)), min_tokens=2)
    assert [detokenizer.push(token) for token in ids] == ["a", "b", "", ""]
    assert detokenizer.stopped_by == "a"


def test_leading_space_belongs_to_the_text_unless_nothing_is_before_it() -> None:
    ids = SENTENCEPIECE.encode("fox")
    assert run(IncrementalDetokenizer(SENTENCEPIECE, SENTENCEPIECE.encode("the")), ids) == " fox"
    bos = SENTENCEPIECE.encode("<s>", add_special_tokens=False)[-1:]
    assert run(IncrementalDetokenizer(SENTENCEPIECE, [1]), ids) == "fox" == SENTENCEPIECE.decode([*bos, *ids])


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WORDPIECE], ids=["bytes", "window"])
def test_work_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    """Ten thousand tokens that never complete a character, or have no text at all: still microseconds each."""
    broken = BYTE_LEVEL.encode("🙂")[0] if tokenizer is BYTE_LEVEL else 1
    detokenizer = IncrementalDetokenizer(tokenizer, [5] * 1000, stop=StopStrings(("a" * 500 + "b", "c")))
    started = time.process_time()
    for _ in range(10_000):
        detokenizer.push(broken)
    assert (time.process_time() - started) / 10_000 < 200e-6


def test_outputs_share_the_tables_of_their_stop_strings_which_are_made_when_they_are_needed() -> None:
    strings = StopStrings(("needle", "nee"))
    outputs = [StopMatcher(strings) for _ in range(3)]
    assert [matcher.push("hay, ") for matcher in outputs] == ["hay, "] * 3
    assert "failures" not in vars(strings)
    assert [matcher.push(text) for matcher, text in zip(outputs, ("n", "hay", "needle"), strict=True)] == [
        "",
        "hay",
        "",
    ]
    assert [matcher.matched for matcher in outputs] == [None, None, "nee"]
    assert "failures" in vars(strings)
    assert outputs[0].push("ever") == "never"
    assert [matcher.finish() for matcher in outputs] == ["", "", ""]


@pytest.mark.parametrize("stop", [(), ("ab",)])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WINDOW], ids=["bytes", "window"])
def test_what_is_not_used_any_more_is_freed_at_once(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            run(IncrementalDetokenizer(tokenizer, stop=StopStrings(stop) if stop else None), [1, 2, 3])
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, GEMMA, WORDPIECE], ids=["byte-level", "gemma", "window"])
def test_special_tokens_that_are_shown(tokenizer: Tokenizer) -> None:
    first, second, *_ = sorted(tokenizer.special_token_ids)
    tokens = [first, *tokenizer.encode("the fox", add_special_tokens=False), second, first]
    text = IncrementalDetokenizer(tokenizer, shown=frozenset({second}))
    written = "".join([*map(text.push, tokens), text.finish()])
    assert written == tokenizer.decode([token for token in tokens if token != first], skip_special_tokens=False)
    assert tokenizer.token(second) in written
    assert tokenizer.token(first) not in written
