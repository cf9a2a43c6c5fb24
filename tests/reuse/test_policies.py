"""Policies as values: names and back, combinations, and what each selects from an edit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.errors import ConfigError
from jaxkv.reuse.diff import Span
from jaxkv.reuse.plan import decide
from jaxkv.reuse.policies import (
    SCR,
    Budget,
    Composed,
    Dependents,
    Drop,
    Edit,
    Erratum,
    Exact,
    FirstK,
    Forget,
    NoRotation,
    Policy,
    Sinks,
    TopDeviation,
    policy_from_name,
)
from jaxkv.reuse.probes import Attention, Deviation, Encoded, Trial

shares = st.floats(1e-6, 1.0, exclude_min=True).map(lambda x: float(f"{x:.6g}"))
repairs = st.lists(
    st.one_of(
        st.integers(1, 99).map(FirstK),
        st.integers(1, 99).map(Sinks),
        st.builds(TopDeviation, shares, st.integers(1, 40)),
        st.builds(Dependents, st.integers(0, 99), st.integers(1, 99)),
    ),
    max_size=3,
)
scrs = st.builds(
    SCR,
    form=st.sampled_from(["view", "copy", "composed"]),
    max_spans=st.integers(1, 9),
    min_span=st.integers(1, 99),
    tail=st.integers(0, 99),
    repairs=repairs.map(tuple),
)
policies = st.one_of(
    scrs,
    repairs.filter(len).map(lambda r: r[0]),
    st.sampled_from([Exact(), Drop(), Forget(), NoRotation(), Composed(), SCR(), Erratum(), Erratum(8)]),
    shares.map(Budget),
)


@given(policy=policies)
def test_a_policys_name_reads_back_as_itself(policy: Policy) -> None:
    again = policy_from_name(str(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert str(again) == str(policy)
    assert isinstance(policy, Policy)


@given(policy=scrs.map(lambda p: SCR(**{**vars(p), "rotate": False})))
def test_the_control_with_arguments_reads_back_as_itself(policy: SCR) -> None:
    assert policy_from_name(str(policy)) == policy


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("exact", Exact()),
        ("drop", Drop()),
        ("forget", Forget()),
        ("scr", SCR()),
        ("scr()", SCR()),
        (" scr ( form = copy , tail=0 ) ".replace("scr (", "scr("), SCR(form="copy", tail=0)),
        ("no_rotation", SCR(rotate=False)),
        ("first_k", FirstK(32)),
        ("first_k(8)", FirstK(8)),
        ("first_k(k=8)", FirstK(8)),
        ("sinks", Sinks(4)),
        ("scr|first_k(8)|sinks(2)", SCR() | FirstK(8) | Sinks(2)),
        ("first_k(8)|sinks(2)", SCR() | FirstK(8) | Sinks(2)),
        ("no_rotation | first_k", NoRotation() | FirstK()),
        ("top_deviation", TopDeviation(0.15, 1)),
        ("scr|top_deviation(0.3)|sinks", SCR() | TopDeviation(0.3) | Sinks()),
        ("top_deviation(1,layer=2)", TopDeviation(1, 2)),
        ("dependents(most=8)", Dependents(32, 8)),
        ("erratum(quote=8)", Erratum(8)),
        ("budget(1e-05)", Budget(1e-5)),
        ("scr(form=composed)", Composed()),
    ],
)
def test_names(name: str, policy: Policy) -> None:
    assert policy_from_name(name) == policy


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("scrr", "did you mean 'scr'"),
        ("first-k", "did you mean 'first_k'"),
        ("", "unknown"),
        ("EXACT", "unknown"),
        ("exact|first_k", "does not combine"),
        ("scr|drop", "does not combine"),
        ("forget|sinks", "does not combine"),
        ("scr(", "parenthesis"),
        ("scr(form=copy", "parenthesis"),
        ("scr(form=cpoy)", "form is 'cpoy'"),
        ("scr(max_spans=0)", "max_spans is 0"),
        ("scr(min_span=0)", "min_span is 0"),
        ("scr(tail=-1)", "tail is -1"),
        ("scr(tail=--5)", "tail"),
        ("scr(tail=²)", "tail"),
        ("scr(tial=3)", "arguments"),
        ("scr(tail=many)", "arguments"),
        ("scr(repairs=1)", "repairs"),
        ("first_k(0)", "first_k is 0"),
        ("sinks(0)", "sinks is 0"),
        ("exact(3)", "arguments"),
        ("top_deviation(0)", "ratio is 0"),
        ("top_deviation(1.5)", "ratio is 1.5"),
        ("top_deviation(0.1,0)", "layer is 0"),
        ("top_deviation(0.1,1.5)", "layer is 1.5"),
        ("dependents(-1)", "window is -1"),
        ("dependents(1,0)", "most is 0"),
        ("budget(0)", "eps is 0"),
        ("budget(x)", "numbers"),
        ("scr|budget", "does not combine"),
        ("scr|erratum", "does not combine"),
        ("no_rotation(3)", "3"),
    ],
)
def test_what_is_no_policy_is_one_clear_error(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        policy_from_name(name)


@pytest.mark.parametrize("bad", [Exact(), Drop(), 3, "first_k"])
def test_only_repairs_combine_with_scr(bad: Any) -> None:
    with pytest.raises(TypeError):
        SCR() | bad


def edit_of(prefix: int, old: int, new: int, *spans: tuple[int, int, int]) -> Edit:
    return Edit(
        old_length=old,
        exact_length=old,
        new_length=new,
        prefix=prefix,
        survivors=tuple(Span(*s) for s in spans),
    )


EDIT = edit_of(10, 400, 380, (20, 10, 70), (100, 90, 30), (140, 130, 200))


def causes_of(policy: Policy, edit: Edit = EDIT) -> dict[str, list[int]]:
    return {cause: sorted(at.tolist()) for cause, at in policy.select(edit).recompute}


def test_exact_keeps_nothing_and_drop_names_what_it_drops() -> None:
    assert Exact().select(EDIT).keep == ()
    assert Drop().select(EDIT).keep == ()
    assert Drop().select(EDIT).drop == EDIT.survivors
    assert Exact().exact
    assert not Drop().exact


def test_scr_keeps_the_longest_spans_and_renews_their_tails() -> None:
    kept = SCR().select(EDIT)
    assert [s.new for s in kept.keep] == [10, 130]  # 30 tokens are fewer than min_span
    assert causes_of(SCR())["tail"] == [*range(64, 80), *range(314, 330)]
    assert [s.new for s in SCR(max_spans=1).select(EDIT).keep] == [130]
    assert [s.new for s in SCR(min_span=30).select(EDIT).keep] == [10, 90, 130]
    # A tail longer than its span ends where the span begins.
    assert causes_of(SCR(min_span=30, tail=50))["tail"][:3] == [30, 31, 32]
    assert causes_of(SCR(min_span=30, tail=50), edit_of(0, 99, 99, (10, 5, 30)))["tail"] == list(range(5, 35))
    assert causes_of(SCR(tail=0))["tail"] == []


def test_first_k_renews_behind_each_seam_and_sinks_the_head() -> None:
    assert causes_of(SCR() | FirstK(3))["first_k"] == [10, 11, 12, 130, 131, 132]
    assert causes_of(FirstK(500), edit_of(0, 99, 99, (10, 5, 70)))["first_k"] == list(range(5, 75))
    assert causes_of(SCR() | Sinks(4))["sinks"] == []  # the prefix holds them
    assert causes_of(Sinks(4), edit_of(0, 99, 99, (10, 0, 80)))["sinks"] == [0, 1, 2, 3]
    assert causes_of(Sinks(4), edit_of(0, 99, 2, (10, 0, 2)))["sinks"] == [0, 1]
    assert causes_of(Sinks(4), edit_of(3, 99, 90, (10, 3, 80)))["sinks"] == [3]


@settings(max_examples=200)
@given(data=st.data())
def test_forget_keeps_nothing_at_or_behind_the_first_deleted_token(data: Any) -> None:
    """CASE 16: what attended deleted text is computed again, wherever it now stands."""
    prefix = data.draw(st.integers(0, 40))
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=6))
    gaps = data.draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    spans, old = [], prefix
    for length, gap in zip(lengths, gaps, strict=True):
        spans.append((old + gap, length))
        old += gap + length
    order = data.draw(st.permutations(range(len(spans))))
    survivors, new = [], prefix
    for index in order:
        survivors.append((spans[index][0], new, spans[index][1]))
        new += spans[index][1] + data.draw(st.integers(0, 3))
    tail = data.draw(st.integers(0, 5))
    edit = edit_of(prefix, old + tail, new, *survivors)
    covered = set(range(prefix)) | {p for o, _, n in survivors for p in range(o, o + n)}
    deleted = [p for p in range(edit.old_length) if p not in covered]
    first = min(deleted, default=edit.old_length)
    for span in Forget().select(edit).keep:
        assert span.old + span.length <= first
        assert any(
            s.old <= span.old and span.old + span.length <= s.old + s.length and s.delta == span.delta
            for s in edit.survivors
        )
    if not deleted:
        assert Forget().select(edit).keep == SCR().select(edit).keep


def asked(policy: Policy, edit: Edit, **answers: Any) -> tuple[Any, list[Any]]:
    """The selection of a policy whose probes are answered by kind, and what it asked for."""
    questions = []

    def probe(_: Edit, ask: Any) -> tuple[Any, float]:
        questions.append(ask)
        return answers[type(ask).__name__.lower()], 1.0

    selection, spent = decide(policy, edit, probe)
    assert spent == len(questions)
    return selection, questions


def test_top_deviation_asks_for_its_layer_and_takes_the_largest_share() -> None:
    deviation = np.full(380, np.nan, np.float32)
    deviation[10:80] = deviation[130:330] = 0.0
    deviation[[12, 79, 200, 329]] = 4.0, 3.0, 5.0, 1.0
    selection, questions = asked(TopDeviation(4 / 270, 3), EDIT, deviation=deviation)
    assert questions == [Deviation(3)]
    causes = {cause: at.tolist() for cause, at in selection.recompute}
    assert causes["top_deviation"] == [200, 12, 79, 329]
    assert asked(TopDeviation(), edit_of(3, 3, 3), deviation=deviation)[1] == []


def test_dependents_takes_a_window_and_who_attends_most() -> None:
    mass = np.zeros(380, np.float32)
    mass[[10, 40, 300, 90]] = 9.0, 0.5, 0.8, 9.0  # 10 is in the window, 90 is not kept
    selection, questions = asked(SCR() | Dependents(4, 2), EDIT, attention=mass)
    assert questions == [Attention()]
    causes = {cause: at.tolist() for cause, at in selection.recompute}
    assert causes["dependents"] == [10, 11, 12, 13, 130, 131, 132, 133, 300, 40]
    inserted = edit_of(10, 80, 90, (10, 20, 70))
    assert asked(SCR() | Dependents(4, 2), inserted)[1] == [], "nothing was deleted"


def test_a_budget_tries_its_rungs_in_order() -> None:
    class Bound:
        def __init__(self, bound: float) -> None:
            self.bound = bound

    ladder = (SCR(), SCR() | FirstK(8))
    for bound, chosen, count in ((0.01, ladder[0], 1), (0.02, None, 2)):
        selection, questions = asked(Budget(0.01, ladder), EDIT, trial=Bound(bound))
        assert [q.policy for q in questions] == list(ladder[:count])
        assert selection.take == chosen
        assert selection.exact == (chosen is None)
    with pytest.raises(ConfigError, match="no budget in it"):
        Budget(0.01, (Budget(),))
    assert Trial(SCR()) == Trial(SCR())


def worded(edit: Edit) -> list[Any]:
    """An erratum's message: its texts, and its runs of tokens."""
    heard: dict[int, str] = {}

    def probe(_: Edit, ask: Any) -> tuple[Any, float]:
        heard[-1 - len(heard)] = ask.text
        return np.array([-len(heard)], np.int32), 0.0

    selection, _ = decide(Erratum(), edit, probe)
    return [heard.get(int(t), int(t)) for t in selection.append]


def text_edit(old: str, new: str, prefix: int, *spans: tuple[int, int, int]) -> Edit:
    import dataclasses

    codes = {n: np.array([ord(c) for c in t], np.int32) for n, t in (("old_tokens", old), ("tokens", new))}
    return dataclasses.replace(edit_of(prefix, len(old), len(new), *spans), **codes)


def spoken(edit: Edit) -> str:
    return "".join(x if isinstance(x, str) else chr(x) for x in worded(edit))


def test_an_erratum_says_what_went_and_what_came() -> None:
    assert spoken(text_edit("abcdXYefgh", "abcdZefgh", 4, (6, 5, 4))) == (
        '\n\nCorrection: the passage "XY" above is out of date, it now reads "Z".\n\n'
    )
    assert spoken(text_edit("abcdXYefgh", "abcdefgh", 4, (6, 4, 4))) == (
        '\n\nCorrection: the passage "XY" above was removed, disregard it.\n\n'
    )
    assert spoken(text_edit("abcdefgh", "abcdZefgh", 4, (4, 5, 4))) == (
        '\n\nCorrection: after "abcd" above, add "Z".\n\n'
    )
    assert spoken(text_edit("XYabcd", "abcd", 0, (2, 0, 4))).count("XY") == 1
    long = "abcd" + "".join(chr(200 + i) for i in range(60)) + "efgh"
    said = spoken(text_edit(long, "abcdefgh", 4, (64, 4, 4)))
    assert " ... " in said
    assert chr(200) + chr(201) in said
    assert chr(259) in said
    assert chr(230) not in said
    same, questions = asked(Erratum(), text_edit("abcdefgh", "efghabcd", 0, (4, 0, 4), (0, 4, 4)))
    assert (same.append, same.keep, questions) == (None, (), [])
    longer, questions = asked(Erratum(), text_edit("abcd", "abcdefgh", 4))
    assert (longer.append, longer.keep, questions) == (None, (), [])


def test_a_policy_may_not_ask_what_it_was_told_and_a_plan_needs_somebody_to_ask() -> None:
    class Forgetful(SCR):
        def select(self, edit: Edit) -> Any:  # noqa: ARG002
            from jaxkv.reuse.policies import Selection

            return Selection(ask=Encoded("x"))

    with pytest.raises(ConfigError, match="again, expected it to use the answer"):
        decide(Forgetful(), EDIT, lambda *_: (0, 0.0))
    with pytest.raises(ConfigError, match=r"expected a policy that needs no device"):
        decide(SCR() | TopDeviation(), EDIT, None)


def test_selections_are_inside_the_new_sequence_and_sorted() -> None:
    for policy in (SCR(), SCR() | FirstK(40) | Sinks(8), Forget(), FirstK(), Sinks()):
        for edit in (EDIT, edit_of(0, 5, 3), edit_of(3, 3, 3), edit_of(0, 70, 70, (0, 0, 70))):
            chosen = policy.select(edit)
            assert list(chosen.keep) == sorted(chosen.keep, key=lambda s: s.new)
            for _, at in chosen.recompute:
                assert at.dtype == np.int32
                assert ((at >= 0) & (at < edit.new_length)).all()
