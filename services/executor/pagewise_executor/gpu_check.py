"""Says why torch does not use an NVIDIA GPU that this machine has."""

import os
import re
from pathlib import Path

import torch

_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""By the first number of CUDA's version: the first driver that runs programs built for it."""
_INDEX = "https://download.pytorch.org/whl"


def why_no_gpu(root: Path = Path("/"), built_for: str | None = torch.version.cuda) -> str:
    """Return why torch sees no CUDA device though there is an NVIDIA GPU, and what to do; "" if there is no GPU.

    ``root``: where /dev and /proc lie. ``built_for``: the version of CUDA that torch is built for.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not list((root / "dev").glob("nvidia[0-9]*")):
        return ""
    if built_for is None:
        return (
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} is built for the CPU alone: pip install "
            f"--force-reinstall --index-url {_INDEX}/cu130 torch=={torch.__version__.partition('+')[0]}"
        )
    driver = _driver(root / "proc/driver/nvidia/version")
    oldest = _OLDEST_DRIVER.get(int(built_for.partition(".")[0]), 0)
    if driver and int(driver.partition(".")[0]) < oldest:
        return (
            f"the NVIDIA driver {driver} is too old for CUDA {built_for}, which torch {torch.__version__} is built "
            f"for: install driver {oldest} or newer, or a torch that is built for an older CUDA ({_INDEX}/cu126)"
        )
    return f"torch sees no CUDA device though this machine has an NVIDIA GPU: {_reason()}"


def why_unfit(device: torch.device) -> str:
    """Return why this torch has no code for a CUDA device; "" if it has."""
    major, minor = torch.cuda.get_device_capability(device)
    known = [int(name[3:]) for name in torch.cuda.get_arch_list() if re.fullmatch(r"sm_\d+", name)]
    if not known or 10 * major + minor >= min(known):
        return ""
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and torch {torch.__version__} "
        f"is built for {min(known) / 10} and newer: --device cpu computes without it"
    )


def _driver(file: Path) -> str:
    """Return the version of the NVIDIA driver; "" if it does not say."""
    match = re.search(r"\s(\d{3,}\.\d+(\.\d+)?)\s", file.read_text()) if file.exists() else None
    return match[1] if match else ""


def _reason() -> str:
    """Return what CUDA says when it is started."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        text = str(error).strip()
        return text.splitlines()[0] if text else type(error).__name__
    return "nvidia-smi says whether the driver sees it"
