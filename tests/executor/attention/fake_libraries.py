"""Stand-ins for libraries of attention, with the arguments and the meaning that their sources give them."""

from typing import Any

import torch
from pagewise_executor.attention.torch_attention import attend_chunk


class FakeFlashAttention:
    """The module ``flash_attn_interface``."""

    @staticmethod
    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> torch.Tensor:
        for ints in (cache_seqlens, page_table, cu_seqlens_q):
            assert ints.dtype == torch.int32
        assert causal
        assert window_size[1] == (-1 if window_size[0] < 0 else 0)
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        window = None if window_size[0] < 0 else window_size[0] + 1
        out = torch.empty_like(q)
        for i, length in enumerate(cache_seqlens.tolist()):
            own = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
            k, v = (t[page_table[i].long()].flatten(0, 1)[:length] for t in (k_cache, v_cache))
            start = length - (own.stop - own.start)
            out[own] = attend_chunk(q[own], k, v, start, softmax_scale, window, softcap or None)
        return out


class FakeFlashInfer:
    """The module ``flashinfer``."""

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
            assert float_workspace_buffer.dtype == torch.uint8
            assert kv_layout == "NHD"

        def plan(
            self,
            qo_indptr: torch.Tensor,
            paged_kv_indptr: torch.Tensor,
            paged_kv_indices: torch.Tensor,
            paged_kv_last_page_len: torch.Tensor,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            *,
            causal: bool,
            sm_scale: float,
            window_left: int,
            logits_soft_cap: float | None,
            q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
        ) -> None:
            for ints in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
                assert ints.dtype == torch.int32
            assert causal
            assert int(paged_kv_last_page_len.min()) >= 1
            assert int(paged_kv_last_page_len.max()) <= page_size
            self._starts, self._ends = qo_indptr.tolist(), paged_kv_indptr.tolist()
            self._blocks, self._last = paged_kv_indices, paged_kv_last_page_len.tolist()
            self._expected = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type)
            self._scale, self._window, self._softcap = sm_scale, window_left, logits_soft_cap

        def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            keys, values = paged_kv_cache
            assert (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1], q.dtype, keys.dtype) == self._expected
            assert q.is_contiguous()
            out = torch.empty_like(q)
            for i, last in enumerate(self._last):
                own = slice(self._starts[i], self._starts[i + 1])
                blocks = self._blocks[self._ends[i] : self._ends[i + 1]].long()
                length = (len(blocks) - 1) * keys.shape[1] + last
                k, v = (t[blocks].flatten(0, 1)[:length] for t in (keys, values))
                window = None if self._window < 0 else self._window + 1
                start = length - (own.stop - own.start)
                out[own] = attend_chunk(q[own], k, v, start, self._scale, window, self._softcap)
            return out


FAKES: dict[str, Any] = {"flash_attn_interface": FakeFlashAttention, "flashinfer": FakeFlashInfer}
