import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "configs" / "tiny"


@pytest.fixture(scope="session")
def warm():
    """Loads in this process, once, what forked ranks would each load for themselves: seconds per rank."""
    from rotorch.models.hf import causal_lm, load_config
    from rotorch.strategies import STRATEGIES

    for kind in STRATEGIES:
        importlib.import_module(f"rotorch.strategies.{kind}.apply")
    for config in TINY.glob("*.json"):
        causal_lm(load_config(config))


@pytest.fixture(scope="session")
def tiny():
    """Path of a tiny configuration by name."""
    return lambda name: str(TINY / f"{name}.json")
