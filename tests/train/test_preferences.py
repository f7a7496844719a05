"""Preference pairs: their tokens, the loss against its formula, runs under layouts, going on, and what is refused."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import rotorch, write_run
from safetensors.torch import save_file
from test_instructions import TEMPLATE
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rotorch import cli
from rotorch.core.errors import ConfigError
from rotorch.models.hf import load_config
from rotorch.models.preference_loss import REFERENCE, PreferenceLoss
from rotorch.parallelize import load_step_code, parallelize
from rotorch.run_config import load_run_config
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.compare import gradient_errors
from rotorch.testing.ranks import run_ranks
from rotorch.train.data.batches import check_source, open_windows, prepare_corpus
from rotorch.train.metrics import read_metrics
from rotorch.train.reference import _files, _pairs_to_read, key_of
from rotorch.train.step import rewards_of

BETA = 0.3
FIELDS = ("prompt", "chosen", "rejected")
PAIRS = [
    {"prompt": "2+2=", "chosen": "4", "rejected": "5!"},
    {"prompt": "Say ring:", "chosen": " ring", "rejected": " sling"},
]


def windows(folder, records, *, length=24, held_out=0.0, suffix="jsonl", **options):
    file = folder / f"pairs.{suffix}"
    if suffix == "jsonl":
        file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    options.setdefault("preferences", FIELDS)
    checked = check_source(
        file, sequence_length=length, held_out_fraction=held_out, cache_dir=folder / "cache", **options
    )
    prepare_corpus(checked)
    return open_windows(checked, seed=0)[0]


def rows(train):
    """Inputs and labels of all windows in file order: chosen rows, then rejected ones."""
    batch = train.to_batch([train.stored(index) for index in range(len(train))])
    return batch["input_ids"].tolist(), batch["shift_labels"].tolist()


def targets(labels):
    return [label for label in labels if label != -100]


# ---------------------------------------------------------------- records


def test_a_pair_is_two_rows_of_which_responses_are_targets(tmp_path):
    train = windows(tmp_path, PAIRS)
    ids, labels = rows(train)
    assert len(train) == 2 and train.tokens_per_window == 48
    assert [bytes(row[:5]) for row in ids] == [b"2+2=4", b"Say r", b"2+2=5", b"Say r"]
    assert [targets(row) for row in labels] == [
        [*b"4", 256], [*b" ring", 256], [*b"5!", 256], [*b" sling", 256]
    ]  # fmt: skip
    assert labels[0][:3] == [-100] * 3 and labels[0][3] == ord("4")


def test_a_prompt_that_is_not_written_apart_is_what_both_begin_with(tmp_path):
    together = [{name: pair["prompt"] + " " + pair[name].strip() for name in FIELDS[1:]} for pair in PAIRS]
    ids, labels = rows(windows(tmp_path, together))
    assert [bytes(targets(row)[:-1]) for row in labels] == [b" 4", b" ring", b" 5!", b" sling"]
    assert bytes(ids[0][:6]) == b"2+2= 4"


def test_rows_of_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), tmp_path / "pairs.parquet")
    of_parquet = rows(windows(tmp_path, PAIRS, suffix="parquet"))
    assert of_parquet == rows(windows(tmp_path, PAIRS))
    spoilt = pyarrow.Table.from_pylist([PAIRS[0], {**PAIRS[1], "chosen": None}])
    pyarrow.parquet.write_table(spoilt, tmp_path / "pairs.parquet")
    with pytest.raises(ConfigError, match=r"row 2: no field 'chosen'"):
        windows(tmp_path, PAIRS, suffix="parquet")


@pytest.fixture
def chat(tmp_path, byte_level_bpe):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe, eos_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


def said(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_conversations_are_written_by_the_chat_template(tmp_path, chat):
    before = said(("user", "a ring"), ("assistant", "turns"), ("user", "and"))
    answers = [said(("assistant", "again")), said(("assistant", "never"))]
    apart = {"prompt": before, "chosen": answers[0], "rejected": answers[1]}
    together = {"chosen": before + answers[0], "rejected": before + answers[1]}
    train = windows(tmp_path, [apart, together], tokens=chat, length=64)
    ids, labels = rows(train)
    decode = PreTrainedTokenizerFast.from_pretrained(chat).decode
    assert ids[0] == ids[1] and ids[2] == ids[3]
    assert [decode(targets(row)) for row in labels] == ["again", "again", "never", "never"]
    assert decode(ids[0]).startswith("<|endoftext|>user:a ring<|endoftext|>assistant:turns<|endoftext|>user:and")


def test_a_long_response_loses_its_end_and_a_long_prompt_the_pair(tmp_path, caplog):
    records = [PAIRS[0], {**PAIRS[1], "rejected": "r" * 40}, {**PAIRS[1], "prompt": "p" * 40}]
    train = windows(tmp_path, records)
    assert len(train) == 2 and len(targets(rows(train)[1][3])) == 16
    assert "1 pairs are longer" not in caplog.text and "1 pairs left out" in caplog.text and "line 3" in caplog.text


def test_pairs_that_are_equal_as_far_as_a_row_goes_are_left_out(tmp_path, caplog):
    same = {"prompt": "a", "chosen": "x" * 30 + "y", "rejected": "x" * 30 + "z"}
    assert len(windows(tmp_path, [*PAIRS, same])) == len(PAIRS)
    assert "1 pairs left out, whose responses are the same as far as a row goes" in caplog.text


def test_samples_that_a_roll_back_has_left_behind_count_for_the_reference(tmp_path):
    train = windows(tmp_path, [{"prompt": "a", "chosen": f"b{n}", "rejected": f"c{n}"} for n in range(6)])
    settings = SimpleNamespace(steps=2, on_nonfinite="stop", spike_factor=0.0, eval_windows=1)
    resume = SimpleNamespace(manifest=SimpleNamespace(data={"steps_read_ahead": 2}))
    run = SimpleNamespace(config=SimpleNamespace(train=settings), sizes=SimpleNamespace(global_batch=1), resume=resume)
    read = dict(_pairs_to_read(run, train=train, measured=[]))
    assert read.keys() == {key_of(train.stored(train.index_of(sample))) for sample in range(4)}


def test_models_that_differ_in_one_tensor_are_different_references(tmp_path):
    tensors = {f"layers.{n}.weight": torch.full((300, 300), float(n)) for n in range(24)}
    digests = set()
    for name in (None, "layers.12.weight"):
        if name is not None:
            tensors[name] = tensors[name] + 1
        save_file(tensors, tmp_path / "model.safetensors")
        digests.add(json.dumps(_files(tmp_path)))
    tensors["layers.12.weight"][150, 7:] = 3.0  # a sample of the file all along sees more than beginnings
    save_file(tensors, tmp_path / "model.safetensors")
    digests.add(json.dumps(_files(tmp_path)))
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([PAIRS[0], "{"], "pairs.jsonl', line 2: not valid JSON"),
        ([PAIRS[0], {"prompt": "p", "chosen": "c"}], "line 2: no field 'rejected'; the fields are prompt, chosen"),
        ([PAIRS[0], "", {**PAIRS[0], "chosen": 3}], "line 3: field 'chosen' is of type int"),
        ([{**PAIRS[0], "rejected": ""}], "line 1: field 'rejected' has no response"),
        ([{**PAIRS[0], "rejected": "4"}], "line 1: 'chosen' and 'rejected' are the same"),
        ([{**PAIRS[0], "chosen": said(("assistant", "4"))}], "line 1: field 'chosen' is of type list"),
        ([{n: said(("assistant", n)) for n in FIELDS}], "line 1: lists of messages need a tokenizer with a chat"),
        ([{"chosen": [{"role": "user"}], "rejected": []}], "line 1: message 1 of 'chosen' is no"),
        ([], "empty: no record"),
        ([{**PAIRS[0], "prompt": "p" * 99}], "no record has a response within 24 tokens"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, records, words):
    with pytest.raises(ConfigError) as caught:
        windows(tmp_path, records)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_too_few_pairs_to_hold_one_out(tmp_path):
    with pytest.raises(ConfigError, match="1 pairs, and one to train on and one to hold out are needed"):
        windows(tmp_path, PAIRS[:1], held_out=0.1)


# ---------------------------------------------------------------- the loss

QUICK = ("single", "fsdp=2", "rtp=2", "megatron=2")
"""A head in whole, in shards, in slices that rotate, and in slices that stay; the loss knows of no strategy."""

SLOW = ("ddp=2", "rtp=2[transport=send_receive]", "atp=1x2", "tesseract=1x1x2", "ddp=1,rtp=2")


def pairs_of_ids(num_pairs):
    """A batch of pairs of random ids, filled up, with the reference's numbers by some other model."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 90, (2 * num_pairs, 12), generator=generator)
    labels = torch.roll(ids, -1, 1)
    for row in range(2 * num_pairs):
        labels[row, : 2 + row % 3] = -100
        labels[row, 7 + row % 4 :] = -100
    reference = -20 - 10 * torch.rand(2 * num_pairs, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "shift_labels": labels, REFERENCE: reference}


def formula(model, batch):
    """Loss, reward margin and accuracy of all pairs, written out pair by pair."""
    losses, margins = [], []
    num_pairs = len(batch["input_ids"]) // 2
    for pair in range(num_pairs):
        ratios = []
        for row in (pair, num_pairs + pair):
            log_probs = model(input_ids=batch["input_ids"][row : row + 1]).logits[0].log_softmax(-1)
            of_row = sum(log_probs[t, k] for t, k in enumerate(batch["shift_labels"][row].tolist()) if k != -100)
            ratios.append(of_row - batch[REFERENCE][row])
        margins.append(BETA * (ratios[0] - ratios[1]))
        losses.append(-torch.log(1 / (1 + torch.exp(-margins[-1]))))
    right = sum(bool(margin > 0) for margin in margins) / num_pairs
    return sum(losses) / num_pairs, float(sum(margins).detach() / num_pairs), right


def part_of(batch, *, rank, num_ranks):
    """One rank's pairs of a batch: both rows of each."""
    num_pairs = len(batch["input_ids"]) // 2
    mine = torch.arange(rank * num_pairs // num_ranks, (rank + 1) * num_pairs // num_ranks)
    return {name: value[torch.cat([mine, mine + num_pairs])] for name, value in batch.items()}


def errors(config, layout):
    torch.manual_seed(1)
    alone = LlamaForCausalLM(config).double()
    torch.manual_seed(1)
    model = parallelize(LlamaForCausalLM(config).double(), layout, device="cpu", loss=PreferenceLoss(BETA))
    batch = pairs_of_ids(8)
    expected, margin, right = formula(alone, batch)
    expected.backward()
    mine = part_of(batch, rank=model.batch_rank, num_ranks=model.num_batch_ranks)
    halves = [part_of(mine, rank=half, num_ranks=2) for half in range(2)]
    found, beside = model.forward_backward(halves)
    rewards, measured = rewards_of(model, beside), model.evaluate(halves)
    gradients = gradient_errors(model.weights, {n: p.grad for n, p in alone.named_parameters()})
    model.close()
    return [
        abs(float(found - expected.detach())), abs(measured.loss - float(expected.detach())), max(gradients.values()),
        abs(rewards.margin - margin), abs(rewards.accuracy - right), abs(measured.num_targets - 8),
    ]  # fmt: skip


def errors_by_layout(config, layouts):
    with exact_arithmetic():
        return {layout: errors(config, layout) for layout in layouts}


@pytest.fixture(scope="module")
def measured(tiny):
    """Errors that each rank found under a layout, by a fork of ranks for all layouts that are as quick."""
    config = load_config(tiny("llama"))
    config.num_hidden_layers, config.vocab_size = 2, 92
    load_step_code(["ddp", "fsdp", "rtp", "megatron", "atp", "tesseract"])

    @functools.cache
    def of(layouts, num_ranks):
        return run_ranks(errors_by_layout, config, layouts, num_ranks=num_ranks)

    def by_rank(layout):
        layouts = (layout,) if layout == "single" else SLOW if layout in SLOW else QUICK[1:]
        return [of_rank[layout] for of_rank in of(layouts, num_ranks(parse_parallel(layout)))]

    return by_rank


@pytest.mark.parametrize("layout", [*QUICK, *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW)])
def test_loss_gradients_and_rewards_are_those_of_the_formula(measured, layout):
    for of_rank in measured(layout):
        assert max(of_rank) < 1e-10


def test_rewards_of_a_single_pair_are_its_own(tiny):
    config = load_config(tiny("llama"))
    config.num_hidden_layers, config.vocab_size = 1, 92
    torch.manual_seed(1)
    model = parallelize(LlamaForCausalLM(config).double(), "single", device="cpu", loss=PreferenceLoss(BETA))
    batch = pairs_of_ids(1)
    _, margin, right = formula(model.module, batch)
    rewards = rewards_of(model, model.forward_backward([batch])[1])
    model.close()
    assert (rewards.margin, rewards.accuracy) == (pytest.approx(margin), right)


def test_a_pair_that_fills_up_a_batch_counts_for_nothing(tmp_path):
    train = windows(tmp_path, PAIRS[:1])
    (part,) = train.evaluation_batches(micro_batch=3)
    assert part.batch["input_ids"].shape == (6, 24) and PreferenceLoss(BETA).count_targets(part.batch) == 1


# ---------------------------------------------------------------- runs


def write_pairs(folder, count=24):
    words = np.random.default_rng(2).choice(["ring", "slice", "turn", "home", "pass", "step"], size=(count, 3)).tolist()
    records = [{"prompt": f"{a} {n}:", "chosen": f" {b}", "rejected": f" {c}?"} for n, (a, b, c) in enumerate(words)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


@pytest.fixture
def run_toml(tmp_path):
    path = write_run(tmp_path)
    write_pairs(tmp_path)
    text = path.read_text().replace('source = "text.txt"', 'kind = "preferences"\nsource = "pairs.jsonl"')
    text = text.replace("held_out_fraction = 0.05", "held_out_fraction = 0.2").replace(
        "sequence_length = 16", "sequence_length = 24"
    )
    path.write_text(text + f"[dpo]\nbeta = {BETA}\n")
    return path


def train(run, *told):
    done = rotorch(run.parent / "log", "train", run, *told)
    assert done.code == 0, done.stderr
    return done


def numbers(out):
    """Metrics without times and memory; the first step's margins are rounding, so nothing is said of their signs."""
    lines = [{k: v for k, v in line.items() if "_s" not in k and k != "peak_bytes"} for line in read_metrics(out)]
    del lines[0]["reward_accuracy"]
    return lines


@pytest.mark.parametrize(
    ("layout", "micro_batch"), [("rtp=2", 2), pytest.param("megatron=2", 4, marks=pytest.mark.slow)]
)
def test_pairs_are_trained_alike_under_layouts_and_the_run_goes_on_under_another_one(
    run_toml, tmp_path, warm, layout, micro_batch
):
    settings = ["train.global_batch=4", "optimizer.schedule=constant", "train.eval_every=3"]
    found = {}
    for each, rows in {"single": 4, layout: micro_batch}.items():
        told = [f"train.micro_batch={rows}", "--parallel", each, f"train.out={tmp_path / each}"]
        done = train(run_toml, *settings, *told)
        found[each] = numbers(tmp_path / each)
    assert "of pairs right" in done.stdout
    first, last = found["single"][0], found["single"][-1]
    assert first["loss"] == pytest.approx(np.log(2)) and abs(first["reward_margin"]) < 1e-5
    assert last["loss"] < first["loss"] and last["reward_margin"] > 0
    assert {"held_out_loss", "held_out_reward_margin", "held_out_reward_accuracy"} <= last.keys()
    assert "held_out_bits_per_byte" not in last and last["tokens"] == 6 * 4 * 2 * 24
    for ours, alone in zip(found[layout], found["single"], strict=True):
        assert ours == pytest.approx(alone, rel=2e-4, abs=2e-5)
    tables = list((tmp_path / "cache").glob("*.reference"))
    assert len(tables) == 1 and len(np.load(tables[0])) == 24

    parts = [*settings, f"train.out={tmp_path / 'parts'}", "train.micro_batch=4"]
    train(run_toml, *parts, "train.steps=3")
    tables[0].unlink()  # as on another machine: the first weights are taken again
    train(run_toml, *parts[:-1], f"train.micro_batch={micro_batch}", "--parallel", layout, "--resume")
    for ours, alone in zip(numbers(tmp_path / "parts"), found["single"], strict=True):
        assert ours == pytest.approx(alone, rel=2e-4, abs=2e-5)
    other = rotorch(
        tmp_path / "log", "train", run_toml, *parts, "--resume", "train.steps=9", "train.precision=bfloat16"
    )
    assert other.code == 2 and "differ from those of the reference in" in other.stderr
    found = rotorch(tmp_path / "log", "lr-find", run_toml, "--steps", 10, "--json", tmp_path / "rates.json")
    rates = json.loads((tmp_path / "rates.json").read_text())
    assert found.code == 0 and rates["losses"][0] == pytest.approx(np.log(2)), found.stderr
    eval_ = rotorch(tmp_path / "log", "eval", tmp_path / "single")
    assert eval_.code == 2 and "Write a text to measure the model on: --data" in eval_.stderr


def test_pairs_of_several_sources_beside_adapters(run_toml, tmp_path, warm):
    config = load_run_config(run_toml).model.config
    from transformers import AutoConfig

    torch.manual_seed(1)
    LlamaForCausalLM(AutoConfig.for_model(**config)).save_pretrained(tmp_path / "model")
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS * 3))
    text = run_toml.read_text()
    text = f'[model]\ninit = "{tmp_path / "model"}"\n' + text[text.index("[data]") :]
    sources = (
        '[[data.sources]]\nname = "a"\nsource = "pairs.jsonl"\n[[data.sources]]\nname = "b"\nsource = "more.jsonl"\n'
    )
    text = text.replace('source = "pairs.jsonl"\n', "").replace("lr = 5e-3", "lr = 0.05")
    run_toml.write_text(text + sources + "[lora]\nrank = 2\n")
    done = train(run_toml, "--parallel", "fsdp=2", "train.micro_batch=2")
    found = numbers(tmp_path / "run")
    assert found[0]["loss"] == pytest.approx(np.log(2)) and found[-1]["loss"] < found[0]["loss"]
    assert {"eval_a_reward_margin", "eval_b_reward_accuracy"} <= found[-1].keys() and "b           loss" in done.stdout
    dry = rotorch(
        tmp_path / "log", "train", run_toml, "--dry-run", "--parallel", "fsdp=2", f"train.out={tmp_path / 'no'}"
    )
    assert dry.code == 0 and "fits: " in dry.stdout


def test_a_bench_does_not_measure_another_loss(run_toml, capsys):
    assert cli.run(["bench", str(run_toml), "--parallel", "rtp=2"]) == 2
    assert "bench: the loss of preference pairs is not measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (["--parallel", "pp=2"], "a pipeline computes the model's own loss alone"),
        (["--parallel", "fsdp=2[context=2]"], "ranks share each (context)"),
        (["data.pack=true"], "data.pack = True: pairs share no rows"),
        (["data.documents=apart"], "data.documents = 'apart': pairs share no rows"),
        (["data.kind=instructions"], "[dpo] is the loss of data.kind = 'preferences'"),
        (["dpo.beta=0"], "dpo.beta = 0"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(run_toml, told, words):
    done = rotorch(run_toml.parent / "log", "train", run_toml, *told)
    assert done.code == 2 and words in done.stderr, done.stderr


def test_keys_tell_pairs_apart(tmp_path):
    train = windows(tmp_path, PAIRS)
    assert len({key_of(train.stored(index)) for index in range(2)}) == 2
