"""Starts ``compile_ahead``, a process that compiles an executor's kernels while its weights are read."""

import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.service_process import die_with_parent

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.families import read_llama_config
from pagewise_executor.models.llama_config import NotReadableError

log = logging.getLogger(__name__)

_MOST_SECONDS = 60
"""After this time the executor starts without waiting, and compiles the remaining kernels when it launches them."""
_OPTIONS = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype", "quantization", "deterministic", "block_size",
    "kv_dtype", "kv_layout", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras",
)  # fmt: skip
"""Options that change the set of kernels."""
SHIPPED = Path(sys.prefix, "share", "pagewise", "kernels")
"""Kernels that were compiled when this installation was made: a cache of Triton's."""


class Ahead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The executor whose kernels are compiled: its options, its GPU's compute ``capability`` (90 for 9.0), number of
    multiprocessors and bytes of memory, and the number of ``ranks`` that hold a part of the model each."""

    config: ExecutorConfig
    capability: int
    num_sms: int = 132
    total_memory: int = 80 * 2**30
    ranks: int = 1


class Compilation:
    """A process that compiles the kernels of ``ahead``. ``done``: the file whose existence marks them as cached."""

    def __init__(self, ahead: Ahead, done: Path) -> None:
        self._done, self._began = done, time.perf_counter()
        self._process = subprocess.Popen(  # noqa: S603  # nosec B603 # no shell
            [sys.executable, "-m", "pagewise_executor.compile_ahead", msgspec.json.encode(ahead).decode()],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # so it takes none of the GPU's memory
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )

    def wait(self) -> None:
        """Wait until the kernels are compiled, for a limited time. The reason of a failure is logged."""
        waited, said = time.perf_counter(), b"it takes too long"
        try:
            _, said = self._process.communicate(timeout=_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        now = time.perf_counter()
        if self._process.returncode == 0:
            with suppress(OSError):  # without it the next start looks again
                self._done.touch()
            log.info("kernels compiled beside the weights in %.1f s, waited for %.1f", now - self._began, now - waited)
        else:
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            log.warning("the start takes longer, since kernels are compiled when they are launched: %s", last)


def begin_compilation(config: ExecutorConfig, path: Path, device: torch.device, ranks: Ranks) -> Compilation | None:
    """Begin to compile the Triton kernels of the model in the folder ``path``, or of this rank's part of it.

    None: they are in Triton's cache already, or cannot be compiled before they are launched. Rank 0 compiles for all
    ranks, which have the same kernels.
    """
    if device.type != "cuda" or not ranks.first:
        return None
    from pagewise_kernels.launch import begins_early

    threading.Thread(target=_hash_triton, name="hash of Triton", daemon=True).start()
    try:
        read_llama_config(path)
    except NotReadableError as error:
        log.info("kernels of %s are compiled when they are launched: %s", config.model, error)
        return None
    gpu = torch.cuda.get_device_properties(device)
    options = {name: getattr(config, name) for name in _OPTIONS}
    early = config.dependent_launch and begins_early(device)
    ahead = Ahead(
        config=ExecutorConfig(model=str(path.resolve()), dependent_launch=early, **options),
        capability=10 * gpu.major + gpu.minor,
        num_sms=gpu.multi_processor_count,
        total_memory=gpu.total_memory,
        ranks=ranks.size,
    )
    link_shipped()
    done = _mark(ahead, path)
    return None if done.exists() else Compilation(ahead, done)


def _hash_triton() -> None:
    """Let Triton compute the hash of its own files, in 0.4 s, before its cache needs it."""
    with suppress(ImportError):  # the module of another Triton may have another name: it hashes at its first look-up
        from triton.runtime.cache import triton_key

        triton_key()


def link_shipped() -> None:
    """Link the kernels that came with this installation into Triton's cache.

    Entries are linked and not copied, because each names its files by their full paths. Links into an installation that
    is gone are removed, because Triton could not write entries in their place.
    """
    import triton

    cache = Path(triton.knobs.cache.dir)
    for entry in cache.glob("*"):
        if entry.is_symlink() and not entry.exists():
            with suppress(OSError):
                entry.unlink()
    for entry in SHIPPED.iterdir() if SHIPPED.is_dir() else ():
        with suppress(OSError):  # it is there already, or the cache cannot be written, which a launch will report
            cache.mkdir(parents=True, exist_ok=True)
            (cache / entry.name).symlink_to(entry)


def _mark(ahead: Ahead, path: Path) -> Path:
    import pagewise_kernels
    import triton

    digest = hashlib.sha256(msgspec.json.encode(ahead) + triton.__version__.encode())
    kernels = sorted(Path(pagewise_kernels.__path__[0]).rglob("*.py"))
    for source in (path / "config.json", *kernels):
        digest.update(source.read_bytes())
    return Path(triton.knobs.cache.dir, f"pagewise-{digest.hexdigest()[:32]}")
