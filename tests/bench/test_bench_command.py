import io
import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from bench_cases import TINY, assert_origin, children, write_run
from rich.console import Console

import rotorch.bench.rank as rank_module
from rotorch.bench.command import BenchOptions, bench_command, check_model, exit_code, measure, read_layouts
from rotorch.bench.contender import UnderLayout, make_contender
from rotorch.bench.table import render
from rotorch.bench.wire import HOST, OWN, loopback_bytes, network_of_its_own
from rotorch.core.errors import ConfigError

QUICK = BenchOptions(rounds=2, steps=2, process_memory=False)
H, F, V, L = TINY["hidden_size"], TINY["intermediate_size"], TINY["vocab_size"], TINY["num_hidden_layers"]
KV = H // TINY["num_attention_heads"] * TINY["num_key_value_heads"]
CUT = 4 * (2 * V * H + L * (2 * H * H + 2 * H * KV + 3 * H * F))
NORMS = 4 * H * (2 * L + 1)
WEIGHTS = CUT + NORMS
NUM_PARAMETERS = 9 * L + 3
COUNTERS = 4 * NUM_PARAMETERS  # AdamW keeps its step beside each parameter
REQUIRED = {
    *("parallel", "nproc", "tokens_per_s", "step_s_median", "step_s_all", "peak_bytes_per_rank"),
    *("resident_bytes_per_rank", "sent_bytes_per_rank", "loss_last"),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One run of all layouts: exit code, record, what was printed."""
    directory = tmp_path_factory.mktemp("bench")
    printed = io.StringIO()
    code = bench_command(
        write_run(directory),
        parallel=["single", "ddp=2", "fsdp=2", "rtp=2[transport=shared_memory]", "rtp=2[transport=send_receive]"],
        options=replace(QUICK, trace_dir=directory / "traces"),
        json_file=directory / "bench.json",
        bars=["ddp=2 >= 0.000001 * limit", "peak rtp=2[transport=shared_memory] <= 0.7 * ddp=2"],
        console=Console(file=printed, width=160),
    )
    record = json.loads((directory / "bench.json").read_text())
    return code, record, printed.getvalue()


@pytest.fixture(scope="module")
def rows(measured):
    record = measured[1]
    return {row["parallel"]: row for row in [*record["rows"], record["limit"]]}


def test_all_is_well(measured, rows):
    code, record, printed = measured
    assert code == 0, printed
    assert {"machine", "model", "tokens_per_step", "rows", "limit"} <= set(record)
    assert_origin(record)
    assert record["tokens_per_step"] == 2 * 2 * 16 and record["model"] == "tiny"
    speed, memory = record["bars"]
    assert speed["ok"] is True and memory["ok"] is True
    assert (
        memory["reached"]
        == rows["rtp=2[transport=shared_memory]"]["peak_bytes_per_rank"] / (rows["ddp=2"]["peak_bytes_per_rank"])
    )
    assert "warning" not in record
    for name, row in rows.items():
        assert set(row) >= REQUIRED, name
        assert len(row["step_s_all"]) == 4 and len(row["ratio_to_limit_rounds"]) == 2
        assert row["loss_max_rel_err"] < 1e-5
        assert row["nproc"] == (1 if name == "single" else 2)
        assert name in printed


def test_losses_fall_and_agree(rows):
    losses = rows["single"]["losses"]
    assert losses[4] < losses[2] < losses[0]
    for name in set(rows) - {"limit"}:
        assert rows[name]["losses"] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("name", ["single", "ddp=2", "limit"])
def test_whole_weights_rest_four_times(rows, name):
    assert rows[name]["resident_by_category"] == {
        "weights": WEIGHTS,
        "gradients": WEIGHTS,
        "optimizer": 2 * WEIGHTS + COUNTERS,
    }


def test_shards_rest_as_the_layout_says(rows):
    assert rows["fsdp=2"]["resident_by_category"]["weights"] == WEIGHTS // 2
    for name in ("rtp=2[transport=shared_memory]", "rtp=2[transport=send_receive]"):
        assert rows[name]["resident_by_category"]["weights"] == CUT // 2 + NORMS
        assert rows[name]["layout"]["weights_bytes"] == CUT // 2 + NORMS


def test_sent_bytes_are_the_layouts(rows):
    assert rows["limit"]["sent_bytes_per_rank"] == rows["single"]["sent_bytes_per_rank"] == 0
    assert rows["ddp=2"]["sent_bytes_per_rank"] == WEIGHTS
    once = 4 * (2 * V * H + H)  # table, head and last norm are not gathered again for backward
    assert rows["fsdp=2"]["sent_by_kind"] == {"all_gather": WEIGHTS - once // 2, "reduce_scatter": WEIGHTS // 2}
    assert rows["rtp=2[transport=shared_memory]"]["sent_bytes_per_rank"] == NORMS
    for name in set(rows) - {"limit"}:
        assert rows[name]["sent_bytes_per_rank"] == rows[name]["layout"]["sent_bytes"], name


def test_the_peak_is_the_sum_of_its_parts(rows):
    for row in rows.values():
        assert sum(row["peak_by_category"].values()) == row["peak_bytes_per_rank"]
        assert row["peak_bytes_per_rank"] > row["resident_by_category"]["weights"]
    assert rows["rtp=2[transport=shared_memory]"]["peak_bytes_per_rank"] < rows["ddp=2"]["peak_bytes_per_rank"]


def test_the_ledger_is_what_the_layouts_say(rows):
    for name, row in rows.items():
        ledger = row["ledger"]
        assert ledger["measured"] == row["peak_by_category"]
        assert sum(ledger["other_made_by"].values()) <= ledger["measured"]["other"]
        if name == "limit":
            assert ledger["predicted"] is None
            continue
        for category in ("weights", "gradients", "optimizer", "slots"):
            assert ledger["at_rest"][category] == ledger["predicted"][category], (name, category)
        assert ledger["predicted"]["activations"] is None


def test_peaks_are_planned_beside_what_was_measured(rows):
    for name in set(rows) - {"limit"}:
        planned = rows[name]["planned_peak_bytes_by_rank"]
        assert len(planned) == rows[name]["nproc"]
        assert max(planned) == pytest.approx(rows[name]["peak_bytes_per_rank"], rel=0.05), name
        assert sum(rows[name]["ledger"]["planned"].values()) == pytest.approx(max(planned), abs=8)
    assert "planned_peak_bytes_by_rank" not in rows["limit"]


def test_the_ledger_names_logits_and_slots(rows):
    largest_slice = 4 * max(V * H // 2, (2 * H * H + 2 * H * KV) // 2, 3 * H * F // 2)
    assert rows["rtp=2[transport=send_receive]"]["ledger"]["measured"]["slots"] == 4 * largest_slice
    assert rows["rtp=2[transport=shared_memory]"]["ledger"]["measured"]["slots"] == 0
    assert rows["single"]["ledger"]["measured"]["logits"] >= 2 * 4 * 2 * 2 * 16 * V


def test_every_row_is_traced(measured, rows):
    for name, row in rows.items():
        parts, files = row["timeline"]["shares_by_rank"], row["timeline"]["files"]
        assert len(parts) == row["nproc"] and all(sum(p.values()) == pytest.approx(1.0) for p in parts), name
        assert all(Path(file).stat().st_size for file in files.values())
    assert "who computes and who waits" in measured[2]


def test_nothing_is_left_running(measured):
    assert not children()


class Forgetful(UnderLayout):
    """Says nothing of it, but loses the gradient of one weight."""

    def update(self):
        self.gradients()[-1].zero_()
        super().update()


def _one_row_is_broken(how):
    def make(task, *, row, rank):
        if row == "fsdp=2":
            if how == "raises":
                raise ValueError("out of luck")
            return Forgetful(task, parallel=row)
        return make_contender(task, row=row, rank=rank)

    return make


@pytest.mark.parametrize(("how", "field", "code"), [("raises", "error", 3), ("forgets a gradient", "invalid", 1)])
def test_a_bad_row_is_named_and_the_others_stay(task, monkeypatch, how, field, code):
    monkeypatch.setattr(rank_module, "make_contender", _one_row_is_broken(how))
    layouts, _ = read_layouts(["ddp=2", "fsdp=2"], nproc=2)
    record = measure(
        task,
        check_model(task, layouts=layouts),
        layouts=layouts,
        options=BenchOptions(rounds=1, steps=3, process_memory=False),
    )
    good, bad = record["rows"]
    assert set(good) >= REQUIRED and not {"error", "invalid"} & set(good)
    assert field in bad
    assert exit_code(record) == code
    printed = io.StringIO()
    Console(file=printed, width=200).print(render(record))
    assert f"fsdp=2: {field}: " in printed.getvalue()


def test_products_take_their_time_on_a_devices_clock(run_file, tmp_path):
    printed, file = io.StringIO(), tmp_path / "bench.json"
    options = replace(QUICK, rounds=1, virtual_s=0.05)
    console = Console(file=printed, width=160)
    assert bench_command(run_file, parallel=["rtp=2"], options=options, json_file=file, console=console) == 0
    record = json.loads(file.read_text())
    virtual = record["virtual_time"]
    assert virtual["products_s"] == 0.05
    # Two FLOPs a weight and token in forward, as many in each half of backward; an embedding has no products.
    products, scores = 2 * 2 * 16 * (CUT - 4 * V * H) // 4, L * 2 * 16 * 16
    assert 0.05 * virtual["flops_per_s"] == pytest.approx(3 * products + 3.5 * 2 * 2 * H * scores)
    assert record["limit"]["step_s_best"] >= 0.05  # a clock that sleeps is never early
    assert "products of 0.05 s on a device's clock" in printed.getvalue()


def test_a_bar_that_does_not_hold_is_exit_code_1(run_file):
    code = bench_command(
        run_file,
        parallel=["ddp=2"],
        options=BenchOptions(rounds=1, steps=1, process_memory=False),
        bars=["ddp=2 >= 1000 * limit"],
        console=Console(quiet=True),
    )
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"parallel": []}, "no layout"),
        ({"parallel": ["ddp=2", "ddp=2"]}, "twice"),
        ({"parallel": ["ddp=2", "rtp=3"]}, "'rtp=3' needs 3 ranks, but there are 2"),
        ({"parallel": ["rtp=5"], "nproc": 2}, "needs 5 ranks, but there are 2"),
        ({"parallel": ["ddp=2"], "nproc": 0}, "nproc"),
        ({"parallel": ["ddq=2"]}, "did you mean 'ddp'"),
        ({"parallel": ["rtp=65"]}, "65 ranks over"),
        ({"parallel": ["ddp=2"], "bars": ["ddp=2 > limit"]}, "bar"),
        ({"parallel": ["ddp=2"], "overrides": ["data.sequence_length=33"]}, "longer than the 32 positions"),
        ({"parallel": ["ddp=2"], "overrides": ["train.global_batch=7"]}, "global_batch"),
        ({"parallel": ["ddp=2"], "options": BenchOptions(rounds=0)}, "rounds"),
    ],
)
def test_bad_input_starts_nothing(run_file, monkeypatch, arguments, says):
    monkeypatch.setattr("rotorch.bench.command.RowRanks", None)
    with pytest.raises(ConfigError, match=says):
        bench_command(run_file, console=Console(quiet=True), **arguments)


def test_a_file_in_a_missing_directory_is_refused(run_file, tmp_path):
    with pytest.raises(ConfigError, match="directory is missing"):
        bench_command(run_file, parallel=["ddp=2"], json_file=tmp_path / "no" / "x.json", console=Console(quiet=True))


def test_the_interface_counts_what_really_travels(rows):
    """Headers come on top of what a row asks for; FSDP2's reduce-scatter over gloo is an all-reduce, so more yet."""
    for name in ("ddp=2", "fsdp=2", "rtp=2[transport=send_receive]"):
        assert rows[name]["wire_bytes_all_ranks"] >= sum(rows[name]["sent_bytes_by_rank"]), name
    counters = {row["wire_counter"] for row in rows.values()}
    assert len(counters) == 1 and counters <= {OWN, HOST}
    if counters == {OWN}:
        assert rows["limit"]["wire_bytes_all_ranks"] == rows["single"]["wire_bytes_all_ranks"] == 0


def test_a_network_of_its_own_carries_only_what_is_forked_into_it(monkeypatch):
    outside = os.readlink("/proc/thread-self/ns/net")
    with network_of_its_own() as own:
        if not own:
            pytest.skip("this system allows no network of a process's own")
        child = os.fork()
        if child == 0:
            before = loopback_bytes()
            with socket.create_server(("127.0.0.1", 0)) as server:
                ours = socket.create_connection(server.getsockname())
                theirs, _ = server.accept()
                ours.sendall(bytes(10_000))
                ours.close()
                while theirs.recv(10_000):
                    pass
            os._exit(0 if before == 0 and 10_000 < (loopback_bytes() or 0) < 20_000 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.readlink("/proc/thread-self/ns/net") == outside
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # the user's choice, which a network of its own lacks
    with network_of_its_own() as own:
        assert not own
