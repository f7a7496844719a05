"""`rotorch eval --tasks`: tasks of lm-eval under layouts, against the model of transformers asked one by one."""

import json

import pytest
import torch
from commands import rotorch, write_run
from transformers import AutoModelForCausalLM

HAS_HARNESS = True
try:
    import lm_eval  # noqa: F401
except ImportError:
    HAS_HARNESS = False
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="needs the package lm-eval (make test-peers)")

WORDS = ["ring", "round", "home", "slice"]
CHOICE = """
task: choose_a_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: read_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
WRITTEN = """
task: write_on
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{written}}}}"
generation_kwargs: {{until: ["{until}"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


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


def write_tasks(directory, model):
    directory.mkdir()
    records = []
    for number, word in enumerate(WORDS * 2):
        question = f"Slices go {word} and{' on' * (number % 3)}"
        records.append({"question": question, "choices": [f" {w}" for w in WORDS], "answer": number % 4})
        records[-1]["text"] = f"{question}; weights stay at home, and so does this {word}. " * 2
        records[-1]["written"] = likeliest(model, question.encode(), 6).partition("e")[0]
    data = directory / "questions.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, text in {"choice": CHOICE, "rolling": ROLLING, "written": WRITTEN}.items():
        (directory / f"{name}.yaml").write_text(text.format(data=data, until="e"))
    return records


@needs_harness
def test_answers_are_those_of_the_model_asked_question_by_question(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    records = write_tasks(tmp_path / "tasks", model)
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
def test_a_task_that_is_not_there_is_named(run, tmp_path):
    write_tasks(tmp_path / "tasks", AutoModelForCausalLM.from_pretrained(run / "hf"))
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
