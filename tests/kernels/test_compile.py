"""Every kernel compiles to machine code of GPUs that are not there, without spilling and within their shared memory."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import triton

from benchmarks.compile.machine_code import innermost_loops, too_early
from tests.kernels.bars import (
    BARS,
    MOST_RELOADED,
    MOST_SPILLED,
    MOST_SPILLED_PREPARED,
    MOST_SPILLED_SPECIALISED,
    Bars,
)

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
SHARED_BYTES_OF_ALL = {80: 164 * 1024, 90: 228 * 1024}
"""Of the programs of a multiprocessor together, each of which takes 1 KiB more than its own."""
NUM_KERNELS = 38
VERSION = triton.__version__.rpartition(".")[0]
EXPONENTIALS = 66
"""Of each thread of prefill by specialised warps, for a tile: 64 weights, and two for the sums of its rows so far."""
LEAST_IN_FLIGHT = 48 * 1024
"""Bytes on their way to a multiprocessor: 1/132 of 4.3 TB/s for a latency of 1 µs is 33 KB."""
MOST_IMPRECISE = 256
"""Products of float8 whose sum Hopper's tensor cores may keep in about 14 bits."""
WEIGHTS_OF_COLUMN = {
    "skinny_linear_kernel": 1, "expert_gate_up_kernel": 2, "expert_down_kernel": 1,
    "mxfp4_gate_up_kernel": 1, "mxfp4_down_kernel": 1, "int4_linear_kernel": 1,
}  # fmt: skip
"""Kernels that read weights as fast as they can, and how many rows of these a column of their results takes."""
NEVER_EARLY = {"copy_blocks_kernel", "move_blocks_kernel", "move_tokens_kernel", "specialised_prefill_kernel"}
"""Kernels that begin when all before them have ended: steps do not launch them between others, or for milliseconds."""
VARIANTS = (
    *("fp16", "decode fp32", "d128 fp32", "d64", "d80", "d96", "d256", "d512", "lora r64", "lora r256"),
    *("tile", "gemma", "llama-4", "phi-3", "falcon", "window", "short", "20 heads", "latents of 256", "512 fp32"),
    *("qwen2-7b", "blocks of", "fp8 deterministic", "int4 deterministic", "groups of 7", "fp8 of fp32", "experts fp32"),
    *("rows 256", "tokens 1024", "tokens 64", "(16, 32)", "inputs bf16", "linear fp32", "r16 fp32", "groups 32"),
)
"""In the names of cases that ``make test-long`` compiles: every kernel has cases that are called otherwise."""


def compiled(target: int, *options: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compile.run", "--target", str(target), "--json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "FP_FUSION" not in done.stderr, "Triton warns where a launch does not say"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("target", "without"),
    [
        pytest.param(90, VARIANTS, id="90"),
        pytest.param(90, (), marks=pytest.mark.long, id="90, all variants"),
        # Compute capability 8.9 brought float8.
        pytest.param(80, ("fp8", "rounded", "specialised"), marks=pytest.mark.long, id="80, all variants"),
    ],
)
def test_kernels_compile_without_a_gpu(target: int, without: tuple[str, ...]) -> None:
    loops = [f"--loops={case}" for case in sorted({case for case, _ in BARS.get(VERSION, {})})] if target == 90 else []
    found = compiled(target, *(["--without", *without] if without else []), *loops)
    assert len({str(kernel["kernel"]) for kernel in found}) == NUM_KERNELS - ("specialised" in without)
    for kernel in found:
        assert "fp8" not in str(kernel["case"]) or target > 80
        name = f"{kernel['case']}: {kernel['kernel']}"
        specialised = kernel["kernel"] == "specialised_prefill_kernel"
        most = MOST_SPILLED_SPECIALISED if specialised else MOST_SPILLED.get(VERSION, max(MOST_SPILLED.values()))
        if kernel["kernel"] == "prepare_kernel" and target < 90:
            most = MOST_SPILLED_PREPARED
        assert int(str(kernel["spilled"])) <= most, name
        assert int(str(kernel["shared"])) <= SHARED_BYTES[target], name
        assert int(str(kernel["imprecise"])) <= MOST_IMPRECISE, name
        begins_early = target >= 90 and kernel["kernel"] not in NEVER_EARLY
        assert kernel["too_early"] == ([] if begins_early else None), name
        assert kernel["lets_next"] == begins_early, name
        if kernel["kernel"] in WEIGHTS_OF_COLUMN and target == 90 and "fp32" not in str(kernel["case"]):
            assert kernel["mma"] == "wgmma", f"{name}: weights go through registers"
            # Decoding numbers takes so many instructions that codes are read at half this speed at most.
            assert in_flight(kernel) >= LEAST_IN_FLIGHT // (2 if "mxfp4" in name or "int4" in name else 1), name
        if str(kernel["kernel"]).endswith("decode_attention_kernel"):
            threads = 32 * int(str(kernel["num_warps"]))
            programs = 65536 // (threads * int(str(kernel["constants"]["maxnreg"])))  # type: ignore[index]
            assert programs * (int(str(kernel["shared"])) + 1024) <= SHARED_BYTES_OF_ALL[target], name
        if specialised:
            assert kernel["mma"] == "wgmma", name
            assert kernel["loops"] is None or set(kernel["hidden"]) == {EXPONENTIALS}, f"{name}: {kernel['hidden']}"  # type: ignore[call-overload]
            assert int(str(kernel["reloaded"])) <= MOST_RELOADED.get(VERSION, max(MOST_RELOADED.values())), name
        if "attention_kernel" in str(kernel["kernel"]) and "fp32" not in str(kernel["case"]):
            wide = int(str(kernel["constants"]["M"])) >= 64  # type: ignore[index]
            assert kernel["mma"] == ("wgmma" if wide and target == 90 else "mma"), name
    if target == 90:
        if VERSION not in BARS:
            pytest.skip(f"everything compiles, but there are no bars for Triton {VERSION}")
        bars = BARS[VERSION].items()
        check_bars(found, {key: bar for key, bar in bars if not any(text in key[0] for text in without)})


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kernels_fit_into_the_shared_memory_of_compute_capability_12() -> None:
    for kernel in compiled(120, "--without", *VARIANTS, "specialised"):
        assert int(str(kernel["shared"])) <= 99 * 1024, f"{kernel['case']}: {kernel['kernel']}"


def in_flight(kernel: dict[str, Any]) -> int:
    """Bytes of weights that are on their way to a multiprocessor while the programs of such a kernel compute."""
    constants, shared = kernel["constants"], int(kernel["shared"])
    gated = constants.get("GATED") == "True"
    columns = int(constants["COLUMNS"]) * (2 if gated else WEIGHTS_OF_COLUMN[kernel["kernel"]])
    rows, inner = int(constants["ROWS"]), int(constants.get("INNER", 128))
    size = 1 if "8" in constants["COMPUTE"] else 2
    bits = 4 if "NUMBERS" in constants else 8 * size
    stages = shared // (columns * inner * bits // 8 + rows * inner * size)
    programs = (SHARED_BYTES[90] + 1024) // (shared + 1024)
    return programs * (stages - 1) * columns * inner * bits // 8


def check_bars(found: list[dict[str, object]], bars: Bars) -> None:
    """Kernels that need few instructions keep them: another compiler or another line may double their number."""
    failed, seen = [], set()
    for kernel in found:
        key = str(kernel["case"]), str(kernel["kernel"])
        if (bar := bars.get(key)) is None:
            continue
        seen.add(key)
        taken = kernel["registers"], kernel["loops"], kernel["spilled"]
        if (
            int(str(kernel["registers"])) > bar.registers
            or int(str(kernel["spilled"])) > bar.spilled
            or len(kernel["loops"]) != len(bar.loops)  # type: ignore[arg-type]
            or any(size > most for size, most in zip(kernel["loops"], bar.loops, strict=True))  # type: ignore[call-overload]
        ):
            failed.append(f"{key}: registers, loops, spilled are {taken}, at most {tuple(bar)} are allowed")
    assert not failed, "\n".join(failed)
    assert seen == set(bars), f"no case compiles {set(bars) - seen}"


def test_what_comes_before_the_wait_is_found() -> None:
    ptx = """
        ld.param.b64 %rd1, [kernel_param_0];
        @%p1 bra $L__BB0_2;
        prefetch.global.L2 [%rd1];
    $L__BB0_2:
        {}
        griddepcontrol.wait;
        ld.global.b32 %r1, [%rd1];
        @%p1 bra $L__BB0_3;
        st.global.b32 [%rd1], %r1;
    $L__BB0_3:
        ret;
    """
    assert too_early(ptx.replace("{}", "")) == []
    assert too_early(ptx.replace("griddepcontrol.wait;", "")) is None
    for text, found in (
        ("ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd2 + 0 ];", "ld.global"),
        ("@%p2 st.relaxed.gpu.global.b32 [%rd1], %r1;", "st.relaxed.gpu.global"),
        ("atom.global.gpu.acq_rel.add.s32 %r1, [%rd1], 1;", "atom.global"),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd2 + 0 ], 0x10, 0x10;", "cp.async"),
        ("bra.uni $L__BB0_3;", "$L__BB0_3"),
        ("@%p2 ret;", "ret"),
    ):
        assert too_early(ptx.replace("{}", text)) == [found]
    code = """
            /*0000*/ CCTL.E.PF2 [R2] ;
            /*0010*/ @P0 {} ;
            /*0020*/ ACQBULK ;
            /*0030*/ LDG.E.128 R4, desc[UR6][R2.64+0x800] ;
            /*0040*/ EXIT ;
    """
    assert too_early(code.replace("{}", "MOV R1, R2")) == []
    for text in ("LDG.E R4, desc[UR6][R2.64]", "LDGSTS.E.BYPASS.128 [R5], desc[UR6][R2.64]", "EXIT"):
        assert too_early(code.replace("{}", text)) == [text.split(".")[0]]


def test_innermost_loops_are_counted() -> None:
    code = """
    .L_x_0:
            /*0000*/ MOV R1, R2 ;
    .L_x_1:
            /*0010*/ IADD3 R1, R1, R2, RZ ;
            /*0020*/ @P0 BRA `(.L_x_1) ;
            /*0030*/ @!P1 BRA `(.L_x_3) ;
    .L_x_2:
            /*0040*/ IADD3 R1, R1, R2, RZ ;
            /*0050*/ @P2 BRA `(.L_x_2) ;
            /*0060*/ FADD R3, R3, R4 ;
            /*0070*/ @P3 BRA.U `(.L_x_2) ;
            /*0080*/ @P4 BRA `(.L_x_0) ;
    .L_x_3:
            /*0090*/ EXIT ;
    .L_x_4:
            /*00a0*/ BRA `(.L_x_4) ;
    """
    assert [len(loop) for loop in innermost_loops(code)] == [2, 4]
    straight = """
            /*0000*/ MOV R1, R2 ;
            /*0010*/ EXIT ;
    .L_x_0:
            /*0020*/ BRA `(.L_x_0) ;
            /*0030*/ NOP ;
    """
    assert [len(loop) for loop in innermost_loops(straight)] == [3]
