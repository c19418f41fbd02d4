"""The wheel and the sdist: their content, and that a user can serve with them right after ``pip install``.

The user is not root, and has no compiler, and no network after the installation. torch comes from pip's source on this
machine (``PIP_FIND_LINKS``, an index), in the version of constraints.txt.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PACKAGES = (
    "shared/pagewise_shared",
    "kernels/pagewise_kernels",
    "services/gateway/pagewise_gateway",
    "services/scheduler/pagewise_scheduler",
    "services/executor/pagewise_executor",
    "services/cli/pagewise",
)
NOBODY = 65534
HAS_DOCKER = shutil.which("docker") is not None and not subprocess.call(["docker", "info"], stdout=-3, stderr=-3)
PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST")

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1800)]


def run(*command: object, **options: Any) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder outside the repository that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="pagewise-packaging-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def built(place: Path) -> tuple[Path, Path]:
    """The sdist of a tree without git, and the wheel that was built of this sdist, by a machine without a compiler."""
    source, tools, output = place / "source", place / "tools", place / "dist"
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-m", "venv", tools)
    python = tools / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", ROOT / "requirements/build.lock")
    alone = os.environ | {"PATH": str(tools / "bin")}
    run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", output, cwd=source, env=alone)
    (sdist,) = output.glob("*.tar.gz")
    shutil.rmtree(source)
    wheel = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", output, sdist]
    run(*wheel, env=alone, cwd=place)
    (built,) = output.glob("*.whl")
    return sdist, built


def tracked(package: str) -> set[str]:
    """The files of a package that belong into a wheel."""
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", package, cwd=ROOT).splitlines()
    return {str(Path(name).relative_to(Path(package).parent)) for name in names if (ROOT / name).is_file()}


def test_the_wheel_has_all_that_the_packages_have_and_the_operations(built: tuple[Path, Path]) -> None:
    """So the demo model, the marks of types, the page of the console, and whatever comes."""
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package in PACKAGES:
        assert not tracked(package) - names
        assert f"{Path(package).name}/py.typed" in names
    operations = {name for name in names if name.endswith(".so")}
    expected = {"x86_64": 4, "aarch64": 1}.get(platform.machine(), 0)
    assert len(operations) == expected
    assert ("manylinux" in wheel.name) == bool(expected)
    assert all(name.split("/")[0] in {Path(each).name for each in PACKAGES} or ".dist-info/" in name for name in names)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "hatch_build.py", "constraints.txt", "README.md", "LICENSE", "PKG-INFO"} <= inside
    assert not [name for name in inside if name.startswith(("tests", "benchmarks", "docs", ".git/"))]
    assert sdist.stat().st_size < 12 * 2**20
    assert wheel.stat().st_size < 12 * 2**20


def check(said: str) -> None:
    """Check the result of ``first_request.py``."""
    found = json.loads(said.splitlines()[-1])
    log = "".join(found.pop("log"))
    assert found["code"] == 0, log
    assert found["text"].strip()
    assert found["user"] != 0
    assert found["compilers"] == []
    assert not found["network"]
    if (ROOT / "services/gateway/pagewise_gateway/console/static").is_dir():
        assert found["console"] == 200
    if platform.machine() in ("x86_64", "aarch64"):
        assert "kernels: cpu" in log, log
    assert "Traceback" not in log
    print(f"ready after {found['ready']:.1f} s: {found['text']!r}")


def python_of_everybody() -> str:
    """A Python that ordinary users may run, unlike root's of pyenv."""
    for python in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable):
        code = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
        command = [python, "-c", code]
        if os.getuid() == 0:
            command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]
        if Path(python).exists() and not subprocess.call(command, stderr=subprocess.DEVNULL):
            return python
    pytest.skip("no Python 3.11 with venv here that an ordinary user may run")


def test_a_fresh_environment_serves(place: Path, built: tuple[Path, Path]) -> None:
    """Without root: as the user who runs the tests, and with this machine's network."""
    _, wheel = built
    root = os.getuid() == 0
    home = place / "home"
    home.mkdir(mode=0o755)
    for file in (wheel, HERE / "first_request.py", HERE / "confined.py", ROOT / "constraints.txt"):
        shutil.copy(file, place)
    if root:
        os.chown(home, NOBODY, NOBODY)
    python, bin_folder = python_of_everybody(), home / "venv/bin"
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
    environ = kept | {"HOME": str(home), "PATH": str(bin_folder), "LANG": "C.UTF-8", "PIP_NO_CACHE_DIR": "1"}
    user: list[object] = [python, place / "confined.py", NOBODY] if root else []
    run(*user, python, "-m", "venv", home / "venv", env=environ, cwd=home)
    what = f"{place / wheel.name}[executor]"
    install = [bin_folder / "python", "-m", "pip", "install", "--quiet", "-c", place / "constraints.txt", what]
    run(*user, *install, env=environ, cwd=home)
    said = run(
        *(["/usr/bin/unshare", "--net"] if root else []),
        *user, bin_folder / "python", place / "first_request.py", bin_folder, env=environ, cwd=home,
    )  # fmt: skip
    if not root:
        said = json.dumps(json.loads(said.splitlines()[-1]) | {"network": False})
    check(said)


DOCKERFILE = """
FROM debian:bookworm-slim
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
RUN command -v python3 || (apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv)
RUN useradd --create-home user
USER user
WORKDIR /home/user
RUN python3 -m venv venv
COPY --chown=user . .
RUN venv/bin/pip install --quiet --no-cache-dir -c constraints.txt "$(ls $PWD/*.whl)[executor]"
"""


@pytest.mark.skipif(not HAS_DOCKER, reason="no Docker engine")
def test_a_bare_debian_serves(place: Path, built: tuple[Path, Path]) -> None:
    _, wheel = built
    context = place / "context"
    context.mkdir()
    for file in (wheel, HERE / "first_request.py", ROOT / "constraints.txt"):
        shutil.copy(file, context)
    (context / "Dockerfile").write_text(DOCKERFILE)
    name = f"pagewise-packaging-{os.getpid()}"
    given = [word for variable in PIP if variable in os.environ for word in ("--build-arg", variable)]
    try:
        run("docker", "build", *given, "--tag", name, context)
        options = ["--rm", "--init", "--network=none", "--cap-drop=ALL"]
        check(run("docker", "run", *options, name, "venv/bin/python", "first_request.py", "venv/bin"))
    finally:
        subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True)
