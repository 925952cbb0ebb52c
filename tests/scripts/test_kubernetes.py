"""The JobSet manifest: valid fields of the API, and forge's commands and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.runtime.errors import BAD_CONFIG, NO_CHECKPOINT, STOPPED
from forge.tools.elastic.agent import Node, layouts
from forge.tools.elastic.secret import VARIABLE

yaml = pytest.importorskip("yaml")
PATH = Path(__file__).parents[2] / "scripts" / "kubernetes" / "jobset.yaml"

# Fields of the APIs used in the manifest, with their types; [...] is a list. jobset.x-k8s.io/v1alpha2, and batch/v1 and
# core/v1 of Kubernetes.
CONTAINER = {
    "name": str,
    "image": str,
    "workingDir": str,
    "command": [str],
    "args": [str],
    "ports": [{"containerPort": int}],
    "env": [{"name": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}],
    "resources": {"limits": dict},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "containers": [CONTAINER],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": str}}],
}
RULE = {
    "action": str,
    "onExitCodes": {"containerName": str, "operator": str, "values": [int]},
    "onPodConditions": [{"type": str}],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": str,
    "backoffLimit": int,
    "podFailurePolicy": {"rules": [RULE]},
    "template": {"spec": POD},
}
JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool},
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name": str, "action": str, "onJobFailureReasons": [str]}],
        },
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}


def check(value: Any, schema: Any, where: str = "") -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        for name, inner in value.items():
            assert name in schema, f"{where}.{name} is no field"
            check(inner, schema[name], f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for number, inner in enumerate(value):
            check(inner, schema[0], f"{where}[{number}]")
    else:
        assert type(value) is schema, f"{where} = {value!r}"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return yaml.safe_load(PATH.read_text())


def test_every_field_is_one_of_the_api_with_a_value_of_its_type(manifest) -> None:
    check(manifest, JOBSET)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    with pytest.raises(AssertionError, match="no field"):
        check(manifest | {"sepc": {}}, JOBSET)


def test_agents_join_at_jobsets_host_name_of_the_rendezvous(manifest) -> None:
    # <jobset>-<replicated job>-<replica>-<pod>.<subdomain>. The default subdomain is the JobSet's name.
    meeting, nodes = manifest["spec"]["replicatedJobs"]
    agent = nodes["template"]["spec"]["template"]["spec"]["containers"][0]
    name, port = (
        manifest["metadata"]["name"],
        meeting["template"]["spec"]["template"]["spec"]["containers"][0]["command"][-1],
    )
    assert f"--meeting={name}-{meeting['name']}-0-0.{name}:{port}" in agent["args"]
    assert manifest["spec"]["successPolicy"]["targetReplicatedJobs"] == [nodes["name"]]


def test_the_rendezvous_and_the_agents_share_one_secret(manifest) -> None:
    [meeting], [agent] = (
        job["template"]["spec"]["template"]["spec"]["containers"]
        for job in manifest["spec"]["replicatedJobs"]
    )
    assert meeting["env"] == agent["env"] and [one["name"] for one in agent["env"]] == [VARIABLE]


def test_exit_codes_for_a_person_fail_the_job_and_a_stop_does_not(manifest) -> None:
    job = manifest["spec"]["replicatedJobs"][1]["template"]["spec"]
    rules = {
        rule["action"]: rule["onExitCodes"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules["FailJob"]["values"] == [BAD_CONFIG, NO_CHECKPOINT] and rules["Ignore"]["values"] == [
        STOPPED
    ]
    # Kubernetes refuses a policy for pods restarted in place.
    assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_the_agents_arguments_are_accepted_and_there_are_pods_for_all_nodes(manifest) -> None:
    job = manifest["spec"]["replicatedJobs"][1]["template"]["spec"]
    args = job["template"]["spec"]["containers"][0]["args"]
    options = dict(arg.removeprefix("--").split("=", 1) for arg in args[: args.index("--")])
    least, most = map(int, options["nodes"].split(":"))
    found = layouts(
        args[args.index("--") + 1 :], Node(least, most, int(options["processes"]), options["meeting"])
    )
    assert list(found) == [2, 3] and job["parallelism"] >= most
