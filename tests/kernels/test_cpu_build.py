"""The CPU operations compile for the architectures that the suite does not run on."""

import os
import subprocess
from pathlib import Path

import pytest
from pagewise_kernels.cpu.build import SOURCES, VARIANTS, compile_command, machine


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {machine()}))
def test_all_sources_compile_for_other_architectures(name: str, tmp_path: Path) -> None:
    """With the warnings of the build, but without optimisation and without linking, which take most of its time."""
    pytest.importorskip("ziglang")
    environ = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(tmp_path), "ZIG_LOCAL_CACHE_DIR": str(tmp_path)}
    for variant in VARIANTS[name]:
        command = compile_command(name, variant, tmp_path / "one.o", ("-O0", "-fno-sanitize=undefined", "-c"))
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stderr
    assert {file.stem for file in tmp_path.glob("o/*/*.o")} == {Path(source).stem for source in SOURCES}
