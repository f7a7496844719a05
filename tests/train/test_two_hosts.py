"""Two hosts: namespaces with a network, a name and shared memory of their own, torchrun on each, and a link between.

Rings stay within a host and gradients are summed across, as on a cluster of several nodes; or a ring spans both.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from commands import DEADLINE_S, rotorch, wait_until, write_run

from rotorch.train.checkpoint.directories import latest
from rotorch.train.checkpoint.manifest import MODEL, read_manifest
from rotorch.train.metrics import read_metrics

LAYOUT = "ddp=2,rtp=2"

ALONE = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount -t tmpfs -o size=64m tmpfs /dev/shm
shift
exec "$@"
"""
"""Runs a command as on a host of that name: nothing but the network reaches the other one."""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)


def as_host(name, *command):
    return ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", ALONE, "sh", name, *command]


def sent_bytes(host):
    """Bytes that have left a host by its cable."""
    name, interface, _ = host
    (found,) = json.loads(ip("-n", name, "-s", "-j", "link", "show", "dev", interface).stdout)
    return found["stats64"]["tx"]["bytes"]


@pytest.fixture
def hosts():
    """Two namespaces joined by a cable; yields (name, interface, address) of each."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command to make network namespaces with")
    names = [f"rotorch-{os.getpid()}-{letter}" for letter in "ab"]
    found = [(name, f"veth{index}", f"10.77.13.{index + 1}") for index, name in enumerate(names)]
    try:
        for name in names:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
        (_, first, _), (_, second, _) = found
        made = ip("link", "add", first, "netns", names[0], "type", "veth", "peer", "name", second, "netns", names[1])
        if made.returncode:
            pytest.skip(f"network namespaces cannot be joined here: {made.stderr.strip()}")
        tried = subprocess.run(as_host(names[0], "true"), capture_output=True, text=True, timeout=60)
        if tried.returncode:
            pytest.skip(f"hosts cannot be told apart here: {tried.stderr.strip()}")
        for name, interface, address in found:
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield found
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.fixture
def start(hosts, tmp_path):
    """Starts torchrun on both hosts; ends with whatever is left of them."""
    jobs = []

    def start(*arguments):
        for name, interface, address in hosts:
            command = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=two-hosts"]
            # Addresses of other namespaces resolve to no name, so which of them is the endpoint has to be said.
            command += [f"--rdzv-endpoint={hosts[0][2]}:29513", f"--rdzv-conf=is_host={int(address == hosts[0][2])}"]
            command += [f"--local-addr={address}", "-m", "rotorch", *arguments]
            command = as_host(name, sys.executable, "-m", "torch.distributed.run", *command)
            with (tmp_path / f"{interface}.log").open("w") as log:
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
                jobs.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
        return jobs

    yield start
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


@pytest.mark.slow
def test_training_across_two_hosts_until_the_link_is_cut(hosts, start, tmp_path, warm):
    alone = tmp_path / "alone"
    alone.mkdir()
    command = rotorch(alone / "log", "train", write_run(alone), "--parallel", LAYOUT, "train.steps=6")
    assert command.code == 0, command.stderr
    expected = [line["loss"] for line in read_metrics(alone / "run")]

    settings = ["--parallel", LAYOUT, "train.steps=1000000", "train.timeout_s=15", "train.checkpoint_every=5"]
    settings += ["optimizer.schedule=constant"]
    jobs = start("train", str(write_run(tmp_path)), *settings)
    logs = [tmp_path / f"{interface}.log" for _, interface, _ in hosts]

    def ended_or_got_on():
        return len(read_metrics(tmp_path / "run")) >= 6 or any(job.poll() is not None for job in jobs)

    wait_until(ended_or_got_on, what="six steps", deadline_s=2 * DEADLINE_S)
    assert all(job.poll() is None for job in jobs), [log.read_text() for log in logs]
    # Gradients are whole on each host, so each sends the other what adds up to all of them, step by step.
    begun, sent = len(read_metrics(tmp_path / "run")), [sent_bytes(host) for host in hosts]
    wait_until(lambda: len(read_metrics(tmp_path / "run")) >= begun + 10, what="ten more steps")
    weight_bytes = sum(entry.num_bytes for entry in read_manifest(latest(tmp_path / "run")).names(MODEL).values())
    assert min(sent_bytes(host) - before for host, before in zip(hosts, sent, strict=True)) > 8 * weight_bytes
    assert not any("no shared memory" in log.read_text() for log in logs)  # rings have it, within each host
    # The first two steps warm up alike, whatever the schedule does later.
    assert [line["loss"] for line in read_metrics(tmp_path / "run")[:3]] == pytest.approx(expected[:3], rel=1e-5)

    ip("-n", hosts[0][0], "link", "set", hosts[0][1], "down")

    def both_say_so():
        said = r"rotorch: rank \d has not got on for \d+ s: it is in step \d+"
        return all(re.search(said, log.read_text()) for log in logs)

    wait_until(both_say_so, what="ranks of both that say which they are")
    # The other host's torchrun asks for the first one's store, for minutes.
    wait_until(lambda: jobs[0].poll() is not None, what="the end of the first host's torchrun")
    assert jobs[0].returncode != 0
    assert latest(tmp_path / "run") is not None  # whole: nothing was damaged


@pytest.mark.slow
def test_a_ring_across_hosts_says_how_often_slices_cross(hosts, start, tmp_path):
    before = [sent_bytes(host) for host in hosts]
    jobs = start("train", str(write_run(tmp_path)), "--parallel", "rtp=4", "train.steps=4")
    wait_until(lambda: all(job.poll() is not None for job in jobs), what="the end of both", deadline_s=2 * DEADLINE_S)
    logs = [(tmp_path / f"{interface}.log").read_text() for _, interface, _ in hosts]
    assert [job.returncode for job in jobs] == [0, 0], logs
    (warning,) = re.findall("rtp: .*", "".join(logs))
    assert "rtp: hierarchical: 2 hosts of 2 ranks; a slice crosses to each once per pass" in warning
    weight_bytes = sum(entry.num_bytes for entry in read_manifest(latest(tmp_path / "run")).names(MODEL).values())
    # Each slice passes from host to host in every pass: three times what a rank holds, and more.
    assert min(sent_bytes(host) - sent for host, sent in zip(hosts, before, strict=True)) > 4 * 3 * weight_bytes / 4
