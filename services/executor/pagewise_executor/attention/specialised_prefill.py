"""Attention of prefill chunks by our kernel for Hopper with specialised warps, as one of the libraries to choose from.

Nothing interprets the language of this kernel, so only a device shows whether it works there. A kernel that waits
for ever, or makes an illegal access, ends the process in which it runs. So its trial runs in a process of its own
before an executor launches it, once for each kind of layer, device and version; the verdict is kept beside the kernels
that Triton has compiled.

    python -m pagewise_executor.attention.specialised_prefill    (reads a trial as JSON, and prints the error)
"""

import hashlib
import inspect
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from pagewise_kernels.kv_layer import KVLayer

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.attention.prefill_libraries import (
    TOLERANCE,
    Attend,
    ChunkTables,
    PrefillLibrary,
    largest_difference,
    with_small_limits,
)

log = logging.getLogger(__name__)

_SECONDS = 120.0
"""For a trial: imports, the compilation of a kernel, and two small launches."""
_TRYING = threading.Lock()
"""Held during a trial, so that a start that needs its verdict waits for it."""


class SpecialisedPrefill(PrefillLibrary):
    """The kernel ``specialised_prefill_attention`` as a ``PrefillLibrary``."""

    name = "gluon"

    def error(self, shape: AttentionShape) -> str:
        """Return why the kernel cannot compute such layers here, found by a trial the first time; empty if it can."""
        from pagewise_kernels.attention.specialised import specialised_error

        others = (shape.window, shape.softcap, shape.attention_chunk, shape.sinks, shape.shared)
        if any(others):
            return "it has no windows, caps, sinks, attention chunks, and keys that overlap with values"
        size, device = self.block_size, self.device
        error = specialised_error(shape.heads, shape.kv_heads, shape.head_dim, size, shape.dtype, device)
        return error or _trial_error(shape, size, device)

    def plan(self, shape: AttentionShape, tables: ChunkTables) -> Attend:
        """Prepare the attention of a step's layers of one kind."""
        from pagewise_kernels.attention import Chunk, PrefillPlan
        from pagewise_kernels.attention.specialised import SPECIALISED, specialised_prefill_attention

        _, _, blocks = tables.on_device()
        first, chunks = 0, []
        for row, chunk in enumerate(tables.chunks):
            chunks.append(Chunk(first, chunk.start, chunk.size, row))
            first += chunk.size
        plan = PrefillPlan(
            chunks, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, kv_dtype=shape.dtype,
            device=blocks.device, config=SPECIALISED, upload=tables.upload,
        )  # fmt: skip

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return specialised_prefill_attention(q, KVLayer(keys, values), blocks, plan, scale=shape.scale)

        return attend


def begin_trials(shapes: Sequence[AttentionShape], block_size: int, device: torch.device) -> None:
    """Begin the trials that layers of these shapes need, on a thread beside the reading of weights.

    They take 10 s on a device that has no verdict yet. ``SpecialisedPrefill.error`` waits for their verdicts.
    """
    library = SpecialisedPrefill(block_size, device)

    def run() -> None:
        with suppress(Exception):  # the choice meets the same error again and reports it
            for shape in dict.fromkeys(shapes):
                library.error(shape)

    threading.Thread(target=run, name="trials of gluon", daemon=True).start()


def _trial_error(shape: AttentionShape, block_size: int, device: torch.device) -> str:
    """Return why the kernel does not work in a process of its own; empty if it gives PyTorch's results there."""
    import triton
    from pagewise_kernels.attention import specialised, specialised_kernel

    trial = {**asdict(shape), "dtype": str(shape.dtype).removeprefix("torch."), "block_size": block_size}
    source = inspect.getsource(specialised_kernel) + inspect.getsource(specialised)
    known = [trial, source, torch.__version__, triton.__version__, torch.cuda.get_device_name(device)]
    name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
    kept = Path(triton.knobs.cache.dir) / f"pagewise-prefill-{name}.json"
    with _TRYING:
        return _verdict(kept, {**trial, "device": device.index or 0})


def _verdict(kept: Path, trial: dict[str, object]) -> str:
    """Return the verdict in the file ``kept``; if there is none, try the kernel and write it there."""
    try:
        error = str(json.loads(kept.read_text())["error"])
        # It may have been the machine's: a device that was full, for instance.
        return error and f"{error}, when it was tried before; without {kept} it is tried again"
    except (OSError, ValueError, KeyError):
        log.info("attention of prompts: gluon is tried in a process of its own, for the first time on this device")
    error = try_apart(trial)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"error": error}))
    except OSError as failure:
        log.warning("each start tries the attention of prompts by gluon anew: its verdict cannot be kept: %s", failure)
    return error


def try_apart(trial: dict[str, object]) -> str:
    """Run the kernel on a small problem in a process of its own; return why it does not work, empty if it does.

    ``trial``: the fields of an ``AttentionShape``, ``block_size`` in tokens, and the index of the ``device``.
    """
    command = [sys.executable, "-m", "pagewise_executor.attention.specialised_prefill"]
    try:
        ended = subprocess.run(  # noqa: S603  # nosec B603 # no shell, and our own module
            command, input=json.dumps(trial), capture_output=True, text=True, timeout=_SECONDS, check=False,
            start_new_session=True,  # Ctrl-C is no verdict
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not end within {_SECONDS:.0f} s"
    except OSError as error:
        return f"it cannot be tried: {error}"
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        reason = (ended.stderr.strip().splitlines() or [""])[-1]
        return f"its process ended with {ended.returncode}: {reason}"
    difference = float(lines[-1])
    # It may be no number.
    return "" if difference <= TOLERANCE else f"results differ from PyTorch's by {difference:.3f}"


def main() -> None:
    """Compute a trial, and print by how much its results differ from PyTorch's."""
    signal.alarm(int(_SECONDS))  # also if the executor has ended meanwhile
    trial = json.load(sys.stdin)
    device, block_size = torch.device("cuda", trial.pop("device")), trial.pop("block_size")
    torch.cuda.set_device(device)
    shape = AttentionShape(**{**trial, "dtype": getattr(torch, trial["dtype"])})
    print(largest_difference(SpecialisedPrefill(block_size, device), with_small_limits(shape)))


if __name__ == "__main__":
    main()
