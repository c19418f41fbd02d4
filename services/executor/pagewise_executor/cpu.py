"""How many CPU threads torch uses, and which types the processor computes fast."""

from typing import Literal

import torch
from pagewise_shared.cpu_threads import available_cores


def set_cpu_threads(threads: int | Literal["auto"]) -> int:
    """Give torch ``threads`` threads, or as many as this process has cores of its own; return the number."""
    count = available_cores() if threads == "auto" else threads
    torch.set_num_threads(count)
    return count


def device_name(device: torch.device) -> str:
    """Return what people call the device."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def computes_bfloat16() -> bool:
    """Return whether this processor has instructions for products of bfloat16: AVX-512 BF16, AMX, or Arm's BF16.

    Without them oneDNN converts to float32 and back, which takes longer than to compute in float32.
    """
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_tile", "bf16"))
