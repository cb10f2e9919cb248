"""cluster.yaml without an account: Ray's own schema, EC2's own parameters, Ray's own options, the security rules."""

import copy
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import botocore.session
import botocore.validate
import click
import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start

ROOT = Path(__file__).parents[1]
STARTS = ("head_start_ray_commands", "worker_start_ray_commands")


@pytest.fixture
def config():
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def ray_accepts(config):
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def env_and_options(command):
    """``A=b ray start --head`` as ``({"A": "b"}, options)``, parsed by Ray's own command (strictly)."""
    words = shlex.split(command.split(";")[-1])
    at = next(i for i, word in enumerate(words) if word.endswith("/ray"))
    assert words[at + 1] == "start", command
    env = dict(word.split("=", 1) for word in words[:at])
    return env, start.make_context("ray start", words[at + 2 :]).params


def start_commands(config):
    return {key: [c for c in config[key] if "ray start" in c] for key in STARTS}


def ec2_faults(node_config):
    """What botocore, which knows EC2's RunInstances, has to say about a node_config. Needs no network."""
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    request = {"MinCount": 1, "MaxCount": 1, **node_config}
    return botocore.validate.ParamValidator().validate(request, shape).generate_report()


def test_ray_accepts_it(config):
    prepared = ray_accepts(config)
    assert prepared["provider"]["type"] == "aws"
    assert prepared["available_node_types"]["head"]["max_workers"] == 0


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda c: c.update(head_start_ray_comands=[]), "head_start_ray_comands"),
        (lambda c: c["available_node_types"]["gpu4"].update(max_worker=3), "max_worker"),
        (lambda c: c["available_node_types"]["gpu4"]["resources"].update(GPU="4"), "not of type 'integer'"),
        (lambda c: c["auth"].update(user="me"), "user"),
        (lambda c: c.update(head_node_type="heads"), "head_node_type"),
        (lambda c: c["available_node_types"]["gpu4"].update(min_workers=9), "max_workers"),
    ],
)
def test_ray_refuses_a_broken_one(config, break_it, message):
    break_it(config)
    with pytest.raises((jsonschema.ValidationError, ValueError), match=message):
        ray_accepts(config)


def test_there_are_a_head_and_gpu_workers(config):
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    assert head["resources"] == {"CPU": 0}, "an actor could land on the head"
    assert types
    for name, worker in types.items():
        assert worker["resources"]["GPU"] > 0, name
        assert worker["min_workers"] == 0, f"{name} would cost money while nothing runs"
        assert worker["max_workers"] <= config["max_workers"], name
    assert any(worker["max_workers"] > 0 for worker in types.values())


def test_ec2_accepts_every_node_config(config):
    for name, node_type in config["available_node_types"].items():
        node = node_type["node_config"]
        assert not ec2_faults(node), name
        assert node["ImageId"].startswith("ami-"), f"{name}: without an image Ray takes an Ubuntu 18.04 of 2022"
        assert node["MetadataOptions"]["HttpTokens"] == "required", name
        assert all(disk["Ebs"]["Encrypted"] for disk in node["BlockDeviceMappings"]), name
    assert "InstanceTypo" in ec2_faults({**node, "InstanceTypo": "p5"})


def test_every_node_starts_with_token_auth_and_no_usage_report(config):
    for key, commands in start_commands(config).items():
        assert len(commands) == 1, key
        env, _ = env_and_options(commands[0])
        assert env["RAY_AUTH_MODE"] == "token", key
        assert env["RAY_USAGE_STATS_ENABLED"] == "0", key


def test_the_dashboard_is_on_loopback_and_only_ssh_is_open(config):
    _, head = env_and_options(*start_commands(config)["head_start_ray_commands"])
    assert head["head"]
    assert head["dashboard_host"] == "127.0.0.1"
    assert head["disable_usage_stats"]
    _, worker = env_and_options(*start_commands(config)["worker_start_ray_commands"])
    assert not worker["head"]
    assert worker["address"] == f"$RAY_HEAD_IP:{head['port']}"
    assert "security_group" not in config["provider"], "Ray's default group opens ssh and nothing else"


def test_ray_start_refuses_an_unknown_option():
    with pytest.raises(click.NoSuchOption, match="--dashboard-hots"):
        env_and_options("RAY_AUTH_MODE=token ~/venv/bin/ray start --head --dashboard-hots=0.0.0.0")


def test_every_node_installs_raypar_under_the_constraints(config):
    prepared = ray_accepts(config)
    for role in ("head_setup_commands", "worker_setup_commands"):
        installs = [c for c in prepared[role] if "pip install" in c]
        assert any(c.endswith("--editable ~/raypar") for c in installs), role
        assert all("--constraint ~/raypar/constraints.txt" in c for c in installs), role
    for name, node_type in config["available_node_types"].items():
        assert "worker_setup_commands" not in node_type, f"{name} would not run the common setup_commands"


def test_commands_are_shell(config):
    commands = [c for key, value in ray_accepts(config).items() if key.endswith("_commands") for c in value]
    assert commands
    for command in commands:
        check = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert check.returncode == 0, f"{command}\n{check.stderr}"


def test_what_is_mounted_is_enough_to_build_raypar(config, tmp_path):
    skip = shutil.ignore_patterns(*config["rsync_exclude"])
    mounts = {remote: local for remote, local in config["file_mounts"].items() if not remote.startswith("~/.ray")}
    for remote, local in mounts.items():
        to = tmp_path / remote.removeprefix("~/")
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / local).is_dir():
            shutil.copytree(ROOT / local, to, symlinks=True, ignore=skip)
        else:
            shutil.copy(ROOT / local, to)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist"]
    done = subprocess.run([*build, tmp_path / "raypar"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "raypar" / "constraints.txt").is_file()


def test_setup_closes_the_token_and_says_the_mode_once(config, tmp_path):
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o755)
    token.write_text("secret")
    token.chmod(0o644)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    (tmp_path / ".bashrc").touch()
    harmless = [c for c in config["setup_commands"] if c.startswith(("chmod", "grep"))]
    assert len(harmless) == 2
    for command in harmless * 2:
        subprocess.run(["bash", "-c", command], check=True, env={**os.environ, "HOME": str(tmp_path)})
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / ".bashrc").read_text().count("RAY_AUTH_MODE=token") == 1
