"""Fine-tunes SmolLM2-135M-Instruct on the State of the Union speeches over two ranks, exports it, and lets it speak.

    python examples/finetune_smollm2/finetune.py                          # the whole model: about a minute a step
    python examples/finetune_smollm2/finetune.py --layers 2 --steps 4     # its first two layers, to see it run
    python examples/finetune_smollm2/finetune.py --lora 8                 # adapters of rank 8 beside the whole model

The model has nine heads in three groups, which two ranks hold unevenly: two groups and one. The prompt of a record is
how a speech begins, the response how it goes on; only responses are learnt. The weights come from a file of four-bit
numbers, so this is not quite the model that was published.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import torch
from fetch import CACHE, Unavailable, smollm2, speeches
from transformers import AutoModelForCausalLM, AutoTokenizer

from rotorch import cli
from rotorch.models.gguf import open_gguf, read_gguf_metadata
from rotorch.models.hf import causal_lm, load_config
from rotorch.train.checkpoint.auxiliary_files import AUXILIARY_FILES

HERE = Path(__file__).parent
PROMPT = "Go on with this State of the Union address ({year}, {name}): {start}"


def main() -> int:
    """Fetches, trains, exports, generates; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", default="rtp=2", help="layout; rtp=2 by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, help="keep the model's first layers only")
    parser.add_argument("--lora", type=int, help="train adapters of this rank only")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"), help="must not exist")
    options = parser.parse_args()
    try:
        model, folder = smollm2(), speeches()
    except Unavailable as error:
        print(f"skipped: an input cannot be had here: {error}")
        return 0
    options.out.mkdir(parents=True)
    records = write_records(folder, options.out / "records.jsonl")
    start = model if options.layers is None else shorten(model, options.layers, options.out / "start")
    print(f"{records} records; the model starts from {start}", flush=True)
    run = options.out / "run"
    settings = {
        "model.init": start,
        "data.source": options.out / "records.jsonl",
        "data.cache_dir": CACHE,
        "train.steps": options.steps,
        "train.out": run,
    }
    if options.lora is not None:
        settings |= {"lora.rank": options.lora, "optimizer.lr": 1e-3}
    overrides = [f"{key}={value.absolute() if isinstance(value, Path) else value}" for key, value in settings.items()]
    code = cli.run(["train", str(HERE / "run.toml"), "--parallel", options.parallel, *overrides])
    export = ["export", str(run), str(options.out / "export"), "--max-shard-bytes", "200000000"]
    code = code or cli.run([*export, *(["--merge"] if options.lora is not None else [])])
    if options.lora is not None:
        code = code or cli.run(["export", str(run), str(options.out / "adapter")])  # for peft
    if code == 0:
        print(f"it says: {generate(options.out / 'export')!r}")
    return code


def write_records(folder: Path, file: Path) -> int:
    """Writes a record for every speech but that of 2015, on which perplexity is measured; returns how many."""
    lines = []
    for speech in sorted(folder.glob("*.txt")):
        about = json.loads(speech.with_suffix(".json").read_text("utf-8"))
        sentences = re.split(r"(?<=[.!?])\s+", speech.read_text("utf-8").strip())
        if about["year"] == 2015 or len(sentences) < 6:
            continue
        start, rest = " ".join(sentences[:2]), " ".join(sentences[2:6])
        prompt = PROMPT.format(year=about["year"], name=about["name"], start=start)
        lines.append(json.dumps({"prompt": prompt, "response": rest}))
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return len(lines)


def shorten(gguf: Path, layers: int, directory: Path) -> Path:
    """Writes the model's first layers as a Hugging Face directory."""
    described = read_gguf_metadata(gguf, CACHE / "gguf")
    config = load_config(described)
    config.num_hidden_layers, config.dtype = layers, torch.float32
    module = causal_lm(config)
    with torch.no_grad(), open_gguf(gguf, module=module) as stored:
        for name, parameter in module.named_parameters():
            stored[name].read(stored[name].whole, out=parameter)
    module.save_pretrained(directory)
    for name in AUXILIARY_FILES:
        if (described / name).is_file():
            shutil.copyfile(described / name, directory / name)
    return directory


def generate(directory: Path) -> str:
    """Text that transformers' own code generates with the exported model, taking the likeliest token each time."""
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    prompt = PROMPT.format(year=2015, name="Barack Obama", start="Mr. Speaker, my fellow Americans:")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main())
