"""The process that compiles grammars for a gateway (``pagewise_gateway.structured.checker``).

Its argument is the number of a socket. To each grammar that comes it answers the flaw of the grammar, or an empty text.
It ends when the gateway closes the socket.
"""

import re
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pagewise_gateway.structured.checker import MEMORY_BYTES, NUMBER_BYTES, SECONDS, STACK_BYTES

_NUM_BYTES = 256
_SPECIAL = re.compile(r'<\[[^\]"]*\]>')
"""A special token by its number, which the model's tokenizer has."""


class _Bytes:
    """A tokenizer with a token for each byte. Which bytes may follow does not depend on the model's tokenizer."""

    eos_token_id, bos_token_id = _NUM_BYTES, None
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(_NUM_BYTES)), b"<eos>")
    special_token_ids = (_NUM_BYTES,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    """Answer until the socket is closed, with a stack that is deep enough."""
    for limit, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (most, most))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Connection(int(sys.argv[1])),))
    thread.start()
    thread.join()


def _serve(connection: Connection) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=_NUM_BYTES + 1, eos_token=[_NUM_BYTES])
    connection.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            asked = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose signal ends the process, inside the library too
            flaw = _flaw(tokenizer, asked[NUMBER_BYTES:].decode(), int.from_bytes(asked[:NUMBER_BYTES], "little"))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send_bytes(flaw.encode())


def _flaw(tokenizer: LLTokenizer, grammar: str, max_symbols: int) -> str:
    """Return the flaw of a grammar. If it has none, begin with an output too, as executors do."""
    limits = LLParserLimits(verbose_errors=False, max_grammar_size=max_symbols)
    if flaw := LLMatcher.validate_grammar(grammar, limits=limits):
        return flaw
    # Only how long this takes counts: this tokenizer does not have the special tokens that a grammar may name.
    named = _SPECIAL.sub(f"<[{_NUM_BYTES}]>", grammar)
    LLMatcher(tokenizer, named, log_level=0, limits=limits).compute_bitmask()
    return ""


if __name__ == "__main__":
    main()
