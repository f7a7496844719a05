"""Hosts made of one machine, a device's clock, and the benchmark that puts both together."""

import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from rotorch.bench import hosts as hosts_module
from rotorch.bench.device_clock import DeviceClock
from rotorch.bench.hosts import Hosts, why_no_hosts
from rotorch.comm.shared_file import shared_memory_directory
from rotorch.testing.fake import as_rank

ROOT = Path(__file__).resolve().parents[2]
MANY_BYTES = 400_000
REFUSED = why_no_hosts()
needs_hosts = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)


class Clock:
    """A clock that only sleep moves."""

    def __init__(self):
        self.now_s, self.slept = 0.0, []

    def now(self):
        return self.now_s

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds


def device(flops_per_s):
    clock = Clock()
    return clock, DeviceClock(flops_per_s, now=clock.now, sleep=clock.sleep)


def test_products_take_flops_over_rate_in_forward_and_backward():
    clock, on_device = device(2.0 * 8 * 4 * 6)
    x, linear = torch.randn(8, 4, requires_grad=True), torch.nn.Linear(4, 6)
    with on_device:
        loss = linear(x).sum()
        assert clock.slept == []  # it runs ahead
        loss.backward()
    assert on_device.flops == 3 * 2 * 8 * 4 * 6  # output, gradients of input and of weight
    assert clock.now_s == 3.0 and on_device.forward_done_s == 1.0


def test_a_rank_waits_for_its_device_before_it_sends_and_where_it_reads_a_value():
    clock, on_device = device(2.0 * 2 * 2 * 2)
    a = torch.ones(2, 2)
    with as_rank(0, num_ranks=2), on_device:
        b = a @ a
        torch.distributed.send(b, dst=1)
        assert clock.now_s == 1.0
        clock.now_s = 5.0  # a message took its time: the device was idle
        b = a @ b
        assert clock.now_s == 5.0
        assert float(b.sum()) == 16.0
        assert clock.now_s == 6.0
        a.add(b)
    assert clock.slept == [1.0, 1.0]


def test_every_kind_of_product_counts():
    _, on_device = device(None)
    a, batch = torch.ones(2, 3), torch.ones(5, 2, 3)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with on_device:
        for product in (
            lambda: a @ a.t(),
            lambda: torch.addmm(torch.ones(2, 2), a, a.t()),
            lambda: torch.ones(2, 2).addmm_(a, a.t()),
        ):
            before = on_device.flops
            product()
            assert on_device.flops - before == 2 * 2 * 3 * 2
        before = on_device.flops
        torch.bmm(batch, batch.transpose(1, 2))
        assert on_device.flops - before == 5 * 2 * 2 * 3 * 2
        before = on_device.flops
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        assert (on_device.flops - before) == 3.5 * 2 * (2 * 4 * 4) * 16


def on_host(hosts, number, function):
    """Runs a function in a process on a host; returns a function that gives its result."""
    read, write = os.pipe()
    with hosts.on(number):
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, json.dumps(function()).encode())
            finally:
                os._exit(0)
    os.close(write)

    def result():
        with open(read) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(text)

    return result


def trade(connection):
    """Sends and receives `MANY_BYTES`."""
    sender = threading.Thread(target=connection.sendall, args=(bytes(MANY_BYTES),))
    sender.start()
    left = MANY_BYTES
    while left:
        left -= len(connection.recv(left))
    sender.join()


@needs_hosts
@pytest.mark.parametrize("switches", [1, 2])
def test_hosts_reach_each_other_over_links_that_count(switches):
    here, where = os.uname().nodename, shared_memory_directory()
    with Hosts(2, bytes_per_s=1e8, switches=switches) as hosts:
        assert os.uname().nodename == here and shared_memory_directory() == where
        listening = on_host_socket(hosts)

        def serve():
            connection, _ = listening.accept()
            trade(connection)
            return facts()

        def visit():
            trade(socket.create_connection(listening_address(listening)))
            return facts()

        before, up = hosts.sent_bytes(), hosts.uplink_bytes()
        first, second = on_host(hosts, 0, serve), on_host(hosts, 1, visit)
        (name, links), (other, _) = first(), second()
        sent = [after - was for after, was in zip(hosts.sent_bytes(), before, strict=True)]
        listening.close()
        assert (name, other) == ("host0", "host1")
        assert sorted(links) == ["lh0", "lo"]
        assert all(MANY_BYTES < each < 1.5 * MANY_BYTES for each in sent)  # with headers and acknowledgements
        crossed = hosts.uplink_bytes() - up
        assert crossed == 0 if switches == 1 else 2 * MANY_BYTES < crossed < 3 * MANY_BYTES
    assert os.uname().nodename == here


def on_host_socket(hosts):
    """A socket belongs to the network in which it was made, and listens before anybody visits."""
    with hosts.on(0):
        return socket.create_server(("10.77.0.1", 0))


def listening_address(listening):
    return listening.getsockname()


def facts():
    """Name and interfaces of where this process is."""
    text = Path("/proc/thread-self/net/dev").read_text()
    return (
        os.uname().nodename,
        [line.split(":")[0].strip() for line in text.splitlines()[2:]],
    )


@needs_hosts
def test_hosts_share_no_memory_and_have_the_same_other_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.toml").write_text("")

    def write():
        (shared_memory_directory() / "slices").write_text("mine")
        return list_here()

    def list_here():
        return os.listdir(shared_memory_directory()), os.listdir()

    with Hosts(2, bytes_per_s=1e8) as hosts:
        assert on_host(hosts, 0, write)() == [["slices"], ["model.toml"]]
        assert on_host(hosts, 1, list_here)() == [[], ["model.toml"]]
        assert on_host(hosts, 0, list_here)() == [["slices"], ["model.toml"]]
        with hosts.on(0):
            place = shared_memory_directory()
        assert list(place.iterdir()) == [] and Path.cwd() == tmp_path
    assert not place.exists()


@needs_hosts
def test_packets_without_data_go_past_the_bucket():
    with Hosts(2, bytes_per_s=1e6) as hosts, hosts.on(0):
        shown = subprocess.run(
            ["tc", "filter", "show", "dev", "lh0"], capture_output=True, text=True, check=True
        ).stdout
        classes = subprocess.run(
            ["tc", "class", "show", "dev", "lh0"], capture_output=True, text=True, check=True
        ).stdout
    assert shown.count("flowid 1:2") == 2
    assert "rate 8Mbit" in classes and "rate 100Gbit" in classes


@needs_hosts
@pytest.mark.parametrize(("packets", "burst"), [({}, 70_000), ({"packet_bytes": 9000}, 13_464)])
def test_a_bucket_lets_out_one_packet_at_once(packets, burst):
    with Hosts(2, bytes_per_s=1e6, **packets) as hosts, hosts.on(1):
        classes = subprocess.run(["tc", "class", "show", "dev", "lh0"], capture_output=True, text=True, check=True)
        link = subprocess.run(["ip", "-d", "link", "show", "lh0"], capture_output=True, text=True, check=True)
    assert f" burst {burst}b " in classes.stdout
    assert f"gso_max_size {packets.get('packet_bytes', 65_536)} " in link.stdout


def test_what_the_system_lacks_is_said(monkeypatch):
    monkeypatch.setattr(hosts_module.shutil, "which", lambda tool: None if tool == "tc" else "/bin/true")
    assert why_no_hosts() == "there is no tc (of iproute2) on PATH"
    monkeypatch.setattr(hosts_module.shutil, "which", lambda tool: "/bin/true")

    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(hosts_module, "call_libc", refused)
    assert why_no_hosts().startswith("the system refuses a network namespace: ")
    monkeypatch.setattr(hosts_module.sys, "platform", "darwin")
    assert why_no_hosts() == "namespaces are a thing of Linux, and this is darwin"


@pytest.fixture
def links(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return __import__("links")


def test_the_benchmark_is_skipped_with_the_reason(links, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(links, "why_no_hosts", lambda: "there is no tc")
    assert links.main(["--json", str(tmp_path / "links.json")]) == 0
    assert "bench-links: skipped: there is no tc" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@needs_hosts
@pytest.mark.parametrize("own_loop", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_benchmark_writes_every_row_with_right_losses(links, monkeypatch, tmp_path, own_loop):
    file = tmp_path / "links.json"
    sizes = ["model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.vocab_size=64"]
    arguments = ["--emulate", "--compute", "0.05", "--hosts", "2", "--ratio", "1", "--rounds", "1", "--steps", "1"]
    rows = ["torch-ddp", "rtp={n}"]  # which finds no shared memory
    given = [*arguments, *(part for row in rows for part in ("--row", row)), "--json", str(file), *sizes]
    given += ["--own-loop", "train.accumulation=2"] if own_loop else []
    monkeypatch.setattr(links, "LONGEST_EXCHANGE", float("inf"))  # a test looks at no clock
    monkeypatch.setattr(links, "EXCHANGE_BYTES", 10_000)
    assert links.main(given) == 0
    record = json.loads(file.read_text())
    (bare,) = record["exchange"]
    assert bare["of_wire_time"] == pytest.approx(bare["seconds"] * bare["link_bytes_per_s"] / 10_000)
    assert {"machine", "commit", "rows"} <= record.keys()
    ddp, rtp = record["rows"]
    assert [ddp["row"], rtp["row"]] == ["torch-ddp", "rtp=2"]
    for row in (ddp, rtp):
        assert row["hosts"] == 2 and row["ratio"] == 1
        assert {"step_s", "compute_s", "wire_s", "wire_bytes", "efficiency"} <= row.keys() and "invalid" not in row
        assert 0.9 < row["wire_bytes"] / row["asked_bytes"] < 2.0  # small messages: headers weigh more
        assert row["efficiency"] == max(row["compute_s"], row["wire_s"]) / row["step_s"]
