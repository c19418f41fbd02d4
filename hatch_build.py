"""Compiles the CPU operations when the package is built or installed for editing: see pagewise_kernels/cpu/build.py."""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = Path(__file__).parent / "kernels" / "pagewise_kernels" / "cpu" / "build.py"


class CpuOperationsHook(BuildHookInterface):  # type: ignore[type-arg]
    """A wheel for this platform has the libraries inside; on a platform without them it is pure Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the libraries beside their sources, from where the wheel takes them."""
        spec = importlib.util.spec_from_file_location("cpu_build", _BUILD)
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        name = build.machine()
        if name is None:
            return
        files = build.build()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{build.GLIBC.replace('.', '_')}_{name}"
        if version != "editable":
            build_data["artifacts"] += [f"/{file.relative_to(self.root)}" for file in files]
