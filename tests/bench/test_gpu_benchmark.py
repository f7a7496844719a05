"""The GPU benchmark's parts, as far as a CPU can run them: arguments, shapes, the faked group, the file."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

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
    import gpu_rank
    import gpu_slices

    from rotorch.models.hf import causal_lm, config_from_dict

    with torch.device("meta"):
        module = causal_lm(config_from_dict(gpu_rank.LLAMA_3_8B, source="here"))
    assert sum(p.numel() for p in module.parameters()) == 8_030_261_248
    layer = module.model.layers[0]
    for name, weights in {
        "qkv": (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
        "q": (layer.self_attn.q_proj,),
        "kv": (layer.self_attn.k_proj,),
        "o": (layer.self_attn.o_proj,),
        "gate": (layer.mlp.gate_proj,),
        "gate_up": (layer.mlp.gate_proj, layer.mlp.up_proj),
        "down": (layer.mlp.down_proj,),
        "head": (module.lm_head,),
    }.items():
        inputs, outputs, _ = gpu_slices.SHAPES[name]
        assert (weights[0].in_features, sum(w.out_features for w in weights)) == (inputs, outputs), name


CASES = [
    ("rtp=8[transport=symmetric_memory,visits=8]", "bfloat16", False),
    ("fsdp2 in chunks", "bfloat16", False),
    pytest.param("fsdp2", "bfloat16", False, marks=pytest.mark.slow),
    pytest.param("single", "autocast_bfloat16", False, marks=pytest.mark.slow),
    pytest.param("rtp=8[transport=symmetric_memory]", "bfloat16", "reduce-overhead", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "mode", "compiled"), CASES)
def test_one_rank_of_eight_runs_steps_alone(layout, mode, compiled, warm):
    import gpu_one_rank

    shapes, lengths = {**gpu_one_rank.TINY, "num_hidden_layers": 1}, [16, 32]
    found = gpu_one_rank.one_case(
        layout, mode, compiled, shapes=shapes, layers=1, device="cpu", lengths=lengths, steps=2
    )
    assert [case["tokens"] for case in found] == lengths
    for case in found:
        assert case["layers"] == 1 and case["peak_bytes"] is None and case["kernels"] is None
        assert len(case["step_s_all"]) == 2 and case["step_s_median"] > 0 and case["host_s_median"] > 0
    assert not torch.distributed.is_initialized()


def test_all_layouts_of_one_rank_are_ones_that_rotorch_reads():
    import gpu_one_rank

    from rotorch.core.precision import PRECISIONS
    from rotorch.strategies import check_compiled, format_parallel, num_ranks, parse_parallel

    rows = [row for row in gpu_one_rank.ROWS if not row[0].startswith("fsdp2")]
    assert len(rows) < len(gpu_one_rank.ROWS) == len(set(gpu_one_rank.ROWS))
    for layout, precision, compiled in rows:
        assert num_ranks(parse_parallel(layout)) == (1 if layout == "single" else gpu_one_rank.NUM_RANKS)
        assert format_parallel(parse_parallel(layout)) == layout and precision in PRECISIONS
        if compiled:
            check_compiled(parse_parallel(layout), recorded=compiled == "reduce-overhead")


def test_what_a_layer_adds_is_taken_for_all_others():
    import gpu_one_rank

    one = dict.fromkeys(gpu_one_rank.SCALED) | {"layers": 2, "peak_bytes": 100, "step_s_median": 1.0}
    other = one | {"layers": 4, "peak_bytes": 160, "step_s_median": 1.5}
    assert gpu_one_rank.scaled([one, other], layers=32) == {"peak_bytes_scaled": 1000.0, "step_s_median_scaled": 8.5}
    assert gpu_one_rank.scaled([one, {"layers": 4, "error": "out of memory"}], layers=32) == {}


def test_a_gpu_is_busy_while_any_of_its_streams_works():
    import gpu_one_rank

    assert gpu_one_rank.covered([]) == 0
    assert gpu_one_rank.covered([(5, 6), (0, 2), (1, 3), (1, 2), (6, 7)]) == 5


def test_the_gpus_work_is_read_from_a_profile(monkeypatch):
    import gpu_one_rank
    from torch.autograd import DeviceType

    def event(name, start, end, device=DeviceType.CUDA, is_user_annotation=False):
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=device, time_range=span, is_user_annotation=is_user_annotation)

    events = [
        event("gemm", 0, 10),
        event("Memcpy DtoD", 5, 20),
        event("FSDP::all_gather", 0, 80, is_user_annotation=True),
        event("aten::mm", 0, 90, DeviceType.CPU),
        event("cudaGraphLaunch", 0, 1, DeviceType.CPU),
    ]
    profiler = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(gpu_one_rank, "profile", lambda **_: nullcontext(profiler))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = gpu_one_rank.work_of_gpu(SimpleNamespace(forward_backward=lambda: None))
    assert found == {"gpu_busy_s": pytest.approx(20e-6), "kernels": 1, "copies": 1, "launches": 1}


@pytest.mark.slow
def test_a_case_that_fails_is_a_row_with_its_error(monkeypatch):
    import gpu_one_rank

    good, bad = ("single", "bfloat16", False), ("rtp=8[transport=nothing]", "bfloat16", False)
    monkeypatch.setattr(gpu_one_rank, "ROWS", (good, bad))
    monkeypatch.setattr(gpu_one_rank, "DEPTHS", (1, 2))
    monkeypatch.setattr(gpu_one_rank, "LENGTHS", (1,))
    row, failed = gpu_one_rank.measure(device="cpu", tokens=16, steps=1)["rows"]
    assert row["tokens"] == 16 and row["step_s_median_scaled"] and "error" not in json.dumps(row)
    assert [case["layers"] for case in failed["measured"]] == [1, 2]
    assert "transport" in failed["measured"][0]["error"] and "peak_bytes_scaled" not in failed


def test_parts_of_a_step_are_measured_each_by_itself(warm):
    import gpu_parts

    found = gpu_parts.measure(device="cpu", tokens=16, steps=1)
    assert [row["visits"] for row in found["weight_gradients"]] == [1, 2, 4, 8]
    assert [row["heads"] for row in found["attention"]] == [32, 16, 8, 4] and found["attention"][0]["of_all"] == 1
    assert [row["way"] for row in found["beside"]] == ["alone"]  # others need a stream
    assert {row["call"] for row in found["host"]} == {"product", "small kernel", "copy"}
    (row,) = found["first_values"]
    assert row["device"] == "cpu" and row["same_in_bfloat16"] == 1 and row["numbers"] > 0


def test_ranks_that_share_are_exact():
    import gpu_shared

    found = gpu_shared.exactness("rtp=2[transport=shared_memory]", device="cpu")
    assert found["ok"] and max(found["max_rel_err_loss"], found["max_rel_err_grad"]) <= 1e-10


def test_a_run_of_the_command_line_says_what_its_user_waits_for(tmp_path, warm):
    import gpu_run

    from rotorch.run_config import load_run_config

    for device in ("cuda", "cpu"):
        config = gpu_run.write_config(tmp_path, device=device, tokens=16, steps=5)
        read = load_run_config(config)
        assert read.train.device == device and read.train.steps == 5 and read.train.precision == "bfloat16"
    found, times = gpu_run.row("saves", config, ["train.checkpoint_every=3"])
    assert found["first_step_s"] > found["step_s"] > 0 and len(times) == 5
    assert found["checkpoint_bytes"] > 4 * 3 * 320 * 64  # a table and its moments
    assert len(list((tmp_path / "saves" / "checkpoints").iterdir())) >= 1
    with pytest.raises(RuntimeError, match=r"again: exit code 2: .*saves"):
        gpu_run.row("again", config, [], run="saves")  # which is there


@pytest.mark.slow
def test_a_run_is_saved_and_goes_on(warm):
    import gpu_run

    found = gpu_run.measure(device="cpu", tokens=16, steps=1)
    assert [row["run"] for row in found["rows"]] == ["plain", "saves", "async", "resumed"]
    assert all(row["stall_s"] >= 0 and row["beside_s"] > 0 for row in found["rows"][1:3])
