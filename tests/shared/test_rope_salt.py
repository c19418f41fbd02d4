"""The cache salts of KV whose rotation depends on the length of its sequence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.server.submissions import ImpossibleError, check
from pagewise_shared.block_hash import adapter_salt, is_own_salt, rope_salt, without_rope
from pagewise_shared.protocol import Prompt, RequestParams, Submit, pack_int32s

from tests.sampling import sampling_params

SALTS = st.one_of(
    st.none(), st.text(max_size=8), st.text(max_size=8).map(lambda text: adapter_salt(b"ab", text))
).filter(lambda salt: without_rope(salt) == salt)


@given(SALTS, SALTS, st.integers(1, 100), st.integers(1, 100), st.integers(1, 100))
def test_salts_differ_if_clients_or_factors_do(
    one: str | None, other: str | None, length: int, other_length: int, border: int
) -> None:
    salts = rope_salt(one, length, border), rope_salt(other, other_length, border)
    assert (salts[0] == salts[1]) == (one == other and (length > border) == (other_length > border))
    assert without_rope(salts[0]) == one
    assert is_own_salt(salts[0]) or length <= border


def test_no_client_may_name_the_long_factors() -> None:
    salt = rope_salt(None, 2, 1)
    prompts = (Prompt(pack_int32s([1]), 1),)
    submit = Submit(
        epoch=1, stream=0, request_id="r", prompts=prompts, params=RequestParams(sampling_params(), cache_salt=salt)
    )
    with pytest.raises(ImpossibleError, match="LongRoPE"):
        check(submit, 100)
