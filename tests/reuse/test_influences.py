"""Which deleted spans a run's KV attended, against a loop over single tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import CONTRACT, SMALL, applied, sequence_of

from jaxkv.cache.sequence import Origin, Removed, Run, Sequence
from jaxkv.reuse.plan import plan, plan_extension
from jaxkv.reuse.policies import SCR, Exact, FirstK, Forget

assert CONTRACT


def per_token(sequence: Sequence) -> list[set[Removed]]:
    return [set(run.influences) for run in sequence.provenance for _ in range(run.start, run.end)]


def expected_influences(old: Sequence, work: Any, before: list[set[Removed]]) -> list[set[Removed]]:
    """Token by token: a kept one reflects what it did, and deletions in front of it in the old text."""
    kept_old = set(range(work.prefix))
    source_of: dict[int, int] = {p: p for p in range(work.prefix)}
    for span in work.spans:
        for i in range(span.length):
            source_of[span.new + i] = span.old + i
    # Deleted is what no surviving span of the text holds, whether a policy kept it or not.
    from jaxkv.reuse.plan import make_edit

    edit = make_edit(old, work.tokens, SMALL)
    for span in edit.survivors:
        kept_old |= set(range(span.old, span.old + span.length))
    kept_old |= set(range(edit.prefix))
    gaps, start = [], None
    for position in range(len(old) + 1):
        gone = position < len(old) and position not in kept_old
        if gone and start is None:
            start = position
        if not gone and start is not None:
            raw = old.tokens[start:position].astype("<i4").tobytes()
            digest = hashlib.sha256(raw).hexdigest()[:16]
            gaps.append(Removed(start, position - start, digest))
            start = None
    computed = set(work.forward.tolist()) if work.write else set()
    result: list[set[Removed]] = []
    for position in range(len(work.tokens)):
        if position not in computed and position in source_of:
            source = source_of[position]
            own = set(before[source])
            if position >= work.prefix:
                own |= {gap for gap in gaps if gap.start < source}
        else:
            own = set().union(*result)
        result.append(own)
    return result


@settings(max_examples=150, deadline=None)
@given(
    old=st.lists(st.integers(0, 30), min_size=10, max_size=40, unique=True),
    cuts=st.lists(
        st.tuples(st.integers(0, 39), st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=4
    ),
    repair=st.booleans(),
)
def test_influences_are_those_that_a_loop_over_tokens_finds(
    old: list[int], cuts: list[tuple[int, int, int]], repair: bool
) -> None:
    sequence = sequence_of(old)
    tokens = list(old)
    policy = SMALL | FirstK(2) if repair else SMALL
    for number, (at, removed, added) in enumerate(cuts):
        tokens[at : at + removed] = [100 + number * 10 + i for i in range(added)]
        if not tokens:
            return
        work = plan(policy, sequence, np.array(tokens, np.int32))
        expected = expected_influences(sequence, work, per_token(sequence))
        made = applied(work, start=1000 * (number + 1))
        assert per_token(made) == expected
        assert set(made.influences) == set().union(*expected)
        sequence = made
    longer = plan_extension(sequence, np.append(sequence.tokens, np.int32(5)))
    extended = dataclasses.replace(sequence, tokens=longer.tokens, provenance=longer.provenance)
    assert set(extended.provenance[-1].influences) == set(sequence.influences)
    for clean in (Exact(), Forget()):
        work = plan(clean, sequence, np.array([*tokens, 7], np.int32))
        assert {run.influences for run in work.provenance} == {()}


def test_a_deleted_span_is_named_by_place_and_digest_and_not_by_its_text() -> None:
    sequence = sequence_of(range(30))
    work = plan(SMALL, sequence, np.array([*range(5), *range(9, 20), *range(22, 30)], np.int32))
    made = applied(work, 1000)
    first, second = made.influences
    assert (first.start, first.length) == (5, 4)
    assert (second.start, second.length) == (20, 2)
    assert first.digest == hashlib.sha256(np.arange(5, 9, dtype="<i4").tobytes()).hexdigest()[:16]
    by_place = {run.start: run.influences for run in made.provenance}
    assert by_place[0] == ()
    assert by_place[5] == (first,)
    assert by_place[16] == (first, second)


def test_what_only_moved_or_was_inserted_before_deletes_nothing() -> None:
    sequence = sequence_of(range(40))
    swapped = plan(SMALL, sequence, np.array([*range(20, 40), *range(20)], np.int32))
    assert {run.influences for run in swapped.provenance} == {()}
    inserted = plan(SCR(min_span=3), sequence, np.array([*range(10), 90, *range(10, 40)], np.int32))
    assert {run.influences for run in inserted.provenance} == {()}
    assert any(run.origin is Origin.RELOCATED for run in inserted.provenance)
    assert Run(0, 1, Origin.EXACT).influences == ()
