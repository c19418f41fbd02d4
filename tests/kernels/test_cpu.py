"""The CPU operations against float64 oracles, in every build of the library that this processor runs."""

import ctypes
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_kernels.cpu import library
from pagewise_kernels.cpu.attention import CpuStep, Rotation
from pagewise_kernels.cpu.build import FOLDER, Variant
from pagewise_kernels.cpu.library import AttentionArguments
from pagewise_kernels.cpu.operations import PackedWeight, rms_norm, silu_mul
from pagewise_kernels.kv_layer import INT8, KVLayer, Scales

from tests.cpu_kernels import built_in, need_cpu_kernels, variants
from tests.kernels import oracles

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
TYPES = list(TOLERANCE)


@dataclass(frozen=True)
class Case:
    """A step: the context lengths of its decodes, and chunks (start, size); the first ``sharing`` decodes have their
    first ``shared`` blocks in common."""

    lengths: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    sharing: int = 0
    shared: int = 0
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    heads_first: bool = False
    rotated: bool = False
    normed: bool = False
    has_sinks: bool = False
    attention_chunk: int | None = None
    latent: int = 0
    int8: bool = False

    def check(self, seed: int = 0) -> torch.Tensor:
        """Run it and compare it with the oracle; returns the result."""
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        ends = [*self.lengths, *(start + size for start, size in self.chunks)]
        most = -(-max(ends) // self.block_size) + 1
        num_blocks = len(ends) * most + 2
        order = torch.randperm(num_blocks, generator=generator)[: len(ends) * most]
        tables = order.view(len(ends), most).int().numpy()
        tables[: self.sharing, : self.shared] = tables[0, : self.shared]
        keys, values = (self._pool(randn, num_blocks) for _ in range(2))
        if self.latent:
            values = keys[..., -self.latent :]
        layer = KVLayer(keys, values) if not self.int8 else in_eight_bits(keys, values)
        rows, positions = self._tokens()
        slots = tables[rows, positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        tokens, decodes = len(rows), len(self.lengths)
        qkv = randn(tokens, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        new_q, new_k = q, k
        rotation = self._rotation(randn, tokens) if self.rotated else None
        if rotation is not None:
            new_q, new_k = self._rotate(q, k, rotation)
        chunks, offset = [], decodes
        for number, (start, size) in enumerate(self.chunks):
            chunks.append((offset, decodes + number, start, size))
            offset += size
        sharing = np.arange(self.sharing, dtype=np.int64)
        prefixes = [(0, self.sharing, self.shared * self.block_size)] if self.shared and self.sharing else []
        expected_keys, expected_values = (one.to(self.dtype) for one in exact(layer))
        if self.latent:
            v, expected_values = k[..., -self.latent :], expected_keys[..., -self.latent :]
        blocks, offsets = torch.from_numpy(slots // self.block_size), torch.from_numpy(slots % self.block_size)
        expected_keys[blocks, offsets], expected_values[blocks, offsets] = new_k.to(self.dtype), v
        step = CpuStep(
            slots, tables, rows[:decodes], positions[:decodes] + 1, np.array(chunks, np.int64).reshape(-1, 4),
            block_size=self.block_size, prefixes=np.array(prefixes, np.int64).reshape(-1, 3), members=sharing,
        )  # fmt: skip
        scale = self.head_dim**-0.5
        sinks = torch.linspace(-3, 9, self.heads).to(self.dtype) if self.has_sinks else None
        found = step.attend(
            q, k, v, layer, scale=scale, window=self.window, softcap=self.softcap, rotation=rotation,
            sinks=sinks, attention_chunk=self.attention_chunk,
        )  # fmt: skip
        tolerance = {"rtol": TOLERANCE[self.dtype], "atol": 3 * TOLERANCE[self.dtype]}  # rounded three times
        torch.testing.assert_close(q.double(), new_q.double(), **tolerance)  # in place
        keys, values = exact(layer)
        if self.int8:  # at most half a step of 127 from what was written
            for one, wanted in (keys, expected_keys.double()), (values, expected_values.double()):
                half = wanted.abs().amax(-1, keepdim=True) / 254
                assert ((one - wanted).abs() <= half + (wanted.abs() + 3) * TOLERANCE[self.dtype]).all()
        else:
            torch.testing.assert_close(keys.to(self.dtype), expected_keys, **tolerance)
            assert torch.equal(values.to(self.dtype), expected_values)
        for table, own in zip(tables, self._queries(), strict=True):
            start = int(positions[own.start])
            expected = oracles.attention(
                q[own], keys, values, torch.from_numpy(table), start,
                scale=scale, softcap=self.softcap, window=self.window, sinks=sinks,
                attention_chunk=self.attention_chunk,
            )  # fmt: skip
            torch.testing.assert_close(found[own].double(), expected, **tolerance)
        return found

    def _pool(self, randn, num_blocks: int) -> torch.Tensor:
        if self.heads_first:  # another order of strides, the same shape
            return randn(num_blocks, self.kv_heads, self.block_size, self.head_dim).transpose(1, 2)
        return randn(num_blocks, self.block_size, self.kv_heads, self.head_dim)

    def _tokens(self) -> tuple[np.ndarray, np.ndarray]:
        decodes = len(self.lengths)
        rows = [np.arange(decodes), *(np.full(size, decodes + i) for i, (_, size) in enumerate(self.chunks))]
        positions = [np.array(self.lengths, np.int64) - 1, *(np.arange(a, a + size) for a, size in self.chunks)]
        return np.concatenate(rows).astype(np.int64), np.concatenate(positions).astype(np.int64)

    def _queries(self) -> list[slice]:
        decodes = len(self.lengths)
        own, offset = [slice(i, i + 1) for i in range(decodes)], decodes
        for _, size in self.chunks:
            own.append(slice(offset, offset + size))
            offset += size
        return own

    def _rotation(self, randn, tokens: int) -> Rotation:
        angles = randn(tokens, self.head_dim // 2).float()
        cos, sin = (torch.cat([f(angles)] * 2, dim=-1).to(self.dtype) for f in (torch.cos, torch.sin))
        norm = randn(self.heads + self.kv_heads, self.head_dim) if self.normed else None
        return Rotation(cos, sin, norm, 1e-5)

    def _rotate(self, q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        qk = torch.cat([q, k], dim=1).double()
        if rotation.head_norm is not None:
            qk = oracles.rms_norm(qk, rotation.head_norm, rotation.eps)
        half = self.head_dim // 2
        qk = oracles.rope(qk, rotation.cos[:, :half], rotation.sin[:, :half])
        return qk[:, : self.heads], qk[:, self.heads :]


def in_eight_bits(keys: torch.Tensor, values: torch.Tensor) -> KVLayer:
    """Return K and V of float in eight bits, with a scale for each token and head, in the same order of strides."""
    scales = Scales(*(one.float().abs().amax(-1) / 127 for one in (keys, values)))
    rounded = ((one.float() / scale[..., None]).round() for one, scale in zip((keys, values), scales, strict=True))
    return KVLayer(*(torch.empty_like(keys, dtype=INT8).copy_(one) for one in rounded), scales)


def exact(layer: KVLayer) -> list[torch.Tensor]:
    """Return K and V of a layer, as its blocks hold them, in float64."""
    scales = layer.scales or (torch.ones(1), torch.ones(1))
    return [one.double() * s.double()[..., None] for one, s in zip((layer.keys, layer.values), scales, strict=True)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    block_size = draw(st.sampled_from([1, 4, 16]))
    chunks = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 150)), max_size=2))
    least = 0 if chunks else 1
    lengths = draw(st.lists(st.integers(1, 300) | st.integers(500, 1100), min_size=least, max_size=6))
    sharing = draw(st.integers(0, len(lengths)))
    most = min(lengths[:sharing] or [1]) - 1
    window = draw(st.none() | st.integers(1, 400))
    head_dim = 2 * draw(st.integers(1, 80)) if draw(st.booleans()) else draw(st.sampled_from([16, 128, 256, 512]))
    latent = draw(st.integers(0, head_dim - 1)) if kv_heads == 1 else 0
    return Case(
        lengths=tuple(lengths),
        chunks=tuple(chunks),
        sharing=sharing,
        shared=draw(st.integers(0, most // block_size)),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3, 8, 12])),
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent=latent,
        block_size=block_size,
        window=window,
        attention_chunk=draw(st.none() | st.integers(1, 400)) if window is None else None,
        softcap=draw(st.sampled_from([None, 5.0])),
        dtype=draw(st.sampled_from(TYPES)),
        heads_first=draw(st.booleans()),
        rotated=not latent and draw(st.booleans()),
        normed=draw(st.booleans()),
        has_sinks=draw(st.booleans()),
        int8=not latent and draw(st.booleans()),
    )


@settings(max_examples=60)
@given(case=cases(), seed=st.integers(0, 2**31))
def test_attention_is_the_formula(case: Case, seed: int) -> None:
    need_cpu_kernels()
    case.check(seed)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
@pytest.mark.parametrize(("heads_first", "int8"), [(False, False), (True, False), (False, True), (True, True)])
def test_every_build_computes_it(
    build: Variant, dtype: torch.dtype, head_dim: int, heads_first: bool, int8: bool
) -> None:
    case = Case(
        lengths=(1, 5, 33, 70, 600), chunks=((0, 45), (7, 130)), heads=8, kv_heads=4, head_dim=head_dim,
        block_size=16, dtype=dtype, heads_first=heads_first, rotated=True, normed=True, int8=int8,
    )  # fmt: skip
    case.check()


@pytest.mark.parametrize("window", [None, 1, 7, 64, 600])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_windows_and_softcaps(build: Variant, window: int | None, softcap: float | None) -> None:
    Case(lengths=(1, 5, 130, 700), chunks=((0, 45), (90, 70)), window=window, softcap=softcap, block_size=16).check()


@pytest.mark.parametrize("attention_chunk", [1, 7, 64, 600])
def test_attention_chunks(build: Variant, attention_chunk: int) -> None:
    lengths, chunks = (1, 5, 64, 130, 700), ((0, 45), (90, 70))
    Case(lengths=lengths, chunks=chunks, attention_chunk=attention_chunk, block_size=16).check()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "latent"), [(4, 24), (20, 512), (128, 40), (192, 20)])
def test_latents(build: Variant, dtype: torch.dtype, heads: int, latent: int) -> None:
    Case(
        lengths=(1, 5, 600, 70), chunks=((0, 45), (7, 9)), heads=heads, kv_heads=1, head_dim=latent + 64, latent=latent,
        block_size=16, dtype=dtype,
    ).check()  # fmt: skip
    Case(
        lengths=(200, 180, 140), heads=heads, kv_heads=1, head_dim=latent + 8, latent=latent, dtype=dtype, sharing=3,
        shared=33,
    ).check()  # fmt: skip


def test_layers_that_share_k_and_v_write_none(build: Variant) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 4, 4, 2, 16)
    q, (k, v) = torch.randn(1, 4, 16), torch.randn(2, 1, 2, 16)
    before = keys.clone(), values.clone()
    slots, ones = np.array([5], np.int64), np.ones(1, np.int64)
    step = CpuStep(slots, np.ones((1, 1), np.int32), 0 * ones, 2 * ones, np.zeros((0, 4), np.int64), block_size=4)
    found = step.attend(q, k, v, KVLayer(keys, values), scale=0.25, write=False)
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
    expected = oracles.attention(q, keys, values, torch.ones(1), 1, scale=0.25)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
    step.attend(q, k, v, KVLayer(keys, values), scale=0.25)
    assert torch.equal(keys[1, 1], k[0])


@pytest.mark.parametrize("shared", [1, 31, 40])
def test_a_prefix_that_decodes_share(build: Variant, shared: int) -> None:
    Case(lengths=(641,) * 7 + (650, 900, 3), sharing=9, shared=shared, block_size=16, heads=8, kv_heads=2).check()


@pytest.mark.parametrize("heads", [8, 24])
def test_a_sink_counts_once(build: Variant, heads: int) -> None:
    """In whole contexts, in parts that are merged, behind a shared prefix, and in chunks."""
    Case(
        lengths=(641, 650, 1300, 3), chunks=((0, 45), (90, 200)), sharing=3, shared=20, block_size=16, heads=heads,
        kv_heads=2, softcap=5.0, has_sinks=True,
    ).check()  # fmt: skip


@pytest.mark.parametrize("window", [None, 100])
def test_results_do_not_depend_on_threads_or_neighbours(window: int | None) -> None:
    need_cpu_kernels()
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 5):  # with 5, the queries of the chunk are in smaller items
            torch.set_num_threads(count)
            case = Case(lengths=(30, 700, 1200), chunks=((5, 200),), heads=8, head_dim=64, window=window)
            found.append(case.check())
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(threads)


def test_a_poisoned_sequence_does_not_reach_its_neighbours(build: Variant) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 8, 4, 2, 16)
    keys[3], values[3] = float("nan"), float("inf")
    tables = np.array([[3, 0], [1, 2]], np.int32)
    k, v = torch.randn(2, 2, 2, 16)
    for _ in range(2):  # twice: the first step must not change the second
        step = CpuStep(
            np.array([13, 10]), tables, np.array([0, 1]), np.array([2, 7]), np.zeros((0, 4), np.int64), block_size=4
        )
        found = step.attend(torch.randn(2, 4, 16), k, v, KVLayer(keys, values), scale=0.25)
        assert not found[0].isfinite().any()
        assert found[1].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 100), (16, 512), (700, 520)])
def test_norm_and_activation(build: Variant, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), oracles.rms_norm(x, weight, 1e-5), **tolerance)
    total = x + residual
    found = rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(residual, total)
    torch.testing.assert_close(found.double(), oracles.rms_norm(total, weight, 1e-5), **tolerance)
    gate_up = (10 * torch.randn(shape[0], 2 * shape[1])).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -3e38, 0.0])
    torch.testing.assert_close(silu_mul(gate_up).double(), oracles.silu_mul(gate_up), **tolerance)


@settings(max_examples=40)
@given(rows=st.integers(1, 200), ins=st.integers(1, 70) | st.just(2100), outs=st.integers(1, 200), biased=st.booleans())
def test_a_linear_layer_is_a_product(rows: int, ins: int, outs: int, biased: bool) -> None:
    need_cpu_kernels()
    check_linear(rows, ins, outs, biased)


@pytest.mark.parametrize("outs", [1, 16, 32, 48, 64, 83, 129])
def test_every_build_computes_linear_layers(build: Variant, outs: int) -> None:
    for rows in (1, 7, 100):
        check_linear(rows, 1100, outs, biased=rows != 7)


def check_linear(rows: int, ins: int, outs: int, biased: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, ins + 3)[:, :ins], torch.randn(outs, ins), torch.randn(outs)
    found = PackedWeight(weight, bias if biased else None).linear(x)
    expected = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * ins**0.5)


def test_what_does_not_fit_is_refused() -> None:
    ints, none = np.zeros(1, np.int64), np.zeros((0, 4), np.int64)
    tables = np.zeros((1, 2), np.int32)
    need_cpu_kernels()
    for lengths, chunks in ((ints + 9, none), (ints, none), (ints + 1, np.array([[0, 0, 0, 1]]))):
        with pytest.raises(ValueError, match="outside the batch or the block tables"):
            CpuStep(ints, tables, ints, lengths, chunks, block_size=4)
    with pytest.raises(ValueError, match="shorter than each context"):
        CpuStep(
            ints, tables, ints, ints + 4, none, block_size=4, prefixes=np.array([[0, 1, 4]]), members=ints
        )  # fmt: skip
    step = CpuStep(ints, tables, ints, ints + 1, none, block_size=4)
    pool, q = torch.zeros(3, 4, 2, 16), torch.zeros(1, 4, 16)
    with pytest.raises(ValueError, match="cannot be"):
        step.attend(q, q, q, KVLayer(pool, pool), scale=1.0)
    with pytest.raises(TypeError, match="one type"):
        step.attend(q.half(), *torch.zeros(2, 1, 2, 16).half(), KVLayer(pool.half(), pool.half()), scale=1.0)
    latents = torch.zeros(3, 4, 1, 700)
    with pytest.raises(ValueError, match="4 heads of 700 with 1 KV heads are not supported"):
        step.attend(
            torch.zeros(1, 4, 700), latents[:1, 0], latents[:1, 0, :, 64:], KVLayer(latents, latents[..., 64:]), scale=1
        )
    with pytest.raises(TypeError, match="one type"):
        rms_norm(q[0], torch.zeros(16).bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="rows"):
        silu_mul(torch.zeros(2, 3))


def test_without_the_library_it_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(library.LibraryMissingError, match=r"python -m pagewise_kernels\.cpu\.build"):
        library.load_library(tmp_path)


def test_a_library_without_a_function_is_refused(tmp_path: Path) -> None:
    need_cpu_kernels()
    built = Path(library.load_library()._name)
    (tmp_path / built.name).write_bytes(built.read_bytes().replace(b"pagewise_int8_group\0", b"pagewise_int8_gruop\0"))
    with pytest.raises(library.LibraryMissingError) as refused:
        library.load_library(tmp_path)
    assert f"{tmp_path / built.name} is of another version, without pagewise_int8_group" in str(refused.value)
    assert "python -m pagewise_kernels.cpu.build" in str(refused.value)


def test_a_library_with_another_structure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_cpu_kernels()
    built = Path(library.load_library()._name)
    (tmp_path / built.name).write_bytes(built.read_bytes())
    size = ctypes.sizeof(AttentionArguments)

    class Longer(AttentionArguments):
        _fields_ = (("new", ctypes.c_int64),)

    monkeypatch.setattr(library, "AttentionArguments", Longer)
    with pytest.raises(library.LibraryMissingError) as refused:
        library.load_library(tmp_path)
    assert f"{tmp_path / built.name} is of another version" in str(refused.value)
    assert f"have {size} bytes, not {size + 8}; python -m pagewise_kernels.cpu.build" in str(refused.value)


def test_where_the_best_variant_is_missing_the_next_one_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    need_cpu_kernels()
    *others, best = variants()
    folder = Path(library.load_library()._name).parent
    if not others:
        pytest.skip("this processor runs one variant")
    for one in others:
        (tmp_path / one.file).write_bytes((folder / one.file).read_bytes())
    with built_in(tmp_path):
        assert library.load_library().variant == others[-1]
        assert library.load_library().narrower
        assert library.has_fast_products() == (others[-1].vec >= 8)
    (warning,) = caplog.messages
    assert f"{tmp_path / best.file} has not been built, so {others[-1].file} is used" in warning
    assert "python -m pagewise_kernels.cpu.build" in warning


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nothing_undefined_happens(tmp_path: Path) -> None:
    """All other tests of the CPU operations, with a build that ends the process at undefined behaviour."""
    pytest.importorskip("ziglang")
    checks = ("-fsanitize=undefined", "-fsanitize-trap=undefined", "-fno-sanitize=alignment")
    code = f"from pagewise_kernels.cpu import build; build.build(build.Path({str(tmp_path)!r}), extra={checks!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    files = [str(file) for file in Path(__file__).parent.glob("test_cpu*.py")]
    code = (
        "import pathlib, sys, pytest; from pagewise_kernels.cpu import build, library; "
        f"library.load_library.__wrapped__.__defaults__ = (pathlib.Path({str(tmp_path)!r}),); "
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'not long', *{files!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=FOLDER.parents[2])
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
