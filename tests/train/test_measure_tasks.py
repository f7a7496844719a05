"""`rotorch eval --tasks`: tasks of lm-eval under layouts, against the model of transformers asked one by one."""

import json

import pytest
import torch
from commands import rotorch, write_run
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HAS_HARNESS = True
try:
    import lm_eval  # noqa: F401
except ImportError:
    HAS_HARNESS = False
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="needs the package lm-eval (make test-peers)")

WORDS = ["ring", "round", "home", "slice"]
TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
task: {name}
output_type: {kind}
doc_to_text: "{asked}"
doc_to_target: "{{{{{answer}}}}}"
{more}
metric_list: [{{metric: {metric}}}]
"""
TASKS = {
    "choose_a_word": dict(
        kind="multiple_choice",
        asked="{{question}}",
        answer="answer",
        metric="acc",
        more='doc_to_choice: "{{choices}}"',
    ),
    "read_texts": dict(kind="loglikelihood_rolling", asked="", answer="text", metric="bits_per_byte", more=""),
    "write_on": dict(
        kind="generate_until",
        asked="{{question}}",
        answer="written",
        metric="exact_match",
        more='generation_kwargs: {until: ["e"], max_gen_toks: 6, do_sample: false}',
    ),
}
"""Tasks of each way in which the harness asks, on the same records."""


@pytest.fixture(scope="module")
def run(tmp_path_factory, warm):
    directory = tmp_path_factory.mktemp("run")
    done = rotorch(directory / "log", "train", write_run(directory), "train.steps=30")
    assert done.code == 0, done.stderr
    exported = rotorch(directory / "log", "export", directory / "run", directory / "hf")
    assert exported.code == 0, exported.stderr
    return directory


def log_prob(model, context, continuation):
    """The log-probability of some bytes behind others, of which the model sees the last 32."""
    ids = torch.tensor([[*context, *continuation][-33:]])
    with torch.no_grad():
        log_probs = model(input_ids=ids[:, :-1]).logits[0].double().log_softmax(-1)
    targets = ids[0, 1:]
    picked = log_probs.gather(-1, targets.unsqueeze(-1))[:, 0][-len(continuation) :]
    return float(picked.sum())


def likeliest(model, context, length):
    ids = torch.tensor([list(context)])
    written = model.generate(ids, max_new_tokens=length, do_sample=False, eos_token_id=256, pad_token_id=256)
    return bytes(i for i in written[0, len(context) :].tolist() if i < 256).decode()


def write_tasks(directory, *, model=None):
    """Writes the tasks; what is to be written are the likeliest bytes of a model, if there is one."""
    directory.mkdir()
    records = []
    for number, word in enumerate(WORDS * 2):
        question = f"Slices go {word} and{' on' * (number % 3)}"
        records.append({"question": question, "choices": [f" {w}" for w in WORDS], "answer": number % 4})
        records[-1]["text"] = f"{question}; weights stay at home, and so does this {word}. " * 2
        records[-1]["written"] = likeliest(model, question.encode(), 6).partition("e")[0] if model else word
    data = directory / "questions.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, task in TASKS.items():
        (directory / f"{name}.yaml").write_text(TASK.format(data=data, name=name, **task))
    return records


@needs_harness
def test_answers_are_those_of_the_model_asked_question_by_question(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    records = write_tasks(tmp_path / "tasks", model=model)
    right = nats = num_bytes = 0
    for record in records:
        scores = [log_prob(model, record["question"].encode(), choice.encode()) for choice in record["choices"]]
        right += scores.index(max(scores)) == record["answer"]
        text = record["text"].encode()
        num_bytes += len(text)
        for start in range(
            0, len(text), 32
        ):  # windows that follow each other; the first has the end of a text before it
            before = [256] if start == 0 else [text[start - 1]]
            nats -= log_prob(model, before, list(text[start : start + 32]))
    expected = {"choose_a_word": {"acc": right / len(records)}, "write_on": {"exact_match": 1.0}}
    expected["read_texts"] = {"bits_per_byte": nats / num_bytes / torch.tensor(2.0).log().item()}
    told = ["--tasks", "choose_a_word,read_texts,write_on", "--task-dir", tmp_path / "tasks"]
    for layout in ("single", "rtp=2", "megatron=2"):
        file = tmp_path / f"{layout}.json"
        done = rotorch(tmp_path / "log", "eval", run / "run", *told, "--parallel", layout, "--json", file)
        assert done.code == 0, done.stderr
        found = json.loads(file.read_text())
        assert found["num_questions"]["choose_a_word"] == 8
        for task, numbers in expected.items():
            assert found["results"][task] == pytest.approx(numbers, rel=1e-4), (layout, task)
        assert "choose_a_word" in done.stdout and "bits_per_byte" in done.stdout
    few = rotorch(tmp_path / "log", "eval", run / "run", *told, "--limit", 3, "--json", file)
    assert few.code == 0 and json.loads(file.read_text())["num_questions"]["read_texts"] == 3


@needs_harness
def test_a_text_begins_with_the_start_token_as_in_the_harness_of_transformers(byte_level_bpe, tmp_path, monkeypatch):
    """A tokenizer that puts `<s>` before a text: lm-eval's own HFLM and `--tasks` find the same."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    byte_level_bpe.add_special_tokens(["<s>"])
    start = ("<s>", byte_level_bpe.token_to_id("<s>"))
    byte_level_bpe.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[start])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe, bos_token="<s>", eos_token="<|endoftext|>", model_max_length=32
    )
    tokenizer.save_pretrained(tmp_path / "hf")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    config = LlamaConfig(vocab_size=304, max_position_embeddings=32, **sizes, bos_token_id=start[1], eos_token_id=0)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    run_toml = write_run(tmp_path)
    text = run_toml.read_text()
    run_toml.write_text('[model]\ninit = "hf"\n' + text[text.index("[data]") :])
    settings = ["train.steps=20", "data.tokenizer=model", "data.held_out_fraction=0"]
    assert (done := rotorch(tmp_path / "log", "train", run_toml, *settings)).code == 0, done.stderr
    assert rotorch(tmp_path / "log", "export", tmp_path / "run", tmp_path / "trained").code == 0
    write_tasks(tmp_path / "tasks")
    names = ["choose_a_word", "read_texts"]

    def asked(**options):
        model = HFLM(str(tmp_path / "trained"), device="cpu", batch_size=1, dtype="float32", **options)
        known = TaskManager(include_path=str(tmp_path / "tasks"))
        found = simple_evaluate(model, tasks=names, task_manager=known, log_samples=False, bootstrap_iters=0)["results"]
        return found["choose_a_word"]["acc,none"], found["read_texts"]["bits_per_byte,none"]

    expected, without = asked(), asked(add_bos_token=False)
    told = ["--tasks", ",".join(names), "--task-dir", tmp_path / "tasks", "--json", tmp_path / "found.json"]
    assert (done := rotorch(tmp_path / "log", "eval", tmp_path / "run", *told)).code == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert (found["choose_a_word"]["acc"], found["read_texts"]["bits_per_byte"]) == pytest.approx(expected, rel=1e-5)
    assert without[1] != pytest.approx(expected[1], rel=1e-3)  # the start token makes a difference


@needs_harness
def test_a_task_that_is_not_there_is_named(run, tmp_path):
    write_tasks(tmp_path / "tasks")
    done = rotorch(tmp_path / "log", "eval", run / "run", "--tasks", "choose_word", "--task-dir", tmp_path / "tasks")
    assert done.code == 2 and "no task 'choose_word' (did you mean 'choose_a_word'?)" in done.stderr


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (["--tasks", "x", "--data", "y"], "--tasks beside --data or --windows"),
        (["--limit", "3"], "are of --tasks. Write --tasks NAME,... too"),
        (["--tasks", "x", "--task-dir", "nowhere"], "--task-dir nowhere: no such directory"),
        (["--tasks", "x", "--parallel", "pp=1"], "a pipeline answers no tasks"),
    ],
)
def test_what_does_not_go_together_is_refused(run, tmp_path, told, words):
    done = rotorch(tmp_path / "log", "eval", run / "run", *told)
    assert done.code == 2 and words in done.stderr, done.stderr


def test_a_missing_package_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.tasks", None)
    done = rotorch(tmp_path / "log", "eval", run / "run", "--tasks", "x")
    assert done.code == 2 and "pip install 'rotorch[lm-eval]'" in done.stderr
