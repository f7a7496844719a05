import contextlib
import ctypes
import gc
import hashlib
import os
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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


class Kept(dict):
    """Results by key that all processes of a session of tests share, through files: forked ranks forget theirs."""

    def __init__(self, directory):
        super().__init__()
        self._directory = directory
        directory.mkdir(exist_ok=True)

    def _path(self, key):
        return self._directory / hashlib.sha256(key.encode()).hexdigest()

    def _is_shared(self, key):
        return True

    def __contains__(self, key):
        if not super().__contains__(key) and self._is_shared(key):
            with contextlib.suppress(FileNotFoundError):
                super().__setitem__(key, pickle.loads(self._path(key).read_bytes()))
        return super().__contains__(key)

    def __setitem__(self, key, result):
        super().__setitem__(key, result)
        if self._is_shared(key):
            whole = self._path(f"{key} {os.getpid()}")
            whole.write_bytes(pickle.dumps(result))
            whole.rename(self._path(key))


class KeptTrials(Kept):
    """Trials on tiny models, of transformers' own: each rank of each test would try the same model again, which is half
    of what it takes to cut it.
    """

    def _is_shared(self, key):
        return key.startswith("transformers.")


def keep_shapes(directory):
    """Has DTensor learn once per session what shape an operation gives, not in each rank anew.

    At an operation's first use in a process DTensor runs it on fake tensors, of whole shapes: with AdamW that is half
    of what a rank of a test does. Strategies, and what they send, are worked out by each rank as before.
    """
    from torch._guards import detect_fake_mode
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    known, compute = Kept(directory), ShardingPropagator._propagate_tensor_meta_non_cached

    def described(value):
        if (meta := getattr(value, "tensor_meta", None)) is not None:
            return f"{meta.shape} {meta.stride} {meta.dtype} {value.mesh.device_type}"
        return [described(each) for each in value] if isinstance(value, list | tuple) else repr(value)

    def shapes_of(propagator, schema):
        if detect_fake_mode() is not None:  # it is traced, with symbols in shapes
            return compute(propagator, schema)
        named = [f"{name}={described(value)}" for name, value in schema.kwargs_schema.items()]
        key = f"{schema.op} {described(schema.args_schema)} {named}"
        if key not in known:
            known[key] = compute(propagator, schema)
        return known[key]

    ShardingPropagator._propagate_tensor_meta_non_cached = shapes_of


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
def shapes_are_kept(kept_directory):
    keep_shapes(kept_directory / "shapes")


@pytest.fixture(scope="module", autouse=True)
def results_are_kept(kept_directory, request):
    """Ranks forked from here, and from what is forked from here, find the results that others have."""
    if "torch.distributed.tensor" in sys.modules:
        request.getfixturevalue("shapes_are_kept")
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
