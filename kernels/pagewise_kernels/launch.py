"""How kernels are launched: on a device, by the interpreter, or not at all but compiled.

``launch`` makes every launch, so a choice of configuration exists once: ``compile.py`` compiles without a GPU exactly
the kernels that run on a GPU.
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import triton

from pagewise_kernels.handles import Handles

log = logging.getLogger(__name__)

NOMINAL_SMS = 132
"""Multiprocessors that are assumed where there is no GPU: as many as an H100 or H200 has."""

Watcher = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
_watcher: Watcher | None = None
_watched_capability, _watched_sms = 90, NOMINAL_SMS
_pretends = False
_depends = True
_handles: Handles | None = Handles()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when this package was imported)."""
    return _INTERPRETED


_INTERPRETED = bool(triton.knobs.runtime.interpret)


def called_by_kernels(function: Callable[..., object]) -> Any:
    """``triton.jit`` of a function with global constants, which kernels call.

    Triton's key of a kernel includes the constants of a function that it calls only if the function has its own key
    already. So the key would depend on which kernel is launched first, and kernels that another process has compiled
    would not be found in the cache.
    """
    made: Any = triton.jit(function)
    if not _INTERPRETED:
        made.cache_key  # noqa: B018 # it is computed, and kept
    return made


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: object) -> None:
    """Run ``kernel`` on ``grid``; ``options`` are its constants, ``num_warps`` and ``num_stages``.

    Triton compiles anew where an integer becomes 1 or divisible by 16, and where a pointer is aligned. Counts of a step
    are exempt (``do_not_specialize``), so that nothing is compiled in the middle of serving.

    Nothing is launched on an empty grid, nor while the calls are watched by the compiler. Products and sums are fused
    unless ``enable_fp_fusion`` is False: Triton 3.9 warns where it is not given, and its default may change.

    A kernel whose last constant is ``PDL`` begins before the one before it has ended (see ``dependent_launch``), where
    the device of its first argument, a tensor, can do that.
    """
    if 0 in grid:
        return
    if kernel.arg_names[-1] == "PDL" and begins_early(arguments[0].device):
        options["PDL"] = options["launch_pdl"] = True
    options.setdefault("enable_fp_fusion", True)
    if _watcher is not None:
        _watcher(kernel, arguments, options)
    elif _handles is None or _INTERPRETED:
        kernel[grid](*arguments, **options)
    else:
        _handles.launch(kernel, grid, arguments, options)


def watch_launches(watcher: Watcher | None, capability: int = 90, sms: int = NOMINAL_SMS) -> None:
    """Hand every launch to ``watcher``, for a device of ``capability`` with ``sms`` multiprocessors, instead of running
    it; None ends that."""
    global _watcher, _watched_capability, _watched_sms
    _watcher, _watched_capability, _watched_sms = watcher, capability, sms


def use_handles(use: bool) -> None:
    """Launch by the handles of compiled kernels (see ``handles``), as is done from the start, or through Triton."""
    global _handles
    _handles = Handles() if use else None


def use_dependent_launch(use: bool) -> None:
    """Let kernels that can wait for the one before them begin early, as is done from the start, or not."""
    global _depends
    _depends = use


def begins_early(device: torch.device) -> bool:
    """Whether kernels on ``device`` begin before the one before them has ended: from compute capability 9.0 on."""
    if not _depends or _INTERPRETED:
        return False
    if _watcher is not None or device.type != "cuda":
        return _watched_capability >= 90
    return _can_begin_early(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _can_begin_early(index: int) -> bool:
    # Launches of this kind can be captured into a graph from 12.3 on.
    return torch.cuda.get_device_capability(index) >= (9, 0) and _driver_version() >= 12030


@functools.cache
def _driver_version() -> int:
    """Return the version of CUDA that the GPU's driver is for, 12030 for 12.3; 0 if the driver does not say.

    Source: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VERSION.html
    """
    version = ctypes.c_int()
    try:
        if error := ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            raise OSError(f"cuDriverGetVersion returned {error}")
    except (OSError, AttributeError) as error:
        log.warning("kernels begin one after the other: the version of the GPU's driver cannot be read: %s", error)
        return 0
    if version.value < 12030:
        log.warning(
            "kernels begin one after the other: the driver is for CUDA %d.%d, not 12.3",
            *divmod(version.value // 10, 100),
        )
    return version.value


def num_unfrozen_launches() -> int:
    """The number of launches that Triton made in place of a handle; the log has the reason."""
    return _handles.num_unfrozen if _handles is not None else 0


def pretend_gpu(capability: int | None) -> None:
    """Treat tensors of the CPU as tensors of a GPU of ``capability``, with a fake of Triton's driver; None ends that.

    Kernels compute nothing then.
    """
    global _pretends, _watched_capability
    _pretends, _watched_capability = capability is not None, capability or 90


def device_type() -> str:
    """Where tensors lie for these kernels, "cuda" or "cpu"."""
    return "cpu" if _INTERPRETED or _pretends else "cuda"


def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` has the shared memory of Hopper or of the data centre's GPUs after it, 227 KiB for a program.
    GPUs of compute capability 12 have 99 KiB."""
    return 90 <= capability(device) < 120


def capability(device: torch.device) -> int:
    """The compute capability of ``device``, 90 for 9.0; where there is no GPU, that which is compiled for."""
    if _watcher is not None or device.type != "cuda":
        return _watched_capability
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def check_device(first: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Check that all tensors are on one device, and that kernels can run there. None: no tensor.

    Raises:
        ValueError: they do not, or cannot.
    """
    device = first.device
    for tensor in others:
        if tensor is not None and tensor.device != device:
            devices = {str(each.device) for each in (first, *others) if each is not None}
            raise ValueError(f"tensors lie on different devices: {', '.join(sorted(devices))}")
    if _watcher is None and device.type != device_type():
        wanted = "the CPU, because TRITON_INTERPRET=1 is set" if _INTERPRETED else "a CUDA device"
        raise ValueError(f"tensors lie on {device}, these kernels run on {wanted}")


@functools.cache
def _num_sms(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_sms(device: torch.device) -> int:
    """Multiprocessors of ``device``."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _watched_sms
    return _num_sms(device.index if device.index is not None else torch.cuda.current_device())
