"""Plans: every position has one fate, segments and provenance cover what they say, nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.sequence import FIRST, HI, LO, PAGE, Origin, Run, Sequence, slots_of
from jaxkv.reuse.plan import ReusePlan, plan
from jaxkv.reuse.policies import SCR, Drop, Exact, FirstK, Forget, Policy, Sinks


class EagerDrop(Drop):
    """Drops survivors of any length, for short texts."""

    min_span = 2


P = 4
CONTRACT = CacheContract(weights_digest="w", architecture="{}", kv_dtype="float32")
SMALL = SCR(min_span=3, tail=1)
POLICIES: tuple[Policy, ...] = (
    Exact(), EagerDrop(), SMALL, SCR(min_span=1, tail=0), SCR(min_span=2, tail=2, max_spans=2),
    SMALL | FirstK(2) | Sinks(3), SCR(min_span=3, rotate=False), Forget(), FirstK(2), Sinks(2),
)  # fmt: skip


def sequence_of(tokens: Any, **changes: Any) -> Sequence:
    """A sequence that stands in fresh pages, token i in slot i."""
    tokens = np.asarray(tokens, np.int32)
    n = len(tokens)
    first = np.arange(0, n, P, dtype=np.int32)
    segments = np.stack([first // P, np.zeros_like(first), np.minimum(P, n - first), first], 1)
    values: dict[str, Any] = {
        "id": 1,
        "tokens": tokens,
        "segments": segments.astype(np.int32),
        "provenance": (Run(0, n, Origin.EXACT),),
        "contract": CONTRACT,
        "grid_length": n,
    }
    return Sequence(**{**values, **changes})


def applied(work: ReusePlan, start: int) -> Sequence:
    """The sequence that the plan makes: its computed tokens in slots from page `start` on."""
    rows = [work.segments]
    if work.write:
        at = np.arange(start, start + len(work.forward), dtype=np.int32)
        ones = np.ones_like(at)
        rows.append(np.stack([at, ones * 0, ones, work.forward], 1))
    segments = np.concatenate(rows)
    segments = segments[np.argsort(segments[:, FIRST] + segments[:, LO])]
    return sequence_of(work.tokens, segments=segments.astype(np.int32), provenance=work.provenance)


def fates(work: ReusePlan, old: Sequence) -> list[str]:
    """Each position's fate, found from segments and provenance alone; checks all that must hold."""
    n = len(work.tokens)
    positions, slots = slots_of(work.segments, P)
    assert len(np.unique(positions)) == len(positions), "a position stands twice"
    assert (np.diff(positions) > 0).all()
    kept = set(positions.tolist())
    assert not kept or (min(kept) >= 0 and max(kept) < n)
    forward = work.forward.tolist()
    assert forward == sorted(set(forward))
    assert forward[-1] == n - 1, "the last position is always computed"
    assert work.write == (n - 1 not in kept)
    if work.write:
        assert not kept & set(forward), "computed and kept"
    # What is kept is a slot of the old sequence that holds the same token.
    old_at = dict(zip(slots_of(old.segments, P)[1].tolist(), slots_of(old.segments, P)[0], strict=True))
    for position, slot in zip(positions.tolist(), slots.tolist(), strict=True):
        assert old.tokens[old_at[slot]] == work.tokens[position]
        if position < work.prefix:
            assert old_at[slot] == position
    # Provenance covers 0..n-1.
    origin: list[Origin] = []
    for run in work.provenance:
        assert run.start == len(origin) < run.end
        origin += [run.origin] * (run.end - run.start)
    assert len(origin) == n
    for p in range(n):
        has_kv = p in kept or p in forward
        assert has_kv == (origin[p] is not Origin.DROPPED), f"position {p}"
        if p in forward and p not in kept:
            assert origin[p] in (Origin.EXACT, Origin.ON_APPROXIMATE)
    first = next((i for i, o in enumerate(origin) if o is not Origin.EXACT), n)
    assert Origin.EXACT not in origin[first:], "exact on top of approximate"
    causes = [p for at in work.causes.values() for p in at.tolist()]
    assert sorted(causes) == forward
    assert work.matched + work.relocated + len(forward) + work.dropped == n
    names = []
    for p in range(n):
        if p in forward:
            names.append("forwarded")
        elif p not in kept:
            names.append("dropped")
        else:
            names.append("matched" if p < work.prefix else "relocated")
    return names


def counted(work: ReusePlan, names: list[str]) -> None:
    assert names.count("matched") == work.matched
    assert names.count("relocated") == work.relocated
    assert names.count("forwarded") == len(work.forward)
    assert names.count("dropped") == work.dropped


texts = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@settings(max_examples=300, deadline=None)
@given(old=texts, new=texts, policy=st.sampled_from(POLICIES), grid=st.sampled_from([1, 4]))
def test_every_position_has_exactly_one_fate(
    old: list[int], new: list[int], policy: Policy, grid: int
) -> None:
    sequence = sequence_of(old, grid_length=len(old) // grid * grid)
    work = plan(policy, sequence, np.array(new, np.int32), grid=grid)
    counted(work, fates(work, sequence))
    if policy.exact:
        assert work.relocated == work.dropped == 0
        assert {r.origin for r in work.provenance} == {Origin.EXACT}
        assert work.prefix % grid == 0


@settings(max_examples=150, deadline=None)
@given(
    old=st.lists(st.integers(0, 30), min_size=8, max_size=40, unique=True),
    cuts=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 6), st.integers(0, 3)), max_size=4),
    policy=st.sampled_from([p for p in POLICIES if not isinstance(p, Drop)]),
    again=st.sampled_from([p for p in POLICIES if not isinstance(p, Drop)]),
)
def test_edits_of_edits_have_one_fate_too(
    old: list[int], cuts: list[tuple[int, int, int]], policy: Policy, again: Policy
) -> None:
    """Without drops: those have a test of their own below."""
    sequence = sequence_of(old)
    tokens = list(old)
    for number, (at, removed, added) in enumerate(cuts):
        tokens[at : at + removed] = [100 + number * 10 + i for i in range(added)]
        if not tokens:
            return
        chosen = policy if number % 2 == 0 else again
        work = plan(chosen, sequence, np.array(tokens, np.int32))
        counted(work, fates(work, sequence))
        sequence = applied(work, start=1000 * (number + 1))


@settings(max_examples=150, deadline=None)
@given(old=texts, new=texts, last=texts, policy=st.sampled_from(POLICIES))
def test_edits_after_a_drop_have_one_fate_too(
    old: list[int], new: list[int], last: list[int], policy: Policy
) -> None:
    """Tokens without KV stay without KV until they are computed, and are counted so."""
    sequence = sequence_of(old)
    dropped = applied(plan(EagerDrop(), sequence, np.array(new, np.int32)), 1000)
    for tokens in (last, new[: len(new) // 2 + 1], [*new, 3], [9, *new, 3]):
        work = plan(policy, dropped, np.array(tokens, np.int32))
        counted(work, fates(work, dropped))


def letters(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


def relocated_text(work: ReusePlan) -> str:
    positions = slots_of(work.segments, P)[0]
    return "".join(chr(work.tokens[p]) for p in positions if p >= work.prefix)


def test_two_deletions_keep_both_survivors() -> None:
    """CASE 13."""
    work = plan(SCR(min_span=1, tail=0), sequence_of(letters("abcdefghj")), letters("abefhj"))
    assert work.prefix == 2
    assert [(s.old, s.new, s.length) for s in work.spans] == [(4, 2, 2), (7, 4, 2)]
    assert relocated_text(work) == "efh"
    assert work.forward.tolist() == [5]


def test_inserting_one_token_computes_it_and_the_tail() -> None:
    """CASE 14."""
    work = plan(SCR(min_span=2, tail=1), sequence_of(letters("AAAABBBB")), letters("AAAACBBBB"))
    assert work.prefix == 4
    assert work.forward.tolist() == [4, 8]
    assert relocated_text(work) == "BBB"
    assert {c: a.tolist() for c, a in work.causes.items()} == {"inserted": [4], "tail": [8]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("abcdefgh", "Xbcdefgh"),  # at token 0
        ("abcdefgh", "bcdefgh"),
        ("abcdefgh", "vwxyz"),  # everything is deleted
        ("abcdefgh", "abcdefgh"),  # nothing changes
        ("abcdefgh", "abc"),  # shorter than the match
        ("abcdefgh", "a"),
        ("a", "abcdefgh"),
        ("abcdefghijkl", "ijklefghabcd"),  # reordered
        ("abababababab", "babababababa"),  # ambiguous
        ("aaaaaaaaaaaa", "aaaaa"),
        ("aaaaa", "aaaaaaaaaaaa"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_edits_at_the_edges_are_valid(old: str, new: str, policy: Policy) -> None:
    """CASE 15."""
    sequence = sequence_of(letters(old))
    work = plan(policy, sequence, letters(new))
    counted(work, fates(work, sequence))


def test_the_last_token_of_an_edited_message_does_not_survive() -> None:
    """CASE 16."""
    old, new = letters("systemUSERxanswer"), letters("systemUSERyanswer")
    work = plan(SCR(min_span=1, tail=0), sequence_of(old), new)
    assert work.forward.tolist() == [10, 16]
    kept = slots_of(work.segments, P)[1]
    assert 10 not in kept


def test_two_moves_add_once() -> None:
    """CASE 17: positions read back are those of the plan, deltas those of the tokens."""
    old = list(range(30))
    first = plan(SMALL, sequence_of(old), np.array([*range(10), 90, 91, *range(10, 30)], np.int32))
    middle = applied(first, 1000)
    tokens = np.array([*range(5), 92, *range(5, 10), 90, 91, *range(10, 30)], np.int32)
    second = plan(SMALL, middle, tokens)
    positions, slots = slots_of(second.segments, P)
    for position, slot in zip(positions.tolist(), slots.tolist(), strict=True):
        if slot < 30:  # a slot of the first sequence: token = slot
            assert tokens[position] == slot
    deltas = {(r.origin, r.delta) for r in second.provenance if r.origin is Origin.RELOCATED}
    assert deltas == {(Origin.RELOCATED, 1), (Origin.RELOCATED, 3)}


def test_a_plan_leaves_its_sequence_alone_and_shares_nothing_writable() -> None:
    sequence = sequence_of(range(20))
    before = sequence.segments.copy()
    work = plan(SMALL, sequence, np.array([*range(3), *range(8, 20)], np.int32))
    np.testing.assert_array_equal(sequence.segments, before)
    with pytest.raises(ValueError, match="read-only"):
        work.segments[0, PAGE] = 7
    assert (work.segments[:, HI] > work.segments[:, LO]).all()
