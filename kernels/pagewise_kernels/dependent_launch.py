"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits for it by itself.

On devices that can (``launch.begins_early``), kernels whose last constant is ``PDL`` are launched so. The scheduling of
the kernel and its computation of addresses then overlap with the kernel before. One rule keeps the results of a
sequence of kernels:

    Every program of such a kernel calls ``wait_for_predecessor``, outside any branch, before it reads or writes
    anything in global memory.

Why that is enough:

- The wait ends when the kernel before has ended as a whole and its writes are visible (PTX, ``griddepcontrol.wait``:
  all prerequisite grids have completed). If that kernel was launched so too, it ended only after its own programs had
  waited for the one before it, and so on. So behind the wait every kernel that was launched before has ended, just as
  without early begins: no reader is too early, and no writer overwrites data that an earlier kernel still reads,
  however many kernels ago a buffer, a counter or a page of the caching allocator was used.
- A kernel of others before it (cuBLAS, PyTorch, NCCL) began when all before that had ended, or waits likewise. If it
  does not mention its dependents, these begin when its programs are through, but its writes may be under way still: the
  wait is needed, and enough, there as well.
- A kernel or copy that comes after and was launched without it, and an event that is recorded after, begin when all of
  the kernel before has ended. That kernel has waited, so all earlier kernels have ended, too.
- A kernel that was launched so and did not wait would race, and its successors with it. That is why ``launch``
  follows the constant: without it a kernel is never launched so.
- Programs allow right behind their own wait that dependents are scheduled. These begin when all programs of the kernel
  have allowed it, thus run on a multiprocessor: a waiting program never takes the place of a program that it waits for.
- Nothing here is launched cooperatively (``launch_cooperative_grid``): such a grid has to be resident as a whole.

In the capture of a CUDA graph the same launch makes a programmatic edge, since CUDA 12.3, with the same meaning.
Where the predecessor is no kernel (a copy, an event that is waited for, the begin of a graph) nothing begins early.

Weights do not change while a model is served, but they are not read before the wait either: the kernel before may write
them, in a test or while a model is loaded, and a load leaves a line in the L1 cache. To prefetch is no read.
``prefetch_rows`` brings lines to the L2 cache, through which all writes go, so nothing stale is read later.
"""

import triton
import triton.language as tl

from pagewise_kernels.launch import called_by_kernels

_LINE_BITS = tl.constexpr(8 * 128)
"""Of a line of the L2 cache."""


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until the kernel before has ended, and let the next one be scheduled; nothing without ``PDL``."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@called_by_kernels
def prefetch_rows(rows, size, FIRST: tl.constexpr):
    """Bring the ``FIRST`` elements of each row to the L2 cache; ``rows`` [n]: pointers to rows of ``size`` elements.

    FIRST is a power of two; elements behind ``size`` are left out. Only where ``PDL`` is set: it needs no wait.
    """
    line: tl.constexpr = _LINE_BITS // rows.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, FIRST // line if line < FIRST else 1) * line
    at = rows[:, None] + tl.minimum(lines, size - 1)[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)
