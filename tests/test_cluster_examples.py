"""The files of examples/cluster, without a cluster: Ray's schema and options, shells, and what is used of KubeRay's."""

from __future__ import annotations

import copy
import math
import os
import shlex
import stat
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start
from ray.scripts.symmetric_run import symmetric_run

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "cluster"


@pytest.fixture(scope="module")
def on_premise():
    return yaml.safe_load((FOLDER / "on_premise.yaml").read_text())


# --- machines over ssh ------------------------------------------------------------------------------------------------


def test_ray_accepts_the_machines(on_premise):
    prepared = prepare_config(copy.deepcopy(on_premise))
    validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["min_workers"] == len(on_premise["provider"]["worker_ips"]), "all machines join, and none leaves"
    broken = copy.deepcopy(on_premise) | {"worker_start_ray_comands": []}
    with pytest.raises(jsonschema.ValidationError, match="worker_start_ray_comands"):
        validate_config(prepare_config(broken))


def test_its_commands_are_shell_and_ray_knows_the_options(on_premise):
    for key in (key for key in on_premise if key.endswith("_commands")):
        for command in on_premise[key]:
            done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            if "ray start" in command:
                start.make_context("ray start", shlex.split(command.partition("ray start ")[2]))


def test_the_dashboard_is_on_loopback_and_every_machine_demands_the_token(on_premise):
    head, worker = on_premise["head_start_ray_commands"][-1], on_premise["worker_start_ray_commands"][-1]
    assert "--dashboard-host=127.0.0.1" in head
    assert all(command.startswith(". ~/raypar-cluster/env; ") for command in (head, worker))
    env = next(command for command in on_premise["setup_commands"] if "~/raypar-cluster/env" in command)
    assert "RAY_AUTH_MODE=token" in env and "RAY_AUTH_TOKEN_PATH" in env
    assert any("chmod 600 ~/raypar-cluster/auth_token" in command for command in on_premise["setup_commands"])


def test_setting_up_twice_leaves_one_line_in_bashrc_and_the_environment(on_premise, tmp_path):
    (tmp_path / "raypar-cluster").mkdir()
    (tmp_path / "raypar-cluster" / "ray").write_text("#!/bin/sh\n")
    (tmp_path / "raypar-cluster" / "auth_token").write_text("secret")
    installs = "venv/bin/pip", "-m venv"
    harmless = [one for one in on_premise["setup_commands"] if not any(what in one for what in installs)]
    env = {**os.environ, "HOME": str(tmp_path)}
    for command in [*harmless, *on_premise["head_setup_commands"]] * 2:
        subprocess.run(["bash", "-c", command], check=True, env=env)
    assert (tmp_path / ".bashrc").read_text() == ". ~/raypar-cluster/env\n"
    told = subprocess.run(
        ["bash", "-c", '. ~/.bashrc; echo "$RAY_AUTH_MODE $RAY_ADDRESS $RAY_AUTH_TOKEN_PATH"; command -v ray'],
        capture_output=True,
        text=True,
        env=env,
    )
    home = tmp_path / "raypar-cluster"
    assert told.stdout == f"token 10.0.0.1:6379 {home}/auth_token\n{home}/bin/ray\n"
    assert stat.S_IMODE((home / "auth_token").stat().st_mode) == 0o600


def test_ray_stop_of_the_machines_ends_their_cluster_and_no_other_ray(tmp_path):
    cluster = tmp_path / "raypar-cluster"
    (cluster / "venv" / "bin").mkdir(parents=True)
    real = cluster / "venv" / "bin" / "ray"
    real.write_text('#!/bin/sh\necho "the real ray $*"\n')
    real.chmod(0o755)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    raylet = subprocess.Popen([*sleep, "x/raylet", f"--socket={cluster}/tmp/session_1/sockets/raylet"])
    own = subprocess.Popen([*sleep, f"--session-dir={cluster}/tmp/session_1/logs"])
    other = subprocess.Popen([*sleep, "--session-dir=/tmp/ray/session_1/logs", "raylet"])
    env, script = {**os.environ, "HOME": str(tmp_path)}, FOLDER / "scoped_ray.sh"
    try:
        time.sleep(0.1)
        done = subprocess.run(["sh", script, "start", "--head"], env=env, capture_output=True, text=True, timeout=10)
        assert done.stdout == "the real ray start --head\n"
        time.sleep(0.3)
        assert raylet.poll() is None and own.poll() is None, "nothing ends while the raylet runs"
        raylet.kill()
        raylet.wait()
        assert own.wait(10) != 0, "it ends with the raylet"
        own = subprocess.Popen([*sleep, f"--session-dir={cluster}/tmp/session_1/logs"])
        time.sleep(0.1)
        stopped = subprocess.Popen(["sh", script, "stop"], env=env)
        assert own.wait(10) != 0
        assert stopped.wait(10) == 0
        assert other.poll() is None
        done = subprocess.run(["sh", script, "status"], env=env, capture_output=True, text=True)
        assert done.stdout == "the real ray status\n"
        assert subprocess.run(["sh", script, "stop"], env=env).returncode == 0, "nothing to stop is no fault"
    finally:
        for process in (own, other, raylet):
            process.kill()
            process.wait()


# --- Slurm ------------------------------------------------------------------------------------------------------------


def test_slurm_starts_one_ray_over_all_nodes_and_one_driver(tmp_path):
    stubs = {"scontrol": 'printf "n7\\nn8\\n"', "srun": 'printf "%s\\n" "$@"'}
    for name, script in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "RAYPAR_VENV": str(tmp_path),
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "8",
    }
    words = ["gpt-small", "--mesh.pp", "2", "--data.path", "a b.txt"]
    done = subprocess.run(["bash", FOLDER / "slurm.sh", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "RAY_ADDRESS=n7:6379" in said
    at, end = said.index("symmetric-run"), said.index("--")
    assert said[end + 1 :] == ["raypar", "train", *words]
    parsed = symmetric_run.make_context("ray symmetric-run", said[at + 1 : end], resilient_parsing=True).params
    assert (parsed["address"], parsed["min_nodes"]) == ("n7:6379", 2)
    options = [word for word in parsed["ray_args_and_entrypoint"] if word.startswith("--")]
    start.make_context("ray start", ["--head", *options])
    text = (FOLDER / "slurm.sh").read_text()
    assert "#SBATCH --exclusive" in text and "RAY_AUTH_MODE=token" in text


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def closed(required, **properties):
    """The schema of an object that has no other fields."""
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


TEXT, COUNT, TEXTS = {"type": "string"}, {"type": "integer", "minimum": 0}, {"additionalProperties": {"type": "string"}}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti)?$"}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = closed(
    "name image resources",
    name=TEXT,
    image=TEXT,
    resources=closed("requests limits", requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts={"type": "array", "items": closed("name mountPath", name=TEXT, mountPath=TEXT)},
)
VOLUME = closed(
    "name",
    name=TEXT,
    persistentVolumeClaim=closed("claimName", claimName=TEXT),
    emptyDir=closed("", medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
POD = closed(
    "spec",
    spec=closed(
        "containers",
        containers={"type": "array", "minItems": 1, "items": CONTAINER},
        volumes={"type": "array", "items": VOLUME},
    ),
)
# What examples/cluster/rayjob.yaml uses of KubeRay's ray.io/v1, from its API reference (1.6.2).
RAY_JOB = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed("name", name={"type": "string", "maxLength": 47}),
    spec=closed(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        backoffLimit=COUNT,
        rayClusterSpec=closed(
            "headGroupSpec",
            rayVersion=TEXT,
            authOptions=closed("", mode={"enum": ["disabled", "token"]}),
            headGroupSpec=closed("template", rayStartParams=TEXTS, template=POD),
            workerGroupSpecs={
                "type": "array",
                "items": closed(
                    "groupName template minReplicas maxReplicas",
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=TEXTS,
                    template=POD,
                ),
            },
        ),
    ),
)


@pytest.fixture
def manifests():
    return list(yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text()))


def test_the_manifest_is_a_ray_job_with_a_volume_that_all_pods_see(manifests):
    claim, job = manifests
    jsonschema.validate(job, RAY_JOB)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (container,) = pod["containers"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert job["spec"]["entrypoint"].split("--folder ")[1].startswith(tuple(mounted)), "its folder is on the volume"
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1, "all pods have the same versions"


def test_its_pods_have_room_for_its_actors(manifests):
    cluster = manifests[1]["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    room = sum(
        int(group["replicas"]) * int(pod["resources"]["limits"]["cpu"])
        for group in cluster["workerGroupSpecs"]
        for pod in group["template"]["spec"]["containers"]
    )
    words = shlex.split(manifests[1]["spec"]["entrypoint"])
    assert words[:2] == ["raypar", "train"]
    assert math.prod(int(ways) for flag, ways in pairwise(words) if flag.startswith("--mesh.")) <= room


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda job: job["spec"].update(entrypont="x"), "entrypont"),
        (lambda job: job["spec"]["rayClusterSpec"]["authOptions"].update(mode="password"), "password"),
        (lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(replicas="2"), "is not of type"),
        (lambda job: job["metadata"].update(name="x" * 60), "is too long"),
    ],
)
def test_a_broken_manifest_is_refused(manifests, break_it, says):
    break_it(manifests[1])
    with pytest.raises(jsonschema.ValidationError, match=says):
        jsonschema.validate(manifests[1], RAY_JOB)
