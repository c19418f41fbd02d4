"""The Kubernetes manifests: valid by the published schemas, of one piece, and with options that exist."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pagewise.keys import keys as make_keys
from pagewise_scheduler.metrics import Metrics
from pagewise_shared.config import (
    VARIABLE_PREFIX,
    ExecutorConfig,
    GatewayConfig,
    SchedulerConfig,
    build_config,
    options_of,
    parse_size,
)
from pagewise_shared.curve import KINDS, Keys, Kind

from tests.deploy import kustomize
from tests.deploy.kustomize import Resource, build, container_of, pod_spec, workloads

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.parent for path in DEPLOY.glob("overlays/*/kustomization.yaml"))
VERSIONS = ("1.30", "1.34", "1.37")
CONFIGS: dict[str, type[SchedulerConfig | GatewayConfig | ExecutorConfig]] = {
    "scheduler": SchedulerConfig,
    "gateway": GatewayConfig,
    "executor": ExecutorConfig,
}

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)


def name_of(resource: Resource) -> str:
    return f"{resource['kind']} {resource['metadata']['name']}"


def environment(overlay: Path, service: str) -> dict[str, str]:
    """The variables that a container gets, with a stand-in for its pod."""
    pod = {"metadata.name": f"pagewise-{service}-0", "status.podIP": "10.0.0.1"}
    return kustomize.environment(overlay, service, pod)


@each_overlay
def test_there_are_three_kinds_of_pods(overlay: Path) -> None:
    assert set(workloads(overlay)) == set(CONFIGS)


@each_overlay
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(overlay: Path, version: str) -> None:
    for resource in build(overlay):
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_store_is_valid_and_has_no_more_rights_than_it_needs(version: str) -> None:
    resources = build(DEPLOY / "store")
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)
    (spec,) = [spec for resource in resources if (spec := pod_spec(resource)) is not None]
    rights = spec["containers"][0]["securityContext"]
    assert (rights["readOnlyRootFilesystem"], rights["capabilities"]) == (True, {"drop": ["ALL"]})
    assert spec["securityContext"]["runAsNonRoot"]
    assert {resource["metadata"]["namespace"] for resource in resources} == {"pagewise"}


def test_validation_finds_what_is_wrong() -> None:
    resource = next(one for one in build(OVERLAYS[0]) if one["kind"] == "Deployment")
    resource["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(resource, VERSIONS[-1], strict=True)


@each_overlay
def test_kubectl_makes_the_same_of_them(overlay: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=True).stdout
    by_name = {name_of(one): one for one in yaml.safe_load_all(made)}
    ours = build(overlay)
    assert {name_of(one) for one in ours} == set(by_name)
    for one in ours:
        assert one == by_name[name_of(one)]


@each_overlay
@pytest.mark.parametrize("service", CONFIGS)
def test_variables_are_options_and_their_values_can_be_used(overlay: Path, service: str) -> None:
    fields = set(options_of(CONFIGS[service]))
    others = {name for config in CONFIGS.values() for name in options_of(config)}
    variables = environment(overlay, service)
    for name in variables:
        if name.startswith(VARIABLE_PREFIX):
            option = name.removeprefix(VARIABLE_PREFIX).lower()
            assert option in fields or (option in others and name in shared_options(overlay)), name
    build_config(CONFIGS[service], {}, variables)


def shared_options(overlay: Path) -> set[str]:
    return {name for one in build(overlay) if one["kind"] == "ConfigMap" for name in one["data"]}


def port_of(endpoint: str) -> int:
    return int(endpoint.rsplit(":", 1)[1])


@each_overlay
def test_ports_are_those_the_services_listen_on(overlay: Path) -> None:
    ports = {
        port["name"]: port["containerPort"]
        for resource in workloads(overlay).values()
        for port in container_of(resource)["ports"]
    }
    scheduler, gateway, executor = (environment(overlay, service) for service in CONFIGS)
    assert ports == {
        "http": int(gateway["PAGEWISE_PORT"]),
        "executors": port_of(scheduler["PAGEWISE_LISTEN"]),
        "gateways": port_of(scheduler["PAGEWISE_LISTEN_GATEWAYS"]),
        "blocks": port_of(executor["PAGEWISE_BLOCK_LISTEN"]),
    }
    services = {one["metadata"]["name"]: one["spec"] for one in build(overlay) if one["kind"] == "Service"}
    joined = {"executors": executor["PAGEWISE_SCHEDULER"], "gateways": gateway["PAGEWISE_SCHEDULER"]}
    (host,) = {endpoint.removeprefix("tcp://").split(":")[0] for endpoint in joined.values()}
    assert services[host]["ports"] == [
        {"name": name, "port": port_of(endpoint), "targetPort": name} for name, endpoint in joined.items()
    ]
    # Found as soon as it listens, whatever its probes say.
    assert services[host]["publishNotReadyAddresses"]
    assert all(port["targetPort"] in ports for spec in services.values() for port in spec["ports"])


@each_overlay
def test_selectors_find_pods(overlay: Path) -> None:
    pods = {name: one["spec"]["template"]["metadata"]["labels"] for name, one in workloads(overlay).items()}

    def chosen(selector: dict[str, Any]) -> set[str]:
        said = [(one["key"], one["operator"], one["values"]) for one in selector.get("matchExpressions", [])]
        assert {operator for _, operator, _ in said} <= {"In"}
        return {
            name
            for name, labels in pods.items()
            if selector["matchLabels"].items() <= labels.items()
            and all(labels.get(key) in values for key, _, values in said)
        }

    resources = build(overlay)
    for one in resources:
        match one["kind"]:
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
                assert len(chosen(one["spec"]["selector"])) == 1
            case "Service":
                (pod,) = chosen({"matchLabels": one["spec"]["selector"]})
                named = {port["name"] for port in container_of(workloads(overlay)[pod])["ports"]}
                assert {port["targetPort"] for port in one["spec"]["ports"]} <= named
            case "NetworkPolicy":
                assert chosen(one["spec"]["podSelector"])
            case "HorizontalPodAutoscaler":
                target = one["spec"]["scaleTargetRef"]
                assert f"{target['kind']} {target['name']}" in {name_of(other) for other in resources}


def test_a_rank_has_a_gpu() -> None:
    overlay = next(path for path in OVERLAYS if path.name == "nvidia-tensor-parallel")
    resources = container_of(workloads(overlay)["executor"])["resources"]
    ranks = environment(overlay, "executor")["PAGEWISE_TENSOR_PARALLEL"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == ranks


@each_overlay
def test_who_reaches_which_port(overlay: Path) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in build(overlay) if one["kind"] == "NetworkPolicy"}
    deny = policies.pop("pagewise-default-deny")
    assert set(deny["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in deny
    assert "egress" not in deny
    executor = environment(overlay, "executor")

    def named(port: dict[str, Any]) -> Any:
        """Ranks of an executor listen on ports that follow each other, which a policy cannot name."""
        if "endPort" not in port:
            return port["port"]
        assert port["port"] == port_of(executor["PAGEWISE_BLOCK_LISTEN"])
        assert port["endPort"] == port["port"] + int(executor["PAGEWISE_TENSOR_PARALLEL"]) - 1
        return "blocks"

    allowed = {
        named(port): peer["podSelector"]["matchLabels"]
        for spec in policies.values()
        for rule in spec.get("ingress", [])
        for port in rule["ports"]
        for peer in rule["from"]
    }
    pods = {name: {"app.kubernetes.io/name": "pagewise", "app.kubernetes.io/component": name} for name in CONFIGS}
    assert allowed == {
        "http": {"pagewise-client": "true"},
        "executors": pods["executor"],
        "gateways": pods["gateway"],
        "blocks": pods["executor"],
    }
    # The processes that each kind may call, besides the hub and the name server.
    calls = {
        name: {named(port) for rule in spec.get("egress", []) for port in rule["ports"]}
        for name, spec in policies.items()
        if name != "pagewise-outside"
    }
    assert calls == {
        "pagewise-gateway": {"gateways"},
        "pagewise-scheduler": set(),
        "pagewise-executor": {"executors", "blocks"},
    }


@each_overlay
@pytest.mark.parametrize("service", CONFIGS)
def test_pods_have_no_more_rights_than_they_need(overlay: Path, service: str) -> None:
    spec = pod_spec(workloads(overlay)[service])
    assert spec is not None
    assert spec["automountServiceAccountToken"] is False
    # A service named pagewise would become the variable PAGEWISE_PORT=tcp://..., and that is an option.
    assert spec["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    user = re.search(r"--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None
    assert spec["securityContext"]["runAsUser"] == int(user[1])
    container = spec["containers"][0]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["requests"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    for volume in volumes.values():
        assert "hostPath" not in volume
        assert volume.get("emptyDir", {"sizeLimit": ""}).keys() >= {"sizeLimit"}


@each_overlay
@pytest.mark.parametrize("service", CONFIGS)
def test_a_pod_gets_its_own_secret_key_and_no_other(overlay: Path, service: str) -> None:
    spec = pod_spec(workloads(overlay)[service])
    assert spec is not None
    (keys,) = [one["secret"] for one in spec["volumes"] if one.get("secret", {}).get("secretName") == "pagewise-keys"]
    paths = {item["path"] for item in keys["items"]}
    assert {path for path in paths if path.endswith("_secret")} == {f"{service}/{service}.key_secret"}
    allow_lists = {
        "scheduler": {"public/gateways/gateway.key", "public/executor.key"},
        "gateway": {"public/gateways/gateway.key"},
        "executor": {"public/executor.key"},
    }
    assert {path for path in paths if path.startswith("public/")} == allow_lists[service] | {"public/scheduler.key"}


@each_overlay
@pytest.mark.parametrize("service", CONFIGS)
def test_keys_where_a_pod_finds_them_are_keys_that_its_process_can_read(
    overlay: Path, service: str, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    assert make_keys(["--keys", str(made), "init"]) == 0
    by_name = {path.name: path for path in made.rglob("*.key*") if path.parent.name != path.stem or "_" in path.name}
    spec = pod_spec(workloads(overlay)[service])
    assert spec is not None
    (keys,) = [one["secret"] for one in spec["volumes"] if one.get("secret", {}).get("secretName") == "pagewise-keys"]
    for item in keys["items"]:
        path = tmp_path / "mounted" / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(by_name[item["key"]].read_bytes())
    pair = Keys(tmp_path / "mounted", service)
    allowed: dict[str, dict[Kind, set[str]]] = {
        "scheduler": {"executor": {"executor"}, "gateway": {"gateway"}},
        "gateway": {"executor": set(), "gateway": {"gateway"}},
        "executor": {"executor": {"executor"}, "gateway": set()},
    }
    for kind in KINDS:
        assert set(pair.allowed(kind).values()) == allowed[service][kind]


@each_overlay
def test_executors_have_the_time_and_the_shared_memory_they_are_told_of(overlay: Path) -> None:
    spec = pod_spec(workloads(overlay)["executor"])
    assert spec is not None
    assert float(environment(overlay, "executor")["PAGEWISE_DRAIN_TIMEOUT"]) < spec["terminationGracePeriodSeconds"]
    (memory,) = [one["emptyDir"] for one in spec["volumes"] if one.get("emptyDir", {}).get("medium") == "Memory"]
    host_memory = parse_size(environment(overlay, "executor")["PAGEWISE_HOST_MEMORY"])
    assert host_memory < parse_size(memory["sizeLimit"] + "B")
    limit = spec["containers"][0]["resources"]["limits"]["memory"]
    assert parse_size(memory["sizeLimit"] + "B") < parse_size(limit + "B")  # it counts as the container's own


@each_overlay
def test_streams_of_a_gateway_have_the_time_they_are_told_of(overlay: Path) -> None:
    spec = pod_spec(workloads(overlay)["gateway"])
    assert spec is not None
    before = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
    timeout = float(environment(overlay, "gateway")["PAGEWISE_SHUTDOWN_TIMEOUT"])
    assert before + timeout < spec["terminationGracePeriodSeconds"]


@each_overlay
def test_there_is_one_scheduler_and_never_two(overlay: Path) -> None:
    spec = workloads(overlay)["scheduler"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_gpus_are_asked_for_and_nothing_fixes_the_number_of_executors_that_are_scaled() -> None:
    overlay = DEPLOY / "overlays" / "nvidia"
    executor = workloads(overlay)["executor"]
    assert container_of(executor)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    scaled = {
        one["spec"]["scaleTargetRef"]["name"] for one in build(overlay) if "scaleTargetRef" in one.get("spec", {})
    }
    assert scaled == {"pagewise-executor", "pagewise-gateway"}
    assert not [one for one in build(overlay) if one["metadata"]["name"] in scaled and "replicas" in one["spec"]]
    scalers = [one for one in build(overlay) if one["kind"] == "HorizontalPodAutoscaler"]
    exposed = set(re.findall(r"^# TYPE (\w+) gauge", Metrics("m").render().decode(), re.MULTILINE))
    named = {
        metric["external"]["metric"]["name"]
        for one in scalers
        for metric in one["spec"]["metrics"]
        if metric["type"] == "External"
    }
    assert named
    assert named <= exposed
    query = yaml.safe_load((DEPLOY / "autoscaling" / "adapter.yaml").read_text())["rules"]["external"][0]["seriesQuery"]
    pattern = re.search(r'=~"([^"]+)"', query)
    assert pattern is not None
    assert all(re.match(pattern[1], name) for name in named)
