"""The maximum sizes of frames, and of the parts of plans, which keep every legal plan below them.

A plan consists of sequences that join and of changes to running sequences. The scheduler lets no further sequence join
once they take ``MAX_JOINED_BYTES``, and the first one has a limit of its own. The changes are bounded by the blocks and
rows of the executor. ``greatest_plan`` adds all of that up.
"""

from pagewise_shared.block_hash import MAX_SALT_TAGS, SALT_TAG_BYTES
from pagewise_shared.sampling import (
    MAX_ALLOWED_BYTES,
    MAX_BAD_SEQUENCES,
    MAX_BAD_TOKENS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIASES,
    MAX_STOP_IDS,
)
from pagewise_shared.segments import MAX_MOVED_TOKENS, MAX_SEGMENTS
from pagewise_shared.thinking import MAX_FORCED, MAX_OPENING

MAX_FRAME_TO_SCHEDULER = 64 * 1024 * 1024
"""Bytes of a frame from an executor or a gateway to the scheduler."""
MAX_FRAME_FROM_SCHEDULER = 256 * 1024 * 1024
"""Bytes of a frame from the scheduler to an executor or a gateway."""
MAX_SUBMIT_BYTES = 44 * 1024 * 1024
"""Bytes of a request of a gateway, which refuses a larger one."""
MAX_STEP_RESULT_BYTES = 24 * 1024 * 1024
"""Bytes of the result of a step; instead of a larger result an executor reports a failed step."""
MAX_BATCHED_TOKENS = 1 << 16
"""Tokens of a step. Its result fits ``MAX_STEP_RESULT_BYTES`` even with the maximum of prompt log-probabilities."""
MAX_DECODED_BYTES = 1024 * 1024 * 1024
"""Bytes of the objects that a frame to the scheduler is decoded to."""
MAX_ADAPTERS = 1024
"""Adapters that a fleet may serve."""
MAX_TIERS = 128
"""Tiers in the Hello of an executor."""
MAX_GROUPS = 16
"""Groups of layers in the Hello of an executor."""
MAX_PROMPTS = 1 << 16
"""Prompts of one request, and outputs of one prompt."""
MAX_BUDGETS = 8
"""Maximum number of budgets of memory of a request's key, one for each tier."""
MAX_PLACES = 8
"""Places that a prompt declares."""
MAX_JOINED_BYTES = 16 * 1024 * 1024
"""Bytes of joining sequences in a plan after which no other sequence joins in it."""
MAX_SEQUENCE_BYTES = 64 * 1024 * 1024
"""Bytes of the tokens and the block table of one sequence: this bounds the length of sequences."""
MAX_DEVICE_BLOCKS = 1 << 22
"""Blocks in the device pool of one executor."""
MAX_ROWS = 1 << 16
"""Sequences that run on one executor at a time."""
MAX_MOVES = 1 << 12
"""Parts of segments in a plan after which, as after ``MAX_MOVED_TOKENS`` tokens, no other sequence with segments
advances."""
MAX_COMPILED_CHARACTERS = 4 * 1024 * 1024
"""Characters of the texts of all grammars that an executor keeps compiled: each takes up to 260 bytes then."""

SEQUENCE_OVERHEAD_BYTES = 5 * (MAX_STOP_IDS + MAX_FORCED + MAX_OPENING) + 256
"""Maximum bytes of a sequence besides its tokens, its blocks, its grammar and its constraints."""
MAX_CONSTRAINTS_BYTES = MAX_ALLOWED_BYTES + 8 * MAX_LOGIT_BIASES + 4 * MAX_BAD_TOKENS + 5 * MAX_BAD_SEQUENCES + 32
"""Maximum bytes of the token constraints of one request."""

_TOKEN_BYTES = _BLOCK_BYTES = 4
_TABLE_BYTES = 12
_COPY_BYTES = 8
_ROW_BYTES = 40
_MOVE_BYTES = 40
_SALT_BYTES = MAX_SALT_TAGS * SALT_TAG_BYTES + 16
_NAMES_BYTES = 2 * 1024 * (64 + _COPY_BYTES) + 2 * 512 * _SALT_BYTES
"""Blocks of tiers without ids: at most 512 are in flight from each of two such tiers, and 512 to each, of which each
may be the first one of a prefix."""


def longest_sequence(block_size: int) -> int:
    """Return the maximum tokens of a sequence whose tokens and blocks fit ``MAX_SEQUENCE_BYTES``."""
    blocks = MAX_SEQUENCE_BYTES // (_TOKEN_BYTES * block_size + _BLOCK_BYTES)
    return blocks * block_size


def greatest_plan() -> int:
    """Return an upper bound on the bytes of any plan.

    A plan adds a block of the device to at most one block table, and replaces it in at most one. It copies to a block
    at most once, and from it once, when the tier below keeps its content. A row leaves, has computed tokens, and
    computes a chunk at most once. The moves of a segment read at most as many blocks as it has tokens, and one more at
    both ends of each part. Drafts are among the tokens of the step.
    """
    moves = (MAX_MOVES + MAX_SEGMENTS) * (_MOVE_BYTES + 2 * _BLOCK_BYTES) + 2 * MAX_MOVED_TOKENS * _BLOCK_BYTES
    joined = MAX_JOINED_BYTES + MAX_SEQUENCE_BYTES + SEQUENCE_OVERHEAD_BYTES + MAX_GRAMMAR_BYTES + MAX_CONSTRAINTS_BYTES
    rows = MAX_ROWS * _ROW_BYTES + MAX_BATCHED_TOKENS * _TOKEN_BYTES
    return joined + moves + MAX_DEVICE_BLOCKS * (2 * _TABLE_BYTES + 2 * _COPY_BYTES) + rows + _NAMES_BYTES


MAX_RANKS = 64
"""The most ranks of an executor."""
