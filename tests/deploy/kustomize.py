"""The result of ``kubectl kustomize`` for the features of our overlays: resources, namespace, images, replicas, and
patches in JSON (RFC 6902). Anything else is refused, so that nothing is left out unnoticed.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "resources", "namespace", "images", "replicas", "patches"}


def build(folder: Path) -> list[Resource]:
    """The resources of a folder with a kustomization.yaml, after all of its changes."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert not (unknown := set(kustomization) - _KNOWN), f"{folder}: {unknown} is not understood here"
    resources: list[Resource] = []
    for name in kustomization.get("resources", []):
        path = folder / name
        resources += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for patch in kustomization.get("patches", []):
        targets = [one for one in resources if _matches(one, patch["target"])]
        assert targets, f"{folder}: {patch['target']} is not there"
        for target in targets:
            for operation in yaml.safe_load(patch["patch"]):
                _apply(target, operation)
    for resource in resources:
        _rename(resource, kustomization)
    return resources


def pod_spec(resource: Resource) -> dict[str, Any] | None:
    """The pods that a resource makes, if it does."""
    spec: dict[str, Any] | None = resource.get("spec", {}).get("template", {}).get("spec")
    return spec


def workloads(overlay: Path) -> dict[str, Resource]:
    """The resources that make pods, by the name of their one container."""
    found = {}
    for resource in build(overlay):
        if (spec := pod_spec(resource)) is not None:
            (container,) = spec["containers"]
            found[container["name"]] = resource
    return found


def container_of(resource: Resource) -> dict[str, Any]:
    """The one container of the pods that a resource makes."""
    spec = pod_spec(resource)
    assert spec is not None
    container: dict[str, Any] = spec["containers"][0]
    return container


def environment(overlay: Path, service: str, pod: Mapping[str, str]) -> dict[str, str]:
    """The variables that a container gets; ``pod`` has the values of the fields of its pod."""
    maps = {one["metadata"]["name"]: one["data"] for one in build(overlay) if one["kind"] == "ConfigMap"}
    container = container_of(workloads(overlay)[service])
    variables: dict[str, str] = {}
    for source in container["envFrom"]:
        variables |= maps[source["configMapRef"]["name"]]
    for one in container["env"]:
        variables[one["name"]] = one["value"] if "value" in one else pod[one["valueFrom"]["fieldRef"]["fieldPath"]]
    return variables


def _matches(resource: Resource, target: dict[str, str]) -> bool:
    return resource["kind"] == target["kind"] and resource["metadata"]["name"] == target["name"]


def _apply(resource: Resource, operation: dict[str, Any]) -> None:
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:])
    at: Any = resource
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    key: Any = int(last) if isinstance(at, list) and last != "-" else last
    value = copy.deepcopy(operation.get("value"))
    match operation["op"]:
        case "test":
            assert at[key] == value, f"{operation['path']} is {at[key]!r}, not {value!r}"
        case "replace":
            assert at[key] is not None, f"there is no {operation['path']} to replace"
            at[key] = value
        case "add" if isinstance(at, list):
            at.insert(len(at) if key == "-" else key, value)
        case "add":
            at[key] = value
        case other:
            raise AssertionError(f"{other} is not understood here")


def _rename(resource: Resource, kustomization: dict[str, Any]) -> None:
    if namespace := kustomization.get("namespace"):
        if resource["kind"] == "Namespace":
            resource["metadata"]["name"] = namespace
        else:
            resource["metadata"]["namespace"] = namespace
    for count in kustomization.get("replicas", []):
        if resource["metadata"]["name"] == count["name"] and resource["kind"] in ("Deployment", "StatefulSet"):
            resource["spec"]["replicas"] = count["count"]
    for image in kustomization.get("images", []):
        for container in (pod_spec(resource) or {}).get("containers", []):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
