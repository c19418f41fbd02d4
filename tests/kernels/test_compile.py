"""Every kernel compiles to machine code of GPUs that are not there, without spilling and within their shared memory."""

import json
import os
import subprocess
import sys

import pytest
from pagewise_kernels.machine_code import loop_sizes_of_text

from tests.kernels.bars import BARS

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
NUM_KERNELS = 21
MOST_SPILLED = 96
"""Bytes per thread: a few values at the edges of a loop, none inside one that matters."""
VARIANTS = (
    *("fp16", "d128 fp32", "d64", "d80", "d96", "d256", "lora r64", "lora r256"),
    *("tile", "gemma", "phi-3", "falcon", "window", "short"),
)
"""In the names of cases that ``make test-long`` compiles: every kernel has cases that are called otherwise."""


def compiled(target: int, *options: str) -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pagewise_kernels.compile", "--target", str(target), "--json", *options]
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
        pytest.param(80, ("fp8",), marks=pytest.mark.long, id="80, all variants"),
    ],
)
def test_kernels_compile_without_a_gpu(target: int, without: tuple[str, ...]) -> None:
    loops = [f"--loops={case}" for case in sorted({case for case, _ in BARS})] if target == 90 else []
    found = compiled(target, *(["--without", *without] if without else []), *loops)
    assert len({str(kernel["kernel"]) for kernel in found}) == NUM_KERNELS
    for kernel in found:
        assert "fp8" not in str(kernel["case"]) or target > 80
        name = f"{kernel['case']}: {kernel['kernel']}"
        assert int(str(kernel["spilled"])) <= MOST_SPILLED, name
        assert int(str(kernel["shared"])) <= SHARED_BYTES[target], name
        if kernel["kernel"] == "attention_kernel" and "fp32" not in str(kernel["case"]):
            wide = int(str(kernel["constants"]["M"])) >= 64  # type: ignore[index]
            assert kernel["mma"] == ("wgmma" if wide and target == 90 else "mma"), name
    if target == 90:
        check_bars(found)


def check_bars(found: list[dict[str, object]]) -> None:
    """What is fast by the instructions that it takes stays so: another compiler or another line may double them."""
    failed, seen = [], set()
    for kernel in found:
        key = str(kernel["case"]), str(kernel["kernel"])
        if (bar := BARS.get(key)) is None:
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
    assert seen == set(BARS), f"no case compiles {set(BARS) - seen}"


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
    assert loop_sizes_of_text(code) == [2, 4]
    straight = """
            /*0000*/ MOV R1, R2 ;
            /*0010*/ EXIT ;
    .L_x_0:
            /*0020*/ BRA `(.L_x_0) ;
            /*0030*/ NOP ;
    """
    assert loop_sizes_of_text(straight) == [3]
