import ctypes
import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kept import KeptTrials

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "configs" / "tiny"


# How long an example takes is the machine's affair, and that of whoever else uses it.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

SHARED_DOWN_TO = {
    "tests/conformance/test_invariants.py": 1,
    "tests/conformance/test_buffering.py": 2,
    "tests/conformance/test_float64_parity.py": 0,
    "tests/conformance/test_losses.py": 0,
    "tests/bench/test_memory_claims.py": 0,
    "tests/bench/test_trace.py": 0,
    "tests/comm/test_ring.py": 0,
    "tests/strategies/test_compile.py": 0,
    "tests/testing/test_verify.py": 0,
    "tests/train/test_checkpoint.py": 0,
    "tests/train/test_faults.py": 0,
    "tests/train/test_loop.py": 0,
}
"""What of a test's name says which tests run in the same process, after another, when several run tests (`-n`).

Files are kept together, since fixtures of a module may take long. Of these files, tests are: less the last so many
parts of their parameters, if those share what a fixture measured; with 0, each goes where there is time.
"""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            if file not in SHARED_DOWN_TO:
                return file
            parts = SHARED_DOWN_TO[file]
            return nodeid.rsplit("-", parts)[0] if parts else nodeid

    return Together(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """With ROTORCH_NOTHING_SKIPPED (`make test-peers`) a test that is skipped is one that did not run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    if os.environ.get("ROTORCH_NOTHING_SKIPPED") and skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def no_group_is_left():
    """A process group of one, which a test's own process may join, would be joined by all ranks forked after it.

    What still refers to it may be garbage: its threads end with it, here.
    """
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()


@pytest.fixture(autouse=True)
def no_place_in_a_job_is_left():
    """Variables of launchers that a test leaves in its process would make ranks of the tests after it."""
    before = {name: os.environ.get(name) for name in LAUNCHERS}
    yield
    left = {name: os.environ.get(name) for name in LAUNCHERS}
    if left != before:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        pytest.fail(f"the test has left { ({name: value for name, value in left.items() if value != before[name]}) }")


@pytest.fixture(autouse=True)
def no_autograd_threads():
    """Tests compute what ranks forked later are held to, and some compile (see `process/forking.py`)."""
    if "torch" in sys.modules:
        from rotorch.process.forking import start_autograd

        start_autograd()


TRIALS = {
    "slices": ["_known"],
    "features": ["_known", "_known_last"],
    "sequence": ["_known"],
    "shared_sequence": ["_known"],
}
"""Modules of rotorch.models.trial, and the names of what each keeps for its process."""


@pytest.fixture(scope="session")
def kept_directory(tmp_path_factory):
    """Directory of this session, for all processes that run its tests."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "kept"
    directory.mkdir(exist_ok=True)
    return directory


HUGE_PAGE_BYTES, MADV_COLLAPSE = 1 << 21, 25


def use_huge_pages():
    """Puts this process's memory on huge pages, which take a fork a quarter of the time: 8 ms in place of 30.

    Where the kernel cannot (before Linux 6.1, or of memory that is in no state for it) nothing changes.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if madvise is not None and maps.exists() else ():
        where, mode, _, _, inode, *name = line.split()
        if mode != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in where.split("-"))
        start = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        for address in range(start, end - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_PAGE_BYTES), MADV_COLLAPSE)


@pytest.fixture(scope="module", autouse=True)
def forks_are_quick():
    """Memory that tests have taken since is on huge pages, too; of what is there already that takes 10 ms."""
    if "torch" in sys.modules:
        use_huge_pages()


@pytest.fixture(scope="session")
def shardings_are_kept(kept_directory):
    from kept_shardings import keep_shardings

    keep_shardings(kept_directory / "shardings")


@pytest.fixture(scope="module", autouse=True)
def results_are_kept(kept_directory, request):
    """Ranks forked from here, and from what is forked from here, find the results that others have."""
    if "torch.distributed.tensor" in sys.modules:
        request.getfixturevalue("shardings_are_kept")
    for module, names in TRIALS.items():
        loaded = sys.modules.get(f"rotorch.models.trial.{module}")
        for name in names if loaded is not None else ():
            if not isinstance(getattr(loaded, name), KeptTrials):
                setattr(loaded, name, KeptTrials(kept_directory / f"{module}.{name}"))


@pytest.fixture(scope="session")
def warm():
    """Loads in this process, once, what forked ranks would each load for themselves: seconds per rank."""
    from rotorch.models.hf import causal_lm, load_config
    from rotorch.parallelize import code_of
    from rotorch.strategies import STRATEGIES

    for kind in STRATEGIES:
        code_of(STRATEGIES[kind])
    for config in TINY.glob("*.json"):
        causal_lm(load_config(config))


@pytest.fixture(scope="session")
def tiny():
    """Path of a tiny configuration by name."""
    return lambda name: str(TINY / f"{name}.json")
