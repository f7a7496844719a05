"""The text of `--parallel`."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotorch.core.errors import ConfigError
from rotorch.strategies import (
    ATP,
    COMPOSES,
    DDP,
    FSDP,
    PP,
    RTP,
    STRATEGIES,
    SUMMA,
    Megatron,
    Single,
    Tesseract,
    ZeroPP,
    batch_ranks,
    check_composition,
    format_parallel,
    num_ranks,
    parse_parallel,
    to_be_planned,
    with_grids,
)


@pytest.mark.parametrize(
    ("text", "strategies"),
    [
        ("single", (Single(),)),
        ("ddp=2", (DDP(size=2),)),
        (" ddp=2 , fsdp=4 ", (DDP(size=2), FSDP(size=4))),
        ("fsdp=4[reshard=false]", (FSDP(size=4, reshard=False),)),
        ("ddp=2,rtp=4[recompute=slice]", (DDP(size=2), RTP(size=4, recompute="slice"))),
        (
            "rtp=3[recompute=none, transport=send_receive]",
            (RTP(size=3, recompute="none", transport="send_receive"),),
        ),
        ("rtp=2[]", (RTP(size=2),)),
        ("single[recompute=block]", (Single(recompute="block"),)),
        ("atp=2x4[order=row_first]", (ATP(d1=2, d2=4, order="row_first"),)),
        ("megatron=4[sync_fraction=0.5]", (Megatron(size=4, sync_fraction=0.5),)),
        ("summa=2x2", (SUMMA(rows=2, columns=2),)),
        ("ddp=2,tesseract=4x4x3", (DDP(size=2), Tesseract(rows=4, columns=4, depth=3))),
        ("ddp=2,fsdp=2[recompute=block]", (DDP(size=2), FSDP(size=2, recompute="block"))),
        ("pp=2[layers=3-5]", (PP(stages=2, layers="3-5"),)),
        ("pp=2[rank_memory=1.5GiB]", (PP(stages=2, rank_memory="1.5GiB"),)),
        ("pp=2[schedule=zbv]", (PP(stages=2, schedule="zbv", chunks=None),)),
        ("zeropp=2x4[unit=3,chunks=2]", (ZeroPP(stages=2, shards=4, chunks=2, unit=3),)),
        ("zeropp=2x4[inner=rtp,unit=3]", (ZeroPP(stages=2, shards=1, unit=3), RTP(size=4))),
        ("pp=2,fsdp=4", (PP(stages=2), FSDP(size=4))),
    ],
)
def test_reads(text, strategies):
    assert parse_parallel(text) == strategies


SIZES = st.integers(1, 512)
SINGLES = st.one_of(
    st.builds(Single, recompute=st.sampled_from(["none", "block"])),
    st.builds(DDP, size=SIZES),
    st.builds(Megatron, size=SIZES, sync_fraction=st.sampled_from([1.0, 0.5, 0.125])),
    st.builds(ATP, d1=SIZES, d2=SIZES, order=st.sampled_from(["column_first", "row_first"]), chunks=SIZES),
    st.builds(lambda q: SUMMA(rows=q, columns=q), SIZES),
    st.builds(lambda q, d: Tesseract(rows=q, columns=q, depth=d), SIZES, SIZES),
    st.builds(FSDP, size=SIZES, reshard=st.booleans(), recompute=st.sampled_from(["none", "block"])),
    st.builds(
        PP,
        stages=SIZES,
        schedule=st.sampled_from(["1f1b", "interleaved_1f1b", "zbv"]),
        recompute=st.sampled_from(["none", "block"]),
    ),
    st.builds(lambda a, b: PP(stages=2, recompute=f"{a}-{b}"), SIZES, SIZES),
    st.builds(ZeroPP, stages=SIZES, shards=st.just(1), chunks=st.none() | SIZES, unit=st.none() | SIZES),
    st.builds(
        RTP,
        size=SIZES,
        recompute=st.sampled_from(["none", "head", "all_but_attention", "slice"]),
        transport=st.sampled_from(["auto", "shared_memory", "send_receive"]),
    ),
)


@given(st.lists(SINGLES, min_size=1, max_size=2))
def test_what_is_written_reads_back(strategies):
    text = format_parallel(strategies)
    if len(strategies) == 2 and strategies[0].kind == "pp" and strategies[0].recompute != "none":
        with pytest.raises(ConfigError, match=r"cannot be composed|decides on recomputation"):
            parse_parallel(text)
    elif len(strategies) == 2 and tuple(s.kind for s in strategies) not in COMPOSES:
        with pytest.raises(ConfigError, match="cannot be composed"):
            parse_parallel(text)
    elif len(strategies) == 2 and strategies[0].kind == "rtp" and strategies[1].changes_the_model:
        with pytest.raises(ConfigError, match="slices of a part add up to one output"):
            parse_parallel(text)
    else:
        assert parse_parallel(text) == tuple(strategies)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot read ''"),
        ("rtp", "'rtp' needs a positive number of ranks. Write for example rtp=2"),
        ("rtp=0", "needs a positive number"),
        ("rtp=-1", "needs a positive number"),
        ("rtp=two", "needs a positive number"),
        ("rtp=2.5", "needs a positive number"),
        ("rtp=", "needs a positive number"),
        ("single=2", "single takes no size, got 'single=2'. Write single"),
        ("rpt=2", "unknown strategy 'rpt' (did you mean 'rtp'?). Known: single, ddp, fsdp, rtp, megatron"),
        ("osdp=2", "'osdp=2' has no budget for units that are whole. Write osdp=2[memory=2GiB]"),
        ("osdp=2[memory=2GiB,inner=pp]", "inner=pp cuts no units. Write inner=rtp or inner=fsdp"),
        ("osdp=2[memory=lots]", "memory=lots is no number of bytes above 0. Write for example memory=2GiB"),
        ("osdp=2[memory=0]", "memory=0 is no number of bytes above 0"),
        ("rtp=2[memory=0]", "memory=0 is no number of bytes above 0"),
        ("rtp=2[memory=1GiB,context=2]", "memory=1GiB with context=2: units of rtp are whole only where ranks have"),
        ("osdp=2[memory=1GiB,context=2]", "Leave one of the two out"),
        ("pp=2,osdp=2[memory=1GiB]", "a rank has some of its stages. Leave memory out"),
        ("rtp=2[recompte=slice]", "rtp has no option 'recompte' (did you mean 'recompute'?)"),
        ("rtp=2[size=3]", "rtp has no option 'size'"),
        ("rtp=2[recompute]", "rtp has no option 'recompute'"),
        ("ddp=2[x=1]", "ddp has no option 'x'. It has: recompute"),
        (
            "ddp=2[recompute=block],rtp=2",
            "ddp: recompute=block around 'rtp=2': the strategy inside runs the model, so it decides what is computed "
            "again. Write ddp=2 and the option inside the brackets of rtp",
        ),
        ("rtp=2[recompute=all]", "recompute"),
        ("fsdp=2[reshard=maybe]", "reshard"),
        ("atp=auto", "'atp=auto': only `rotorch train` and `rotorch plan` choose a grid, by the links of a cluster"),
        ("atp=4", "'atp=4' needs the sizes of a grid, d1 x d2. Write for example atp=2x2"),
        ("atp=2x2[order=rows]", "order"),
        ("summa=4", "'summa=4' needs the sizes of a grid, rows x columns. Write for example summa=2x2"),
        ("tesseract=2x2", "needs the sizes of a grid, rows x columns x depth. Write for example tesseract=2x2x2"),
        ("tesseract=2x2x0", "'tesseract=2x2x0' needs the sizes of a grid"),
        ("tesseract=2x3x1", "a grid of 2 x 3 is not square. Write tesseract=2x2x1 or 3x3x1"),
        ("summa=2x3", "parallel: 'summa=2x3': summa: a grid of 2 x 3 is not square"),
        ("summa=2x2[rows=3]", "summa has no option 'rows'. It has: transport"),
        ("pp=2[layers=3+5]", "pp: layers=3+5: no number of layers for each stage. Write for example layers=3-5"),
        (
            "pp=2[rank_memory=much]",
            "rank_memory=much: no number of bytes above 0. Write for example rank_memory=2GiB",
        ),
        ("zeropp=2x1[rank_memory=0]", "zeropp: rank_memory=0: no number of bytes above 0"),
        ("pp=2[rank_memory=1GiB,layers=3-5]", "and rank_memory=1GiB asks for it. Leave one of the two out"),
        ("pp=2[recompute=all]", "pp: recompute=all: no layers that are computed again. Write none, block, auto, or a"),
        (
            "pp=2[recompute=2-1-0]",
            "recompute=2-1-0 are 3 stages, but there are 2 (ranks times chunks). Write 2",
        ),
        (
            "zeropp=2x1[rank_memory=1GiB,recompute=auto]",
            "saves little. Write recompute=none, or pp=...",
        ),
        ("pp=2[layers=12345678-1]", "no number of layers for each stage"),
        ("pp=2[recompute=00-01]", "no layers that are computed again"),
        ("zeropp=2x1[recompute=auto]", "and there is none. Write rank_memory=2GiB beside it, or recompute=block"),
        ("pp=2[rank_memory=1GiB,recompute=2-1]", "decides what these are. Write recompute=auto, or layers=..."),
        ("pp=2[layers=2.5-2.25]", "layers=2.5-2.25: no number of layers for each stage. Write for example layers=3-5"),
        ("pp=2[layers=2.5-2.5,halves=true]", "and halves=true asks for it. Leave one of the two out"),
        ("pp=2[layers=2.5-2.5],megatron=2[sequence_parallel=true]", "layers whose tokens are cut stay whole. Write"),
        ("pp=2[halves=true],rtp=2[context=2]", "layers whose tokens are cut stay whole. Write whole numbers of layers"),
        ("pp=2[halves=true],fsdp=2[recompute=block]", "has one half cannot be computed again. Write whole numbers"),
        ("pp=2[recompute=2-1],rtp=2", "the strategy that holds the stages decides on recomputation"),
        ("pp=2[layers=3-5-1]", "layers=3-5-1 are 3 stages, but there are 2 (ranks times chunks). Write 2 numbers"),
        ("pp=2[chunks=2]", "schedule 1f1b: 2 chunks per rank, but it has one stage per rank. Write 1 chunk, or"),
        ("pp=2[schedule=zbv,chunks=3]", "schedule zbv: 3 chunks per rank, but it has two, on the way there and back"),
        ("pp=2[schedule=interleaved]", "Input should be '1f1b', 'gpipe', 'interleaved_1f1b'"),
        ("zeropp=2x2,rtp=2", "rtp distributes a stage over its ranks, without further shards. Write zeropp=2x1,rtp=2"),
        ("zeropp=2x2[inner=rtp,recompute=block]", "the strategy that holds the stages decides on recomputation"),
        ("ddp=2;rtp=2", "'ddp=2;rtp=2' needs a positive number"),
        ("ddp=2,,rtp=2", "cannot read ''"),
        ("rtp=2[recompute=slice", "cannot read"),
        ("rtp=2,ddp=2", "'rtp=2,ddp=2' cannot be composed. Compositions that work: ddp=..,atp=.., ddp=..,fsdp=.."),
        ("ddp=2,ddp=2", "cannot be composed"),
        ("single,ddp=2", "cannot be composed"),
        ("ddp=2,fsdp=2,rtp=2", "'fsdp=2,rtp=2' cannot be composed"),
    ],
)
def test_mistakes_are_one_clear_line(text, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        parse_parallel(text)
    assert "\n" not in str(caught.value)


def test_an_empty_list_of_strategies_is_refused():
    with pytest.raises(ConfigError, match="no strategy given"):
        check_composition(())


def test_ranks_multiply():
    strategies = parse_parallel("ddp=3,rtp=4")
    assert (num_ranks(strategies), batch_ranks(strategies)) == (12, 12)
    strategies = parse_parallel("ddp=2,zeropp=3x4[unit=2]")
    assert (num_ranks(strategies), batch_ranks(strategies)) == (24, 8)  # stages share a batch
    strategies = parse_parallel("ddp=2,tesseract=2x2x3")
    assert (num_ranks(strategies), batch_ranks(strategies)) == (24, 12)  # columns share a batch
    assert (num_ranks(parse_parallel("single")), batch_ranks(parse_parallel("single"))) == (1, 1)


def test_what_is_composed_exists_and_the_inner_one_cuts():
    for outer, inner in COMPOSES:
        assert {outer, inner} <= set(STRATEGIES)
        assert STRATEGIES[inner].cuts_weights


@pytest.mark.parametrize(
    ("text", "ranks", "layouts"),
    [
        ("atp=auto", 1, ["atp=1x1", "atp=1x1[order=row_first]"]),
        ("atp=auto", 4, ["atp=4x1", "atp=4x1[order=row_first]", "atp=2x2", "atp=2x2[order=row_first]"]),
        ("ddp=2,atp=auto[chunks=2]", 4, ["ddp=2,atp=2x1[chunks=2]", "ddp=2,atp=2x1[chunks=2,order=row_first]"]),
        ("atp=auto[order=row_first]", 2, ["atp=2x1[order=row_first]", "atp=1x2[order=row_first]"]),
    ],
)
def test_a_grid_to_be_chosen_stands_for_all_grids(text, ranks, layouts):
    assert to_be_planned(text) and to_be_planned("auto") and not to_be_planned(layouts[0])
    assert list(with_grids(text, ranks=ranks)) == layouts
    assert {num_ranks(parse_parallel(layout)) for layout in layouts} == {ranks}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ddp=3,atp=auto", "its other sizes are 3 ranks, which do not divide 4"),
        ("ddp=8,atp=auto", "its other sizes are 8 ranks, which do not divide 4"),
        ("atp=auto,atp=auto", "has 2 grids to be chosen. Write atp=auto once"),
        ("ddq=2,atp=auto", "unknown strategy 'ddq'"),
    ],
)
def test_a_grid_that_cannot_be_chosen_is_refused(text, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        with_grids(text, ranks=4)
