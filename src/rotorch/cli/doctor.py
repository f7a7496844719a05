"""`rotorch doctor`: what this machine can do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rotorch import __version__
from rotorch.comm.shared_file import shared_memory_directory
from rotorch.comm.transports.peer_memory import OVERLAPPING, why_no_windows
from rotorch.core.quantities import format_bytes

TESTED = {"torch": ("2.13", "2.15"), "transformers": ("5.23", "5.23")}
"""Oldest and newest release that the tests run with. `pyproject.toml` lets in nothing older."""

_LIBRARIES = ("transformers", "safetensors", "tokenizers", "pyarrow", "pydantic", "typer", "rich", "tensorboard")


def examine() -> dict[str, Any]:
    """Returns findings by name, plain JSON values. Starts nothing and reserves nothing."""
    return {
        "rotorch": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tested": {name: _tested(name) for name in TESTED},
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_free_bytes": psutil.virtual_memory().available,
        "devices": _devices(),
        "backends": _backends(),
        "transports": _transports(),
        "shared_memory_free_bytes": _shared_memory_free(),
        "threads_per_rank": os.environ.get("OMP_NUM_THREADS", "cores // ranks"),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _tested(name: str) -> str:
    """Compares the installed version with the range that the tests run with."""
    oldest, newest = TESTED[name]
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    there = _version(name)
    if there == "missing":
        return f"no: it is missing; tests run with {tested}"
    release = _release(there)
    if _release(oldest) <= release <= _release(newest):
        return f"yes: {there}; tests run with {tested}"
    which, do = (
        ("older", f"take {newest}") if release < _release(oldest) else ("newer", f"if it misbehaves, take {newest}")
    )
    return f"no: {there} is {which} than what tests run with, {tested}; {do}"


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _devices() -> dict[str, str]:
    devices = {"cpu": torch.backends.cpu.get_cpu_capability()}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices[f"cuda:{index}"] = f"{properties.name}, {format_bytes(properties.total_memory)}"
    return devices


def _backends() -> dict[str, str]:
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available() and torch.cuda.is_available(),
        "mpi": dist.is_mpi_available(),
    }
    return {name: "yes" if is_there else "no" for name, is_there in available.items()}


def _transports() -> dict[str, str]:
    """Returns the state of each transport of rtp between ranks of this machine, and the choice of `transport=auto`."""
    found = {
        "shared_memory": _shared_memory(),
        "symmetric_memory": _symmetric_memory(),
        "hierarchical": _hierarchical(),
        "send_receive": _send_receive(),
    }
    return found | {"auto": _auto(found)}


def _auto(found: dict[str, str]) -> str:
    preferred = {"cpu": "shared_memory", "cuda": "symmetric_memory"}
    devices = [device for device in preferred if device == "cpu" or torch.cuda.is_available()]
    taken = [f"{preferred[d] if found[preferred[d]].startswith('yes') else 'send_receive'} on {d}" for d in devices]
    return ", ".join(taken)


def _hierarchical() -> str:
    """Between CPU ranks of several hosts; this machine can only say whether its own part is there."""
    here, messages = _shared_memory(), _send_receive()
    missing = next((said for said in (here, messages) if said.startswith("no")), "")
    return missing or "yes, on cpu, over several hosts with as many ranks each, side by side (auto takes it there)"


def _send_receive() -> str:
    there = [name for name in ("gloo", "nccl") if _backends()[name] == "yes"]
    return f"yes, over {' and '.join(there)}" if there else "no: this build of torch has neither gloo nor nccl"


def _shared_memory() -> str:
    directory, free = shared_memory_directory(), _shared_memory_free()
    if not directory.is_dir():
        return f"no: {directory} is no directory"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"no: {directory} cannot be written"
    return f"yes, on cpu, up to {format_bytes(free)} in {directory}" if free else f"no: {directory} is full"


def _symmetric_memory() -> str:
    """Between GPUs that reach each other's memory."""
    number = torch.cuda.device_count()
    reason = why_no_windows(torch.device("cuda", 0) if number else torch.device("cuda"))
    if reason:
        return f"no: {reason}"
    if number == 1:
        shares = os.environ.get(OVERLAPPING) == "1"
        return (
            f"yes, between ranks that share cuda:0 ({OVERLAPPING}=1)"
            if shares
            else (f"no: there is one GPU only; {OVERLAPPING}=1 lets ranks share it, for tests")
        )
    apart = [(i, j) for i in range(number) for j in range(number) if i != j and not _reaches(i, j)]
    if apart:
        return f"not between all: cuda:{apart[0][0]} has no peer access to cuda:{apart[0][1]}"
    return f"yes, on cuda, between all {number} GPUs"


def _reaches(one: int, other: int) -> bool:
    return torch.cuda.can_device_access_peer(one, other)


def _shared_memory_free() -> int:
    directory = shared_memory_directory()
    return shutil.disk_usage(directory).free if directory.is_dir() else 0
