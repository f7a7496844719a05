"""Lines of `rotorch doctor` about transports, on machines of several kinds."""

import importlib
import re
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rotorch.comm.transports.peer_memory import OVERLAPPING

doctor = importlib.import_module("rotorch.cli.doctor")  # rotorch.cli has a command of the same name


def transports():
    return doctor.examine()["transports"]


def test_shared_memory_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
    assert transports()["shared_memory"].startswith("yes, on cpu") and str(tmp_path) in transports()["shared_memory"]
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path / "missing"))
    assert transports()["shared_memory"] == f"no: {tmp_path / 'missing'} is no directory"


def test_shared_memory_that_is_full_or_closed_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert transports()["shared_memory"] == f"no: {tmp_path} is full"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert transports()["shared_memory"] == f"no: {tmp_path} cannot be written"


def test_the_hierarchy_of_hosts_needs_shared_memory_here(monkeypatch, tmp_path):
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
    assert transports()["hierarchical"].startswith("yes, on cpu, over several hosts")
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path / "missing"))
    assert transports()["hierarchical"] == f"no: {tmp_path / 'missing'} is no directory"


def test_symmetric_memory_needs_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert transports()["symmetric_memory"] == "no: torch sees no CUDA device"


def test_what_auto_takes_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
    assert transports()["auto"] == "shared_memory on cpu"
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path / "missing"))
    assert transports()["auto"] == "send_receive on cpu"
    monkeypatch.setattr(doctor, "_devices", dict)  # of the GPUs that are not there
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for found, taken in (("yes, on cuda, between all 4 GPUs", "symmetric_memory"), ("no: of this", "send_receive")):
        monkeypatch.setattr(doctor, "_symmetric_memory", lambda found=found: found)
        assert transports()["auto"] == f"send_receive on cpu, {taken} on cuda"


@pytest.mark.parametrize(
    ("number", "overlapping", "apart", "expected"),
    [
        (1, "0", (), f"no: there is one GPU only; {OVERLAPPING}=1 lets ranks share it, for tests"),
        (1, "1", (), f"yes, between ranks that share cuda:0 ({OVERLAPPING}=1)"),
        (4, "0", (), "yes, on cuda, between all 4 GPUs"),
        (4, "0", (1, 3), "not between all: cuda:1 has no peer access to cuda:3"),
    ],
)
def test_symmetric_memory_between_gpus(number, overlapping, apart, expected, monkeypatch):
    monkeypatch.setenv(OVERLAPPING, overlapping)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) != apart)
    monkeypatch.setattr(doctor, "why_no_windows", lambda device: "")
    assert doctor._symmetric_memory() == expected
    monkeypatch.setattr(doctor, "why_no_windows", lambda device: "of this")
    assert doctor._symmetric_memory() == "no: of this"


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("2.12.1", "no: 2.12.1 is older than what tests run with, 2.13 to 2.15; take 2.15"),
        ("2.13.0+cpu", "yes: 2.13.0+cpu; tests run with 2.13 to 2.15"),
        ("2.15.1", "yes: 2.15.1; tests run with 2.13 to 2.15"),
        ("3.0.0", "no: 3.0.0 is newer than what tests run with, 2.13 to 2.15; if it misbehaves, take 2.15"),
        ("missing", "no: it is missing; tests run with 2.13 to 2.15"),
    ],
)
def test_versions_that_no_test_ran_with_are_said(there, said, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: there)
    assert doctor.examine()["tested"]["torch"] == said


def test_transformers_newer_than_the_floor_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "5.24.0")
    assert doctor.examine()["tested"]["transformers"].startswith("no: 5.24.0 is newer than what tests run with, 5.23;")


def test_the_ranges_that_are_said_tested_installed_and_let_in_are_the_same():
    ranges = dict(
        re.match(r"([a-z]+)>=([\d.]+)", line).groups()
        for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    )
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    made = dict(re.findall(r"^(TORCH|OLDEST) \??= torch==(\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, (oldest, newest) in doctor.TESTED.items():
        assert (ranges[name], pinned[name]) == (oldest, newest), name
    assert (made["OLDEST"], made["TORCH"]) == doctor.TESTED["torch"]
    major, minor = map(int, doctor.TESTED["torch"][1].split("."))
    assert f'"torch>=2.13,<{major}.{minor + 1}"' in (ROOT / "pyproject.toml").read_text()
