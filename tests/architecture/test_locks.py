"""The packages of images: locks with hashes, and bills of materials made from them."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
IMAGES = {"scheduler": [], "gateway": ["gateway"], "executor": ["executor-service"]}
UNLOCKED = {"torch"}
"""torch is installed from an index that is named when the image is built."""


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each package of a lock."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    entries = re.findall(r"^([a-z0-9._-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    assert len(entries) == len(re.findall("^[^# ]", text, re.MULTILINE)), "each has hashes"
    return {canonicalize_name(package): (version, hashes.split("--hash=")[1:]) for package, version, hashes in entries}


def wanted(name: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(one for extra in IMAGES[name] for one in extras[extra])]


def installed(*packages: str) -> bool:
    try:
        for package in packages:
            requires(package)
    except PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize("name", ["build", *IMAGES])
def test_locks_have_the_versions_of_the_constraints(name: str) -> None:
    known = constraints()
    for package, (version, hashes) in locked(name).items():
        assert known[package] == version, package
        assert hashes


@pytest.mark.parametrize("name", IMAGES)
def test_locks_have_everything_that_is_needed_and_nothing_else(name: str) -> None:
    environment = {"sys_platform": "linux", "platform_system": "Linux", "python_version": "3.11", "extra": ""}
    environment["python_full_version"] = "3.11.0"  # some packages are needed by the first releases of 3.11 alone
    needed: set[str] = set()
    open_ones = [Requirement(text) for text in wanted(name)]
    while open_ones:
        one = open_ones.pop()
        package = canonicalize_name(one.name)
        extras = ["", *one.extras]
        if one.marker is not None and not any(one.marker.evaluate(environment | {"extra": each}) for each in extras):
            continue
        if package not in needed:
            needed.add(package)
            for text in requires(package) or [] if installed(package) else []:
                further = Requirement(text)
                if further.marker is None or any(further.marker.evaluate(environment | {"extra": e}) for e in extras):
                    open_ones.append(further)
    unlocked = UNLOCKED & needed
    assert needed - unlocked == set(locked(name))
    assert bool(unlocked) == (name == "executor")


def test_torch_with_cuda_and_triton_can_be_installed_together() -> None:
    """torch's CUDA build requires one version of Triton exactly; its CPU build, which tests have, requires none."""
    pairs = {"2.13.0": "3.7.1"}  # by the requirements of torch's wheel on PyPI
    known = constraints()
    assert known["torch"] in pairs, "look up which Triton the CUDA build of this torch requires"
    assert known["triton"] == pairs[known["torch"]]


def test_what_is_pinned_runs_on_the_oldest_python() -> None:
    """pip passes over versions that want a newer Python than it runs on: Debian 12 has 3.11.2."""
    for package, version in constraints().items():
        if installed(package) and (found := metadata(package))["Version"] == version:
            assert "3.11.2" in SpecifierSet(found.get("Requires-Python") or ""), package


def test_images_install_from_locks_only() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.M | re.S))
    installs = {name: re.findall(r"pip install[^\n]*", body) for name, body in stages.items()}
    locked_install = "pip install --no-cache-dir --require-hashes -r"
    assert installs["source"] == [f"{locked_install} build.lock"]
    for image in IMAGES:
        copied = re.findall(r"COPY --from=(\S+)", stages[image])
        ours = ["executor-kernels", "executor-ours"] if image == "executor" else ["ours"]
        assert copied == [f"{image}-packages", *ours]
        assert installs[image] == []
        first, *rest = installs[f"{image}-packages"]
        assert first == f"{locked_install} {image}.lock"
        if image == "executor":
            (torch,) = rest
            assert "torch==" in torch
        else:
            assert rest == []
    # It compiles kernels with the packages of the executor's image.
    assert re.findall(r"COPY --from=(\S+)", stages["executor-kernels"]) == ["executor-packages", "executor-ours"]
    assert installs["executor-kernels"] == []
    for name in ("ours", "executor-ours"):
        (ours,) = installs[name]
        assert "--no-deps /wheels/*.whl" in ours


def test_bills_list_what_is_locked_and_are_the_same_every_time(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        subprocess.run([sys.executable, ROOT / ".ci" / "sbom.py", tmp_path / folder], check=True, timeout=60)
    known = constraints()
    for image in IMAGES:
        path = tmp_path / "one" / f"{image}.cdx.json"
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
        bill = json.loads(path.read_text())
        assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
        assert "timestamp" not in bill["metadata"]
        assert bill["metadata"]["component"]["name"] == f"pagewise-{image}"
        parts = {canonicalize_name(part["name"]): part for part in bill["components"]}
        locks = locked(image)
        assert set(parts) - UNLOCKED == set(locks)
        assert ("torch" in parts) == (image == "executor")
        for name, part in parts.items():
            assert part["version"] == known[name]
            assert part["purl"] == f"pkg:pypi/{name}@{part['version']}"
            if name in locks:
                (files,) = part["externalReferences"]
                hashes = [f"sha256:{entry['content']}" for entry in files["hashes"]]
                assert sorted(hashes) == sorted(one.split(" ")[0] for one in locks[name][1])


def test_foreign_images_are_pinned_by_digests_and_actions_by_commits() -> None:
    """The images that are built here have names without a registry's path."""
    files = [*ROOT.glob("compose*.yaml"), *(ROOT / "deploy").rglob("*.yaml")]
    images = [name for file in files for name in re.findall(r"^\s*image: (\S+)", file.read_text(), re.MULTILINE)]
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r" AS (\S+)", dockerfile)) | {"${PYTHON_IMAGE}"}
    images += set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) - stages
    images += re.findall(r"^ARG PYTHON_IMAGE=(\S+)", dockerfile, re.MULTILINE)
    foreign = [name for name in images if not name.startswith("pagewise-")]
    assert len(foreign) == 4
    assert [name for name in foreign if not re.search(r"@sha256:[0-9a-f]{64}\}?$", name)] == []
    workflows = "".join(file.read_text() for file in (ROOT / ".github" / "workflows").iterdir())
    actions = re.findall(r"uses: (\S+)", workflows)
    assert actions
    assert [name for name in actions if not re.fullmatch(r"\S+@[0-9a-f]{40}", name)] == []
