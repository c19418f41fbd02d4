"""Launches compiled kernels without Triton's binder, which takes more of the host's time than the launch itself.

Triton makes the first launch of each kind, and compiles the kernel. The compiled kernel and its launcher are kept as a
handle. Later launches of the kind call the launcher with their arguments. Two launches are of one kind if Triton would
use the same compiled kernel. It specialises kernels for

- the device, constants, and options such as ``num_warps`` and ``num_stages``,
- the type of every argument: for a tensor the type of its elements, for an integer its width,
- pointers and integers that are divisible by 16, and integers that are 1.

Arguments that are exempt (``do_not_specialize``) make kinds of their own here, which share a compiled kernel. Triton
also reads its knobs in each launch, and looks whether globals that a kernel uses have changed; here only the first
launch of a kind does that. While launch hooks are set, Triton launches all kernels, and calls the hooks.

All of this relies on how Triton calls the launcher of a compiled kernel in ``JITFunction.run``, and on the launcher's
own calls, which Triton does not promise. So only ``TRITON_VERSIONS`` use handles. With other versions, and if Triton's
interface is not as expected, Triton launches the kernel: this is logged once, and ``num_unfrozen`` counts these
launches.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import triton

log = logging.getLogger(__name__)

Arguments = tuple[Any, ...]
Options = dict[str, Any]
Kind = tuple[object, ...]
_Launcher = Callable[[tuple[int, ...], Arguments, Options], Kind | None]

TRITON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""The versions for which ``tests/kernels/launches.py`` found that handles give the driver the same calls as Triton."""

_VERSION = ".".join(triton.__version__.split(".")[:2])
_LAUNCHER = ["gridX", "gridY", "gridZ", "stream", "function"]
"""The first parameters of a launcher. The metadata of the kernel comes next, then the metadata for hooks, the hooks
before and after the launch, and the kernel's arguments."""
_NO_HOOKS = (None, None, None)
_NO_SCRATCH = (None, None)
_MOST_KINDS = 10_000
"""Kinds do not depend on the load, so there are some hundreds. So many are an error, and all are dropped."""


class _Handle(NamedTuple):
    """How a compiled kernel is launched: ``run`` gets grid and stream, ``before``, and the arguments.

    ``constants``: placeholders, behind the other arguments, for constants, which are compiled in; None: arguments are
    one list, without constants.
    """

    run: Callable[..., None]
    before: tuple[object, ...]
    constants: tuple[None, ...] | None


class _IntKinds(dict[int, int]):
    """The kind of each integer for Triton: whether it is 1 or divisible by 16, and the width of its type."""

    def __missing__(self, value: int) -> int:
        if len(self) >= _MOST_KINDS:
            self.clear()
        width = 0 if -(2**31) <= value < 2**31 else 1 if value < 2**63 else 2
        self[value] = kind = 3 * width + (1 if value == 1 else 2 if value % 16 == 0 else 0)
        return kind


class Handles:
    """The handles of all kinds of launches so far. ``num_unfrozen``: launches by Triton whose kind was not new."""

    def __init__(self) -> None:
        self.num_unfrozen = 0
        self._handles: dict[object, dict[Kind, _Handle]] = {}
        self._launchers: dict[object, _Launcher] = {}
        self._refused: set[tuple[object, Kind]] = set()

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: Arguments, options: Options) -> None:
        """Run ``kernel[grid](*arguments, **options)``, where the constants are among the options."""
        try:
            launcher = self._launchers.get(kernel.fn) or self._add(kernel, arguments)
            kind = launcher(grid, arguments, options)
        except (
            AttributeError,
            TypeError,
        ) as error:  # another Triton, no tensor in place of one, or no hash
            self._refuse(kernel, str(error))
            kernel[grid](*arguments, **options)
            return
        if kind is not None:
            self._launch_by_triton(kind, kernel, grid, arguments, options)

    def _add(self, kernel: Any, arguments: Arguments) -> _Launcher:
        if _VERSION not in TRITON_VERSIONS:
            raise TypeError(
                f"handles were tried with Triton {TRITON_VERSIONS[0]} to {TRITON_VERSIONS[-1]}, not {_VERSION}"
            )
        handles = self._handles[kernel.fn] = {}
        launcher = self._launchers[kernel.fn] = _launcher(kernel, arguments, handles)
        return launcher

    def _launch_by_triton(
        self, kind: Kind, kernel: Any, grid: tuple[int, ...], arguments: Arguments, options: Options
    ) -> None:
        """Make a launch whose kind is new, or for which hooks are called, and keep the handle."""
        compiled = kernel[grid](*arguments, **options)
        handles = self._handles[kernel.fn]
        if (kernel.fn, kind) in self._refused:
            self.num_unfrozen += 1
        elif kind not in handles:
            if len(handles) >= _MOST_KINDS:
                handles.clear()
            try:
                handles[kind] = _freeze(kernel, compiled, len(arguments))
            except (AttributeError, TypeError, ValueError) as error:
                self._refused.add((kernel.fn, kind))
                self._refuse(kernel, str(error))

    def _refuse(self, kernel: Any, reason: str) -> None:
        if not self.num_unfrozen:
            log.warning("Triton launches %s, and perhaps other kernels, which is slower: %s", kernel.__name__, reason)
        self.num_unfrozen += 1


def _launcher(kernel: Any, arguments: Arguments, handles: dict[Kind, _Handle]) -> _Launcher:
    """Return a function that launches ``kernel`` by the handle of its kind, or returns the kind if there is none.

    It is written for ``arguments``: where they had a tensor, others raise AttributeError. To look at each argument in a
    loop takes a third longer, so it is generated, as Triton's binder is.
    """
    kinds, values, reads = [], [], []
    for i, argument in enumerate(arguments):
        if type(argument) is int:
            kinds.append(f"a{i}.__class__, ints[a{i}]")  # a bool or a float is equal to an integer
            values.append(f"a{i}")
        elif isinstance(argument, int | float):
            kinds.append(f"a{i}.__class__")
            values.append(f"a{i}")
        else:
            reads.append(f"    p{i} = a{i}.data_ptr()")
            kinds.append(f"a{i}.dtype, p{i} % 16 == 0")
            values.append(f"p{i}")
    names = "".join(f"a{i}, " for i in range(len(arguments)))
    source = "\n".join(
        [
            "def launch(grid, arguments, options):",
            f"    {names}= arguments" if names else "    assert not arguments",
            *reads,
            "    driver = active.active",
            "    device = driver.get_current_device()",
            f"    kind = (driver, device, {', '.join([*kinds, '*options', '*options.values()'])})",
            "    handle = handles.get(kind)",
            "    hooked = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or kernel.pre_run_hooks",
            "    if handle is None or hooked:",
            "        return kind",
            "    x, y, z = (*grid, 1, 1)[:3]",
            "    run, before, constants = handle",
            "    stream = driver.get_current_stream(device)",
            "    if constants is None:",
            f"        run(x, y, z, stream, *before, [{', '.join(values)}])",
            "    else:",
            f"        run(x, y, z, stream, *before, {''.join(value + ', ' for value in values)}*constants)",
        ]
    )
    names_of: dict[str, Any] = {
        "active": triton.runtime.driver,
        "runtime": triton.knobs.runtime,
        "kernel": kernel,
        "handles": handles,
        "ints": _IntKinds(),
    }
    exec(source, names_of)  # noqa: S102  # nosec B102 # made of numbers above
    made: _Launcher = names_of["launch"]
    return made


def _freeze(kernel: Any, compiled: Any, num_arguments: int) -> _Handle:
    """Return the handle of a compiled kernel.

    Raises:
        ValueError: its launcher has other parameters. AttributeError, TypeError: an expected attribute is missing.
    """
    is_constant = [bool(parameter.is_constexpr) for parameter in kernel.params]
    if (is_constant.count(False), is_constant) != (num_arguments, sorted(is_constant)):
        raise ValueError("its constants are not those arguments that are given by name")
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    parameters = list(inspect.signature(launcher).parameters)
    if parameters[: len(_LAUNCHER)] != _LAUNCHER or parameters[-1] != "args":
        raise ValueError(f"the launcher of this Triton takes {', '.join(parameters)}")
    constants = (None,) * (len(is_constant) - num_arguments)
    if type(launcher).__name__ != "CudaLauncher":
        return _Handle(launcher, (function, metadata, *_NO_HOOKS), constants)
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise ValueError("it needs scratch memory")
    before = (function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    if _VERSION == "3.6":
        return _Handle(launcher.launch, (*before, *_NO_SCRATCH, metadata, *_NO_HOOKS), constants)
    if getattr(launcher, "gsan_enabled", False):  # 3.7 has no such instruments
        raise ValueError("it is instrumented")
    annotations = launcher.arg_annotations[:num_arguments]
    packed = (*before, metadata, *_NO_HOOKS, *_NO_SCRATCH, annotations, launcher.kernel_signature)
    return _Handle(launcher.launch, packed, None)
