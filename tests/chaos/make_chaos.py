"""`make chaos`: runs the plans of many seeds, and writes the page about them. Goes on where it was broken off."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from chaos_page import page
from chaos_plan import describe, make_plan, moment
from chaos_runs import Outcome, can_mount, run_plan

from rotorch.models.hf import causal_lm, load_config
from rotorch.parallelize import code_of
from rotorch.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".cache" / "chaos.jsonl"


def main() -> int:
    """Returns 1 if a run did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, help="none: 0 to 99, and the page is written")
    parser.add_argument("--again", action="store_true", help="also run what this source has run already")
    parser.add_argument("--older", action="store_true", help="take over what other states of the source gave")
    parser.add_argument("--only-page", action="store_true", help="run nothing, write the page of what is known")
    options = parser.parse_args()
    source = _source()
    known = {} if options.again else _known(source=None if options.older else source)
    RESULTS.parent.mkdir(exist_ok=True)
    seeds = options.seeds or list(range(100))
    if not options.only_page:
        _warm()
    scratch = RESULTS.parent / "chaos"  # runs that went wrong stay there
    for number, seed in enumerate(() if options.only_page else seeds, start=1):
        plan = make_plan(seed)
        if seed not in known:
            outcome = run_plan(plan, at=scratch / source, mounts=True)
            known[seed] = (outcome, source)
            with RESULTS.open("a") as file:
                file.write(json.dumps({**asdict(outcome), "plan": repr(plan), "source": source}) + "\n")
        outcome = known[seed][0]
        told = f"WRONG: {outcome.wrong}: {outcome.said}" if outcome.wrong else outcome.ended
        print(f"[{number:>3}/{len(seeds)}] {seed} {plan.layout}: {describe(plan)} ({moment(plan)}): {told}", flush=True)
    found = [known[seed] for seed in seeds if seed in known]
    if not options.seeds:
        older = sum(of != source for _, of in found)
        note = f"{older} rows are of an earlier state of the source." if older else ""
        note += (
            f" The other {len(seeds) - len(found)} seeds of a hundred are to come." if len(found) < len(seeds) else ""
        )
        text = page([outcome for outcome, _ in found], own_disk=can_mount(), note=note.strip())
        (ROOT / "docs" / "chaos.md").write_text(text)
    return 1 if any(outcome.wrong for outcome, _ in found) else 0


def _known(*, source: str | None) -> dict[int, tuple[Outcome, str]]:
    """Outcomes of plans as they are now, and the state of the source that gave each; None: any state."""
    known = {}
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else ():
        fields = json.loads(line)
        plan, of = fields.pop("plan"), fields.pop("source")
        if plan == repr(make_plan(fields["seed"])) and source in (None, of):
            known[fields["seed"]] = (Outcome(**fields), of)
    return known


def _source() -> str:
    """Names this state of the source."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted([*(ROOT / "src").rglob("*.py"), *Path(__file__).parent.glob("chaos_*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _warm() -> None:
    """Imports here, once, what every forked command would import for itself."""
    for kind in STRATEGIES:
        code_of(STRATEGIES[kind])
    causal_lm(load_config(ROOT / "configs" / "tiny" / "llama.json"))


if __name__ == "__main__":
    sys.exit(main())
