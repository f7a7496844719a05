"""The GPU benchmark's parts, as far as a CPU can run them: arguments, shapes, the faked group, the file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_without_a_gpu_it_says_so_in_one_line_and_is_content(monkeypatch, capsys, tmp_path):
    import gpu

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu.main(["--out", str(tmp_path / "none.json")]) == 0
    assert capsys.readouterr().out == "gpu: torch sees no CUDA device; nothing measured\n"
    assert not (tmp_path / "none.json").exists()


def test_wrong_arguments_are_refused(capsys):
    import gpu

    for arguments in (["--only", "nothing"], ["--tokens", "0"], ["--steps", "-1"]):
        with pytest.raises(SystemExit) as ended:
            gpu.main(arguments)
        assert ended.value.code == 2
    assert "--only" in capsys.readouterr().err


def test_the_file_says_what_was_run_on_what_and_a_part_that_fails_does_not_take_the_others(monkeypatch, tmp_path):
    import gpu

    def fails(**_):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(gpu.PARTS, "one_rank", fails)
    monkeypatch.setitem(gpu.PARTS, "shared", lambda **given: given)
    out = tmp_path / "results" / "gpu.json"
    arguments = ["--device", "cpu", "--tokens", "16", "--steps", "1", "--only", "shared", "--only", "one_rank"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", *arguments, "--out", str(out)])
    assert gpu.main() == 3
    found = json.loads(out.read_text())
    assert {"device", "machine", "versions", "commit", "date", "command"} <= found.keys()
    assert found["command"] == " ".join(["gpu.py", *arguments, "--out", "gpu.json"])
    assert "cuda" in found["versions"] and torch.__version__.startswith(found["versions"]["torch"].split("+")[0])
    assert list(found["parts"]) == ["one_rank", "shared"]
    assert found["parts"]["one_rank"] == {"error": "RuntimeError: out of memory"}
    assert found["parts"]["shared"] == {"device": "cpu", "tokens": 16, "steps": 1}


def test_slices_compute_the_whole_product_whichever_way(monkeypatch):
    import gpu_slices

    x, w = torch.randn(6, 64, dtype=torch.float64), torch.randn(64, 32, dtype=torch.float64)
    expected = x @ w
    for ways in (gpu_slices.by_columns(x, w), gpu_slices.by_rows(x, w)):
        assert {"whole", "slices", "two_streams", "two_at_once"} <= ways.keys()
        for way, run in ways.items():
            for _ in range(2):
                assert torch.allclose(run(), expected) == (way != "unsummed"), way


def test_slices_are_timed_for_every_matrix():
    import gpu_slices

    found = gpu_slices.measure(device="cpu", tokens=8, steps=2)
    assert found["slices"] == 8 and len(found["rows"]) == 3 * len(gpu_slices.SHAPES)
    for row in found["rows"]:
        assert row["of_whole"]["whole"] == 1.0
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert row["outputs"] * 64 in (gpu_slices.SHAPES[row["matrix"]][1], 128256)


def test_shapes_are_those_of_llama_3_8b():
    import gpu_one_rank
    import gpu_slices

    from rotorch.models.hf import causal_lm, config_from_dict

    with torch.device("meta"):
        module = causal_lm(config_from_dict(gpu_one_rank.LLAMA_3_8B, source="here"))
    assert sum(p.numel() for p in module.parameters()) == 8_030_261_248
    layer = module.model.layers[0]
    for name, weights in {
        "qkv": (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
        "o": (layer.self_attn.o_proj,),
        "gate": (layer.mlp.gate_proj,),
        "gate_up": (layer.mlp.gate_proj, layer.mlp.up_proj),
        "down": (layer.mlp.down_proj,),
        "head": (module.lm_head,),
    }.items():
        inputs, outputs, _ = gpu_slices.SHAPES[name]
        assert (weights[0].in_features, sum(w.out_features for w in weights)) == (inputs, outputs), name


@pytest.mark.parametrize("layout", ["rtp=8[transport=send_receive]", "fsdp=8", "ddp=8"])
def test_one_rank_of_eight_runs_steps_alone(layout, warm):
    import gpu_one_rank

    shapes = {**gpu_one_rank.TINY, "num_hidden_layers": 1}
    found = gpu_one_rank.one_case(layout, shapes=shapes, device="cpu", tokens=8, steps=2)
    assert found["layers"] == 1 and found["peak_bytes"] is None
    assert len(found["step_s_all"]) == 2 and found["step_s_median"] > 0
    assert not torch.distributed.is_initialized()


def test_all_layouts_of_one_rank_are_ones_that_rotorch_reads():
    import gpu_one_rank

    from rotorch.strategies import format_parallel, num_ranks, parse_parallel

    for layout in gpu_one_rank.LAYOUTS:
        assert num_ranks(parse_parallel(layout)) == gpu_one_rank.NUM_RANKS
        assert format_parallel(parse_parallel(layout)) == layout


def test_what_a_layer_adds_is_taken_for_all_others():
    import gpu_one_rank

    measured = [
        {"layers": 2, "peak_bytes": 100, "step_s_median": 1.0},
        {"layers": 4, "peak_bytes": 160, "step_s_median": 1.5},
    ]
    assert gpu_one_rank.scaled(measured, layers=32) == {"peak_bytes_scaled": 1000.0, "step_s_median_scaled": 8.5}
    assert gpu_one_rank.scaled([measured[0], {"layers": 4, "error": "out of memory"}], layers=32) == {}


@pytest.mark.slow
def test_a_case_that_fails_is_a_row_with_its_error(monkeypatch):
    import gpu_one_rank

    monkeypatch.setattr(gpu_one_rank, "LAYOUTS", ("rtp=8[transport=nothing]",))
    monkeypatch.setattr(gpu_one_rank, "DEPTHS", (1, 2))
    run, done = subprocess.run, []

    def run_first(command, **options):  # the other depth fails alike, and each takes seconds to load torch
        done.append(done[0] if done else run(command, **options))
        return done[-1]

    monkeypatch.setattr(subprocess, "run", run_first)
    (row,) = gpu_one_rank.measure(device="cpu", tokens=8, steps=1)["rows"]
    assert [case["layers"] for case in row["measured"]] == [1, 2]
    assert "transport" in row["measured"][0]["error"] and "peak_bytes_scaled" not in row


def test_ranks_that_share_are_exact():
    import gpu_shared

    found = gpu_shared.exactness("rtp=2[transport=shared_memory]", device="cpu")
    assert found["ok"] and max(found["max_rel_err_loss"], found["max_rel_err_grad"]) <= 1e-10
