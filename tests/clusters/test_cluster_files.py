"""The files for clusters: their syntax, and that what they start is a command of rotorch."""

import ast
import os
import re
from pathlib import Path

import pytest
import yaml

from rotorch import cli
from rotorch.strategies import num_ranks, parse_parallel

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "examples" / "clusters"


@pytest.fixture
def run_toml(tmp_path):
    (tmp_path / "my_run.toml").write_text('[model]\nconfig = "missing.json"\n[train]\nsteps = 1\n')
    return str(tmp_path / "my_run.toml")


def is_understood(words, run_toml, capsys):
    """True if rotorch reads all of a command and only misses the model's file."""
    assert words[:1] == ["train"]
    words = [run_toml if word.endswith("my_run.toml") else word for word in words]
    code, error = cli.run(words), capsys.readouterr().err
    return code == 2 and "missing.json" in error


def container(path):
    document = yaml.safe_load(path.read_text())
    if document["kind"] == "TrainJob":
        trainer = document["spec"]["trainer"]
        return document, trainer, trainer["numNodes"] * trainer["numProcPerNode"]
    worker = document["spec"]["pytorchReplicaSpecs"]["Worker"]
    (found,) = worker["template"]["spec"]["containers"]
    return document, found, worker["replicas"] * int(document["spec"]["nprocPerNode"])


@pytest.mark.parametrize("name", ["trainjob.yaml", "pytorchjob.yaml"])
def test_of_kubernetes(name, run_toml, capsys):
    document, found, ranks = container(FILES / name)
    assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys()
    assert found["command"] == ["torchrun"]
    words = found["args"]
    (layout,) = (word.removeprefix("--parallel=") for word in words if word.startswith("--parallel="))
    assert num_ranks(parse_parallel(layout)) == ranks
    assert words[words.index("-m") + 1] == "rotorch"
    assert is_understood(words[words.index("rotorch") + 1 :], run_toml, capsys)


CRDS = {"trainjob.yaml": "trainer.kubeflow.org_trainjobs.yaml", "pytorchjob.yaml": "kubeflow.org_pytorchjobs.yaml"}


def strict(schema):
    """A CRD's schema as JSON schema, which refuses unknown fields: Kubernetes drops them without a word."""
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    inner = [schema.get("items"), schema.get("additionalProperties"), *schema.get("properties", {}).values()]
    for part in inner:
        if isinstance(part, dict):
            strict(part)
    return schema


@pytest.mark.parametrize("name", CRDS)
def test_of_kubernetes_against_its_crd(name):
    """ROTORCH_CRDS names a directory with Kubeflow's CRDs (`manifests/base/crds` of its sources)."""
    jsonschema = pytest.importorskip("jsonschema")
    if not (directory := os.environ.get("ROTORCH_CRDS")):
        pytest.skip("ROTORCH_CRDS names no directory with Kubeflow's CRDs")
    document = yaml.safe_load((FILES / name).read_text())
    crd = yaml.safe_load((Path(directory) / CRDS[name]).read_text())
    (version,) = (v for v in crd["spec"]["versions"] if document["apiVersion"].endswith(f"/{v['name']}"))
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.Draft7Validator(schema)
    assert not [error.message for error in validator.iter_errors(document)]
    assert [*validator.iter_errors({**document, "spec": {**document["spec"], "nodes": 4}})]  # an unknown field is seen


def test_ranks_that_pytorchjob_may_lose():
    document, found, _ = container(FILES / "pytorchjob.yaml")
    policy, per_node = document["spec"]["elasticPolicy"], int(document["spec"]["nprocPerNode"])
    (elastic,) = (word.removeprefix("--elastic=") for word in found["args"] if word.startswith("--elastic="))
    assert elastic == f"{policy['minReplicas'] * per_node}:{policy['maxReplicas'] * per_node}"


def test_of_slurm(run_toml, capsys):
    text = (FILES / "slurm.sbatch").read_text()
    usages = [usage.split() for usage in re.findall(r"#   sbatch .*?(my_run.*)", text)]
    options = dict(re.findall(r"#SBATCH --(\S+?)=(\S+)", text))
    on_cpus = dict(re.findall(r"--(\S+?)=(\S+)", re.search(r"#   (sbatch --nodes.*)", text)[1]))
    assert options["ntasks-per-node"] == options["gpus-per-node"]  # a rank per GPU
    assert len(usages) == 2
    for usage, of in zip(usages, (options, on_cpus), strict=True):
        assert is_understood(["train", *usage], run_toml, capsys)
        assert num_ranks(parse_parallel(usage[-1])) == int(of["nodes"]) * int(of["ntasks-per-node"])


def test_of_ray():
    tree = ast.parse((FILES / "ray_train.py").read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == "rank" for node in tree.body)
    (backend,) = (n.value for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "backend")
    assert {"gloo", "cpu:gloo,cuda:nccl"} == {n.value for n in ast.walk(backend) if isinstance(n, ast.Constant)}


def test_the_page_names_every_file():
    page = (ROOT / "docs" / "clusters.md").read_text()
    for path in FILES.iterdir():
        assert f"(../examples/clusters/{path.name})" in page


def test_the_command_of_the_page(run_toml, capsys):
    page = (ROOT / "docs" / "clusters.md").read_text()
    command = re.search(r"```\n.*?(torchrun --.*?)```", page, re.DOTALL)[1].replace("\\\n", " ").split()
    assert is_understood(command[command.index("rotorch") + 1 :], run_toml, capsys)
