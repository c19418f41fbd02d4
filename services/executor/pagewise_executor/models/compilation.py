"""The process that compiles an executor's kernels while its weights are read: see ``compile_ahead``."""

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
"""After this time the executor goes on, and compiles the remaining kernels when it launches them."""
_OPTIONS = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype", "quantization", "deterministic", "block_size",
    "kv_dtype", "kv_layout", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras",
)  # fmt: skip
"""Options on which it depends which kernels there are."""
SHIPPED = Path(sys.prefix, "share", "pagewise", "kernels")
"""Kernels that were compiled when this installation was made: a cache of Triton's."""


class Ahead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose kernels are compiled: an executor's with these options, on a GPU of this compute ``capability`` (90 for
    9.0) with so many multiprocessors and bytes of memory, whose model is divided among so many ``ranks``."""

    config: ExecutorConfig
    capability: int
    num_sms: int = 132
    total_memory: int = 80 * 2**30
    ranks: int = 1

    @property
    def major(self) -> int:
        """The first number of the compute capability."""
        return self.capability // 10


class Compilation:
    """A process that compiles the kernels of ``ahead``. ``done``: the file that says that they are in the cache."""

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
        """Wait until the kernels are compiled, for a limited time. If that fails, the log says why."""
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

    None: they are in Triton's cache already, or cannot be compiled before they are launched. The first rank compiles
    for all, whose kernels are the same.
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
    """Compute what Triton computes before it first looks into its cache: a hash of itself, in 0.4 s, which it keeps."""
    with suppress(ImportError):  # another Triton may have it elsewhere, and computes it later
        from triton.runtime.cache import triton_key

        triton_key()


def link_shipped() -> None:
    """Enter the kernels that came with this installation into Triton's cache.

    Entries are linked as they are, because each names its files by their full paths. None is written again. Links into
    an installation that is gone are removed, because Triton could not write what they stand for.
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
    """Return the file in Triton's cache that says that these kernels are there, of this source and this Triton."""
    import pagewise_kernels
    import triton

    digest = hashlib.sha256(msgspec.json.encode(ahead) + triton.__version__.encode())
    kernels = sorted(Path(pagewise_kernels.__path__[0]).rglob("*.py"))
    for source in (path / "config.json", *kernels):
        digest.update(source.read_bytes())
    return Path(triton.knobs.cache.dir, f"pagewise-{digest.hexdigest()[:32]}")
