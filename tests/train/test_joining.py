"""Ranks that something else starts, and what they agree on: real processes, as torchrun or an operator has them."""

import json
import os
import re
import socket

import pytest
import torch.distributed as dist
from bad_inputs import PLACE
from commands import Command, write_run
from failures import seen

from rotorch import mesh
from rotorch.comm.agreement import describe_differences
from rotorch.run_config import _known_keys, load_run_config
from rotorch.train.launch import joining
from rotorch.train.launch.joining import PER_HOST, flat, job_rank, published_files, rank_settings, versions
from rotorch.train.metrics import read_metrics

DIGESTS = {
    r'"\d+-[0-9a-f]+" on rank 0': '"65921-4f2c90d1" on rank 0',
    r'"\d+-[0-9a-f]+" on rank 1': '"65921-a07b33e5" on rank 1',
}
HOST = {re.escape(socket.gethostname()): "node-7"}


@pytest.fixture
def ranks(tmp_path, warm, monkeypatch):
    """Starts two ranks, which find each other through a store as torchrun's; returns them when both have ended."""
    write_run(tmp_path)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(*arguments, num_ranks=2, environment=None):
        commands = []
        for rank in range(num_ranks):
            own = {
                **PLACE,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                **(environment or {}),
            }
            for name, value in own.items():
                monkeypatch.setenv(name, value)
            command = ["train", tmp_path / "run.toml", "--parallel", "ddp=2", *(arguments[rank] if arguments else ())]
            commands.append(Command(tmp_path / f"log-{rank}", *command))
        for command in commands:
            command.wait()
        return commands

    return start


def said(command):
    """Its last line, less what it says of itself."""
    lines = command.stderr.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in command.stderr, command.stderr
    return lines[0].removeprefix("rotorch: ")


def test_ranks_with_the_same_configuration_train(ranks, tmp_path):
    assert [rank.code for rank in ranks()] == [0, 0]
    assert len(read_metrics(tmp_path / "run")) == 6


DIFFERENT = {
    "optimizer.lr": (["optimizer.lr=4e-3"], "optimizer.lr is 0.005 on rank 0 and 0.004 on rank 1"),
    "train.seed": (["train.seed=4"], "train.seed is 3 on rank 0 and 4 on rank 1"),
    "parallel.layout": (["--parallel", "rtp=2"], 'parallel.layout is "ddp=2" on rank 0 and "rtp=2" on rank 1'),
    "--resume": (["--resume"], "--resume is false on rank 0 and true on rank 1"),
}


@pytest.mark.parametrize("key", DIFFERENT)
def test_ranks_with_other_configurations_both_say_which(ranks, tmp_path, key):
    arguments, words = DIFFERENT[key]
    for rank, command in enumerate(ranks([], arguments)):
        assert command.code == 2
        assert said(command) == (
            f"rank {rank} on {socket.gethostname()}: ranks were started differently: {words}. Start all of them with "
            "the same"
        )
    if key == "optimizer.lr":
        seen("Ranks are started differently", command.stderr, instead=HOST)
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_texts_both_say_so(ranks, tmp_path, monkeypatch):
    """Under one name, as on two hosts of which one has an older copy."""
    real = joining.rank_findings

    def found(run, *, corpus):
        return real(run, corpus=corpus + "0" * int(os.environ["RANK"]))

    monkeypatch.setattr("rotorch.train.run.rank_findings", found)
    for command in ranks():
        assert command.code == 2 and "the text as tokens (number-checksum) is" in said(command)
    seen("Ranks have different texts", command.stderr, instead=HOST | DIGESTS)
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_versions_both_say_so(ranks, monkeypatch):
    real = joining.version
    monkeypatch.setattr(joining, "version", lambda package: real(package) + ".post1" * int(os.environ["RANK"]))
    for command in ranks():
        assert command.code == 2
        assert "version of torch is" in said(command) and "version of transformers is" in said(command)
    seen("Ranks have different libraries", command.stderr, instead=HOST | {r"\+cpu": ""})


@pytest.mark.parametrize("refuses", [0, 1])
@pytest.mark.parametrize("wrong", ["train.stpes=3", "data.source=nowhere.txt", "--nprocs=2"])
def test_a_rank_that_refuses_says_why_and_the_others_hear_of_it(ranks, refuses, wrong):
    """Before torch is loaded, after that, and by the command line's own parser."""
    own = [[], []]
    own[refuses] = [wrong]
    commands = ranks(*own)
    assert [command.code for command in commands] == [2, 2]
    host = socket.gethostname()
    reason = said(commands[refuses]).removeprefix(f"rank {refuses} on {host}: ")
    if wrong == "data.source=nowhere.txt":  # told apart from the other rank's source before anybody looks for it
        assert reason.startswith("ranks were started differently: data.source is")
    else:
        other = 1 - refuses
        assert said(commands[other]) == f"rank {other} on {host}: rank {refuses} on {host} did not start: {reason}"
        if wrong == "train.stpes=3" and refuses == 1:
            seen("One rank refuses to start", commands[other].stderr, instead=HOST | {r"/\S*/run.toml": "run.toml"})


def test_ranks_that_all_refuse_all_say_so(ranks):
    for rank, command in enumerate(ranks(["train.stpes=3"], ["train.stpes=3"])):
        assert command.code == 2
        assert said(command).startswith(f"rank {rank} on {socket.gethostname()}: {os.sep}")
        assert "did you mean 'train.steps'?" in said(command)


# ---------------------------------------------------------------- what is compared


def changed(value):
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case list() | tuple():
            return [*value, *(value[:1] or ["something"])]
        case dict():
            return {**value, "rope_theta": 1.0}
        case None:
            return "something"


KEYS = dict.fromkeys(".".join(key.split(".")[:2]) for key in _known_keys())


@pytest.mark.parametrize("key", [key for key in KEYS if not key.startswith("lora.")])
def test_any_one_key_of_a_run_is_named(tmp_path, key):
    config = load_run_config(write_run(tmp_path))
    dumped = config.model_dump(mode="json")
    section, name = key.split(".")
    other = json.loads(json.dumps(dumped))
    other[section][name] = changed(dumped[section][name])
    tables = [told(values) for values in (dumped, other)]
    differing = {k: str(tables[1].get(k)) for k in {**tables[0], **tables[1]} if tables[0].get(k) != tables[1].get(k)}
    if key in PER_HOST:
        assert not differing
    else:
        assert differing and all(k.startswith(key) for k in differing)
        assert f"{next(iter(differing))} is " in describe_differences(tables[0], {1: differing})


OF_OTHER_TYPES = {
    "data.mixture": "{'text.txt'=1.0}",
    "data.suffixes": "['.rst']",
    "evals": "[]",
    "model.config": "{model_type='llama'}",
    "train.accumulation": "1",
    "train.global_batch": "4",
}
"""Other values of keys that are None, or whose value is a table."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", [k for k in KEYS if k not in {*PER_HOST, "parallel.layout"} and (k == "lora.rank" or k[:5] != "lora.")]
)
def test_ranks_that_differ_in_any_one_key_both_name_it(ranks, tmp_path, key):
    """By the comparison or, where the other value alone is wrong, in the words of the rank that has it.

    `parallel.layout` is among the few above: here all ranks have an option of it. A run without adapters has no other
    key of theirs.
    """
    section, name = key.split(".")
    mine = (load_run_config(write_run(tmp_path)).model_dump(mode="json")[section] or {}).get(name)
    value = OF_OTHER_TYPES.get(key) or json.dumps(changed(mine))
    for rank, command in enumerate(ranks([], [f"{key}={value}"])):
        assert command.code == 2, command.stderr
        assert said(command).startswith(f"rank {rank} on ") and section in said(command) and name in said(command)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["rank", "alpha", "dropout", "targets"])
def test_a_section_that_one_rank_has_is_named(tmp_path, key):
    dumped = load_run_config(write_run(tmp_path), overrides=["lora.rank=4", "lora.alpha=8.0"]).model_dump(mode="json")
    other = {**dumped, "lora": {**dumped["lora"], key: changed(dumped["lora"][key])}}
    none = {**dumped, "lora": None}
    tables = [told(values) for values in (dumped, other, none)]
    assert [k for k in tables[0] if tables[0][k] != tables[1][k]] == [f"lora.{key}"]
    assert tables[2].keys() - tables[0].keys() == {"lora"}


def told(config):
    return rank_settings(config, resume=False, num_ranks=2)


def test_what_may_differ_between_hosts_is_a_key():
    assert set(_known_keys()) >= PER_HOST


@pytest.mark.parametrize(
    ("init", "names"),
    [("model.gguf", ["model.gguf"]), ("gguf", ["a.gguf"]), ("tensors", ["1.safetensors", "2.safetensors"])],
)
def test_files_of_published_weights_are_compared(tmp_path, init, names):
    for name in ("model.gguf", "gguf/a.gguf", "tensors/2.safetensors", "tensors/1.safetensors", "tensors/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [path.name for path in published_files(tmp_path / init)] == names
    assert published_files(tmp_path / "random") == []


def test_versions_are_those_that_numbers_depend_on():
    assert versions().keys() == {f"version of {what}" for what in ("rotorch", "python", "torch", "transformers")}


def test_tables_of_tables_become_one():
    assert flat({"a": {"b": {"c": 1}, "d": {}}, "e": None}) == {"a.b.c": 1, "a.d": {}, "e": None}


# ---------------------------------------------------------------- the environment


def test_a_process_that_is_no_rank_has_no_place(monkeypatch):
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    assert job_rank() is None


def test_a_process_that_is_a_rank_has_one(monkeypatch):
    for name, value in {**PLACE, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert str(job_rank()) == f"rank 1 on {socket.gethostname()}"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_ranks_that_an_operator_starts_find_each_other_where_rank_0_is(ranks, tmp_path):
    """Rank 0 serves the store, and stays until all have read what ends the job."""
    by_hand = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    for command in ranks([], ["optimizer.lr=4e-3"], environment=by_hand):
        assert command.code == 2 and "optimizer.lr is 0.005 on rank 0 and 0.004 on rank 1" in said(command)
    assert [command.code for command in ranks(environment=by_hand)] == [0, 0]


def test_a_rank_0_that_never_comes_is_missed_in_time(ranks, tmp_path, monkeypatch):
    """Rank 1 is started, and where rank 0 should be nobody listens."""
    monkeypatch.setattr("rotorch.train.run.BACKSTOP_S", 0.0)
    alone = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port()), "RANK": "1", "LOCAL_RANK": "1"}
    (command,) = ranks(["train.timeout_s=1"], num_ranks=1, environment=alone)
    assert command.code == 3
    assert said(command) == (
        f"rank 1 on {socket.gethostname()} did not find rank 0 at MASTER_ADDR=127.0.0.1, "
        f"MASTER_PORT={alone['MASTER_PORT']} within 1 s: Connection refused. Start rank 0, and give all ranks the "
        "address of its host and its port"
    )
    seen("Rank 0 does not come", command.stderr, instead=HOST | {r"(?<=MASTER_PORT=)\d+": "29500"})
    assert not (tmp_path / "run").exists()


def test_a_rank_looks_for_rank_0_no_longer_than_it_may(monkeypatch):
    """torch's own client tries for several times its timeout, so it is asked for once somebody is there."""
    now = [0.0]
    monkeypatch.setattr(mesh.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(mesh.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    for name, value in {**PLACE, "RANK": "1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **options: pytest.fail("nobody serves it"))
    with pytest.raises(RuntimeError, match=r"^Connection refused$"):
        mesh.find_store(timeout_s=10.0)
    assert 9.0 <= now[0] <= 10.0


@pytest.mark.parametrize("host", ["\u00fc" * 64, "node-8.invalid"], ids=["no name", "unknown"])
def test_ranks_that_are_sent_to_a_host_without_an_address_say_so_soon(ranks, tmp_path, monkeypatch, host):
    monkeypatch.setattr("rotorch.mesh._NAME_S", 0.5)
    for rank, command in enumerate(ranks(environment={"MASTER_ADDR": host})):
        assert command.code == 2
        mine = f"rank {rank} on {socket.gethostname()}: MASTER_ADDR={host!r} has no address on this host: "
        assert said(command).startswith(mine)
    if host == "node-8.invalid":
        why = {r"(?<=host: ).*(?=\. Write)": "Name or service not known"}
        seen("The host of rank 0 has no address", command.stderr, instead=HOST | why)
    assert not (tmp_path / "run").exists()


def test_a_host_may_still_get_its_name(monkeypatch):
    answers = iter([socket.gaierror(socket.EAI_NONAME, "Name or service not known"), None])

    def ask(name, port):
        if (answer := next(answers)) is not None:
            raise answer

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    mesh._check_name("node-0", timeout_s=30.0)
    assert next(answers, "asked twice") == "asked twice"
