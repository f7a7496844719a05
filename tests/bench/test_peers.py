import dataclasses
import io
import json

import pytest
import transformers
from bench_cases import TINY, write_run
from rich.console import Console

import rotorch.bench.peers as peers_module
from rotorch.bench import command
from rotorch.bench.command import BenchOptions, bench_command, check_model, exit_code, read_layouts
from rotorch.bench.contender import PlainLoop, whole_model
from rotorch.bench.gate import judge, judge_sharding, may_hold
from rotorch.bench.peers import PEERS, Peer, find_peer, help_text
from rotorch.bench.peers.hugging_face import _check_cut
from rotorch.bench.peers.tensor_parallel import TensorParallel, parallel_styles
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, ModelSpec, Unit, UnitKind, Weight

ONCE = BenchOptions(rounds=1, steps=3, process_memory=False)
H, F, V, L = TINY["hidden_size"], TINY["intermediate_size"], TINY["vocab_size"], TINY["num_hidden_layers"]
KV = H // TINY["num_attention_heads"] * TINY["num_key_value_heads"]
NORMS = H * (2 * L + 1)
MATRICES = 2 * V * H + L * (2 * H * H + 2 * H * KV + 3 * H * F)
WEIGHTS = 4 * (MATRICES + NORMS)
GPT = {
    "model_type": "gpt_neox",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "use_parallel_residual": False,
    "tie_word_embeddings": False,
}
PIPELINES = ["pipeline-fsdp2", "pipeline-fsdp2-keep"]  # want several micro-batches
OF_TORCH = [name for name, peer in PEERS.items() if peer.library == "torch" and name not in PIPELINES]
OF_EXPERTS = "hf-ep"
OF_OTHERS = [name for name, peer in PEERS.items() if peer.library != "torch" and name != OF_EXPERTS]


def measure(task, peers, *, parallel=()):
    layouts, _ = read_layouts(parallel, peers=peers, nproc=task.num_ranks)
    spec = check_model(task, layouts=layouts, peers=peers)
    record = command.measure(task, spec, layouts=layouts, peers=peers, options=ONCE)
    return record, {row["parallel"]: row for row in record["rows"]}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One run of torch's peers beside a layout: exit code, record, what was printed."""
    directory = tmp_path_factory.mktemp("peers")
    printed = io.StringIO()
    code = bench_command(
        write_run(directory),
        parallel=["rtp=2"],
        peers=OF_TORCH,
        options=ONCE,
        json_file=directory / "bench.json",
        bars=["rtp=2 >= 0.000001 * fsdp2"],
        console=Console(file=printed, width=160),
    )
    return code, json.loads((directory / "bench.json").read_text()), printed.getvalue()


@pytest.fixture(scope="module")
def rows(measured):
    return {row["parallel"]: row for row in measured[1]["rows"]}


def test_torchs_peers_train_as_one_process(measured, rows):
    code, record, printed = measured
    assert code == 0, printed
    assert list(rows) == ["rtp=2", *OF_TORCH] and record["bars"][0]["ok"] is True
    for name in OF_TORCH:
        row = rows[name]
        assert row["loss_max_rel_err"] < 1e-5, name
        compared = row["losses"][: len(record["reference_losses"])]
        assert compared == pytest.approx(record["reference_losses"], rel=1e-5) and len(compared) >= 4
        assert row["library"] == "torch" and row["library_version"].startswith("2.")
        assert not {"error", "invalid"} & set(row) and name in printed
    assert "library" not in rows["rtp=2"]


def test_peers_processes_are_set_as_those_of_layouts(measured, rows):
    """Freed memory is kept and gloo's threads wait for their turn in every row, but for those as torch leaves them."""
    assert {"torch-ddp-as-is", "fsdp2-as-is"} == {name for name, peer in PEERS.items() if peer.as_torch_leaves_it}
    for name in ("rtp=2", *OF_TORCH):
        found, as_is = rows[name]["process_settings"], PEERS[name].as_torch_leaves_it if name in PEERS else False
        assert found["keeps_freed_memory"] is not as_is, name
        assert (found["waiting_threads"] > 0) is not as_is, name
    assert measured[1]["limit"]["process_settings"] == {"keeps_freed_memory": True, "waiting_threads": 0}  # no gloo


def test_peers_hold_what_they_say(rows):
    assert rows["torch-ddp"]["weight_elements_by_rank"] == [WEIGHTS // 4] * 2
    for name in ("fsdp2", "fsdp2-recompute", "fsdp2-ends", "fsdp2-ends-recompute", "fsdp2-per-weight"):
        assert rows[name]["resident_by_category"]["weights"] == WEIGHTS // 2
        assert rows[name]["weight_elements_by_rank"] == [WEIGHTS // 8] * 2
    assert rows["tp"]["weight_elements_by_rank"] == [MATRICES // 2 + NORMS] * 2
    assert rows["fsdp2-recompute"]["peak_bytes_per_rank"] < rows["fsdp2"]["peak_bytes_per_rank"]
    assert rows["fsdp2-per-weight"]["peak_bytes_per_rank"] < rows["fsdp2"]["peak_bytes_per_rank"]
    for name in ("fsdp2", "fsdp2-recompute"):  # embedding and head are not whole at the same time
        assert rows[name.replace("fsdp2", "fsdp2-ends")]["peak_bytes_per_rank"] < rows[name]["peak_bytes_per_rank"]


def test_peers_send_what_they_should(rows):
    assert rows["torch-ddp"]["sent_by_kind"] == {"all_reduce": WEIGHTS}
    for name in ("fsdp2", "fsdp2-recompute", "fsdp2-per-weight"):
        assert rows[name]["sent_by_kind"]["reduce_scatter"] == WEIGHTS // 2
    # Forward: attention's and the MLP's input and the head's are gathered; backward gathers what forward scattered.
    activations = 4 * H * 16 * 4  # float32 of the whole global batch: 4 samples of 16 tokens
    sent = rows["tp"]["sent_by_kind"]
    assert sent["all_gather"] == (2 * L + 1 + 2 * L + 1) * activations // 2
    assert sent["reduce_scatter"] == (2 * L + 1 + 2 * L + 1) * activations // 2
    assert sent["all_reduce"] > 0  # norms, and the loss's maximum and sum


@pytest.mark.slow
def test_in_bfloat16_a_ring_holds_no_more_than_fsdp2_by_its_own_policy(task, rows):
    """Master weights, gradients and AdamW's averages in float32; FSDP2 gathers bfloat16 and sums float32."""
    record, found = measure(
        dataclasses.replace(task, precision="bfloat16"), ["fsdp2", "fsdp2-recompute"], parallel=["rtp=2"]
    )
    assert exit_code(record) == 0, record
    for name in ("fsdp2", "fsdp2-recompute"):
        assert found[name]["sent_by_kind"]["reduce_scatter"] == rows[name]["sent_by_kind"]["reduce_scatter"]
        assert found[name]["sent_by_kind"]["all_gather"] * 2 == rows[name]["sent_by_kind"]["all_gather"]
        ours, theirs = (sum(found[row]["resident_by_category"].values()) for row in ("rtp=2", name))
        assert theirs >= 4 * WEIGHTS // 2
        # Norms are whole on every rank, with copies in bfloat16.
        assert ours - 4 * (4 * NORMS) // 2 - 2 * NORMS <= theirs


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_gpt_models_on_four_ranks(task, accumulation):
    task = dataclasses.replace(task, model=GPT, num_ranks=4, accumulation=accumulation)
    record, rows = measure(task, ["torch-ddp", "fsdp2-per-weight", "tp", "hf-tp"])
    assert exit_code(record) == 0
    assert all(row["loss_max_rel_err"] < 1e-5 for row in rows.values())


@pytest.mark.slow
def test_a_plan_that_leaves_weights_out_leaves_them_whole(task, monkeypatch):
    """GPT-NeoX's says nothing of the embedding; what it names and is not cut ends the row."""
    record, rows = measure(dataclasses.replace(task, model=GPT), ["tp", "hf-tp"])
    assert exit_code(record) == 0, record
    assert rows["hf-tp"]["loss_max_rel_err"] < 1e-5
    embedding = GPT["vocab_size"] * GPT["hidden_size"]
    held = {name: sum(rows[name]["weight_elements_by_rank"]) for name in ("tp", "hf-tp")}
    assert held["hf-tp"] - held["tp"] == pytest.approx(embedding, rel=0.2)
    module = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**GPT))
    with pytest.raises(RuntimeError, match=r"left whole .*: gpt_neox\.layers\.0\.attention\.query_key_value\.weight, "):
        _check_cut(module)


def test_torchs_pipelines_train_as_one_process(task):
    for name in PIPELINES:
        with pytest.raises(ConfigError, match=r"2 ranks and 1 micro-batches a step.*train.accumulation=2"):
            find_peer(name).load().check(task)
    optimizer = task.optimizer.model_copy(update={"clip_norm": 0.0})
    task = dataclasses.replace(task, num_ranks=4, accumulation=2, optimizer=optimizer)
    record, rows = measure(task, PIPELINES)
    assert exit_code(record) == 0, record
    for name in PIPELINES:
        assert rows[name]["loss_max_rel_err"] < 1e-5
        assert sum(rows[name]["weight_elements_by_rank"]) == WEIGHTS // 4
    # One gather a group and step: of the layer, and of what stands before or after it.
    assert rows["pipeline-fsdp2-keep"]["messages_by_kind"]["all_gather"] == 2
    assert rows["pipeline-fsdp2"]["messages_by_kind"]["all_gather"] > 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_experts_of_transformers_are_held_once_and_clipped_with_all_else(task):
    with pytest.raises(ConfigError, match=r"no plan for experts of model_type='llama'\. Leave it out"):
        find_peer(OF_EXPERTS).load().check(task)
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    optimizer = task.optimizer.model_copy(update={"clip_norm": 0.1})
    task = dataclasses.replace(task, model={**task.model, **experts}, optimizer=optimizer)
    record, rows = measure(task, [OF_EXPERTS], parallel=["ep=2"])
    assert exit_code(record) == 0, record
    assert all(row["loss_max_rel_err"] < 1e-5 for row in rows.values())
    assert sum(rows[OF_EXPERTS]["weight_elements_by_rank"]) == sum(rows["ep=2"]["weight_elements_by_rank"])


def test_clipping_is_the_same_for_all(task):
    optimizer = task.optimizer.model_copy(update={"clip_norm": 0.1})
    record, rows = measure(dataclasses.replace(task, optimizer=optimizer), ["fsdp2", "tp"])
    assert exit_code(record) == 0, record
    assert all(row["loss_max_rel_err"] < 1e-5 for row in rows.values())


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize(
    # As in test_a_plan_that_leaves_weights_out_leaves_them_whole.
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "hf-tp" else name for name in OF_OTHERS],
)
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_other_libraries_train_as_one_process(task, name, accumulation):
    if not PEERS[name].installed:
        pytest.skip(f"{PEERS[name].library} is not installed")
    record, rows = measure(dataclasses.replace(task, accumulation=accumulation), [name])
    assert exit_code(record) == 0, record
    assert rows[name]["loss_max_rel_err"] < 1e-5 and rows[name]["library"] == PEERS[name].library
    # DeepSpeed keeps norms gathered beside their parts.
    assert WEIGHTS // 4 <= sum(rows[name]["weight_elements_by_rank"]) <= WEIGHTS // 4 + 2 * NORMS


# ---- rows that are not what they say --------------------------------------------------------------------------------


class Replicated(PlainLoop):
    """A sharding library that has degraded to replicas with averaged gradients."""

    def __init__(self, task, *, rank):
        module = whole_model(task)
        super().__init__(task, module=module, shares=range(task.num_ranks))


class Alone(PlainLoop):
    """A library that lets every rank train alone."""

    def __init__(self, task, *, rank):
        super().__init__(task, module=whole_model(task), shares=[rank])


@pytest.mark.parametrize(
    ("contender", "sharded", "says"),
    [
        ("Replicated", True, "ranks hold 2.00 times the model's weights"),
        ("Alone", False, "loss of step"),
        pytest.param("Alone", True, "loss of step", marks=pytest.mark.slow),
    ],
)
def test_a_row_that_degrades_silently_is_invalid(task, monkeypatch, contender, sharded, says):
    peer = Peer(about="broken", contender=f"broken:{contender}", sharded=sharded)
    monkeypatch.setitem(PEERS, "broken", peer)
    monkeypatch.setattr(Peer, "load", lambda self: globals()[self.contender.partition(":")[2]])
    record, rows = measure(task, ["broken"])
    assert says in rows["broken"]["invalid"]
    assert exit_code(record) == 1


def test_replicas_that_claim_nothing_are_valid(task, monkeypatch):
    monkeypatch.setitem(PEERS, "honest", Peer(about="", contender="honest:Replicated", sharded=False))
    monkeypatch.setattr(Peer, "load", lambda self: Replicated)
    assert exit_code(measure(task, ["honest"])[0]) == 0


def test_ranks_may_hold_vectors_each_and_matrices_once():
    weights = (Weight("w", (10, 10), 4), Weight("norm", (10,), 4))
    spec = ModelSpec("m", (Unit("all", UnitKind.REPLICATED, Combine.NONE, weights),))
    assert may_hold(spec, num_ranks=2) == 110 + 2 * (10 + 2)
    assert judge_sharding([60, 60], at_most=134, whole=110) is None
    assert "2.00 times" in judge_sharding([110, 110], at_most=134, whole=110)
    assert "0.91 times" in judge_sharding([50, 50], at_most=134, whole=110)  # some are missing


def test_losses_of_shares_are_held_to_their_mean_at_every_step():
    reference = [4.0, 4.2, 3.0]
    good = judge([[3.9, 4.1], [4.3, 4.1], [3.0, 3.0]], reference=reference, precision="float32", shares=True)
    assert good.reason is None
    bad = judge([[3.9, 4.1], [4.3, 4.1], [3.1, 3.0]], reference=reference, precision="float32", shares=True)
    assert "step 3" in bad.reason


# ---- what is asked for wrongly --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"peers": ["fsdp3"], "nproc": 2}, "unknown peer 'fsdp3'.*did you mean 'fsdp2'"),
        ({"peers": ["fsdp2", "fsdp2"], "nproc": 2}, "twice"),
        ({"peers": ["fsdp2"]}, "--nproc 2"),
        ({"peers": ["tp"], "nproc": 4}, r"4 ranks do not divide the 2 groups .* of 'model.layers.0.self_attn"),
        ({"peers": ["tp"], "nproc": 3}, "3 ranks do not divide data.sequence_length = 16.*sequence_length=18"),
    ],
)
def test_bad_input_starts_nothing(tmp_path, monkeypatch, arguments, says):
    monkeypatch.setattr("rotorch.bench.command.RowRanks", None)
    with pytest.raises(ConfigError, match=says):
        bench_command(write_run(tmp_path), console=Console(quiet=True), **arguments)


def test_a_peer_that_is_not_installed_is_a_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(peers_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"deepspeed is not installed. Write: pip install 'rotorch\[peers\]'"):
        find_peer("deepspeed-zero3")


def test_tied_and_uncut_weights_are_refused_by_tensor_parallel(task):
    with pytest.raises(ConfigError, match="tied"):
        TensorParallel.check(dataclasses.replace(task, model={**TINY, "tie_word_embeddings": True}))
    qwen = {**TINY, "model_type": "qwen3", "head_dim": 8}
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.self_attn\.q_norm' has no style"):
        parallel_styles(whole_model(dataclasses.replace(task, model=qwen)))


def test_every_peer_is_in_the_help():
    assert all(f"{name}: " in help_text() for name in PEERS)
