"""Write a software bill of materials (CycloneDX 1.6, JSON) for each image, from the lock of its packages.

``python .ci/sbom.py FOLDER``. The same locks give the same bytes: there is no time and no random number in it. The
Python and the system packages of the base image are not listed, because they depend on when an image was built. The
executor's has torch in the version of constraints.txt, without hashes (see .ci/lock.py).
"""

import re
import sys
import tomllib
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

ROOT = Path(__file__).parents[1]
IMAGES = ("scheduler", "gateway", "executor")
"""The images; the lock of each has its name."""
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


def read_lock(name: str) -> dict[str, tuple[str, list[str]]]:
    """Return version and SHA-256 hashes of each package of a lock."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    found = {}
    for entry in re.split(r"\n(?=[A-Za-z0-9])", text):
        if match := _PINNED.match(entry):
            found[match[1]] = (match[2], re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))
    return found


def bill_of(image: str) -> str:
    """Return the bill of an image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = read_lock(image)
    if image == "executor":
        packages["torch"] = (dict(_PINNED.findall((ROOT / "constraints.txt").read_text()))["torch"], [])
    named = f"{project['name']}-{image} {project['version']} {sorted(packages.items())}"
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, named))
    bom.metadata.timestamp = None  # type: ignore[assignment]
    bom.metadata.component = root = Component(
        name=f"{project['name']}-{image}",
        version=project["version"],
        type=ComponentType.CONTAINER,
        bom_ref=f"{project['name']}-{image}",
        licenses=[LicenseExpression(project["license"])],
    )
    parts = [_component(name, version, hashes) for name, (version, hashes) in sorted(packages.items())]
    bom.components.update(parts)
    bom.register_dependency(root, parts)
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2) + "\n"


def _component(name: str, version: str, hashes: list[str]) -> Component:
    url = PackageURL("pypi", name=name, version=version)
    # Any of the files may be installed, so no hash identifies the component itself.
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(f"https://pypi.org/project/{name}/{version}/"),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=content) for content in hashes],
    )
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=str(url),
        purl=url,
        external_references=[files] if hashes else [],
    )


def main(folder: Path) -> None:
    """Write the bills into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in IMAGES:
        (folder / f"{image}.cdx.json").write_text(bill_of(image))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
