"""recall, residue, drift, agent_loop: deterministic, and each is the edit that it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from experiments.config import resolve
from experiments.subject import tiny_model
from experiments.workloads import WORKLOADS, make_cases
from experiments.workloads.agent_loop import AGENT_EDITS
from experiments.workloads.case import Case
from experiments.workloads.words import Speaker
from jaxkv.errors import ConfigError

pytestmark = pytest.mark.once

TEXT = np.random.default_rng(3).integers(97, 123, 20_000).astype(np.int32)  # bytes a..z
SMALL: dict[str, Any] = {
    "model": "tiny-random",
    "context": (900,),
    "distances": (0, 250),
    "num_items": 4,
    "moves": (9,),
    "turns": 4,
    "sizes": (60,),
    "documents": 2,
    "continuation": 16,
}
MODEL = tiny_model()


def cases_of(workload: str, **values: Any) -> list[Case]:
    return make_cases(resolve({**SMALL, "workload": workload, **values}), TEXT, model=MODEL)


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_the_same_config_gives_the_same_cases_and_another_seed_others(workload: str) -> None:
    first, second, other = cases_of(workload), cases_of(workload), cases_of(workload, seed=1)
    assert [c.id for c in first] == [c.id for c in second]
    assert len({c.id for c in first}) == len(first) > 0
    for a, b in zip(first, second, strict=True):
        for x, y in zip((a.old, *(t.new for t in a.turns)), (b.old, *(t.new for t in b.turns)), strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.dtype == np.int32
    assert any(not np.array_equal(a.old, b.old) for a, b in zip(first, other, strict=True))
    for case in first:
        assert len(case.continuation)
        assert case.longest >= len(case.new) + len(case.continuation)


def said(tokens: np.ndarray) -> str:
    return bytes(tokens.tolist()).decode()


def test_a_recall_changes_one_word_and_asks_for_it() -> None:
    for case in cases_of("recall"):
        assert case.task is not None
        assert len(case.old) == len(case.new) == case.seams[0] + len(case.new) - case.seams[0]
        (at,) = np.flatnonzero(case.old != case.new)
        assert (case.old[at], case.new[at]) == (case.task.stale, case.task.answer)
        assert case.continuation[-1] == case.task.answer
        assert {case.task.stale, case.task.answer} <= set(case.task.candidates)
        question, text = said(case.continuation[:-1]), said(case.new)
        assert question.endswith(" ")
        # The answer stands in the text once, and the question alone does not hold it.
        assert chr(case.task.answer) not in question.rsplit(" ", 2)[-1]
        fact = text[: at + 1].rsplit("\n\n", 1)[1]
        assert fact.startswith("The ")
        behind = text[at + 1 :]
        if case.edit == "derived":
            depends = [i for i, part in enumerate(behind.split("\n\n")) if part.startswith("The ")]
            assert depends, "a sentence that depends on the fact follows"
            distance = behind.index("\n\nThe ")
            assert abs(distance - case.task.distance) <= 4
        else:
            assert "The " not in behind.split("\n\n", 1)[1]
            assert abs(len(behind) - 3 - max(case.task.distance, 1)) <= 1
        assert abs(len(case.new) + len(case.continuation) - 1 - case.context) <= 1, "all of it"


def test_a_residue_deletes_a_secret_that_a_twin_never_had() -> None:
    for case in cases_of("residue"):
        assert case.task is not None
        assert case.twin is not None
        at, size = case.seams[0], case.size
        np.testing.assert_array_equal(case.new, np.delete(case.old, np.s_[at : at + size]))
        np.testing.assert_array_equal(case.new, np.delete(case.twin, np.s_[at : at + size]))
        (differs,) = np.flatnonzero(case.old != case.twin)
        assert at <= differs < at + size
        assert case.old[differs] == case.task.answer
        assert len(case.new) - at == max(case.task.distance, 1)


def test_drift_moves_one_span_and_measures_at_powers_of_two() -> None:
    for case in cases_of("drift", kv_dtype="float32,bfloat16"):
        assert case.kv_dtype in ("float32", "bfloat16")
        assert len(case.turns) == 9
        measured = [i for i, turn in enumerate(case.turns, 1) if len(turn.continuation)]
        assert measured == [1, 2, 4, 8, 9]
        at = len(case.old) // 4
        span, before = case.old[at:], case.old
        for turn in case.turns:
            np.testing.assert_array_equal(turn.new[:at], case.old[:at])
            np.testing.assert_array_equal(turn.new[-len(span) :], span)
            assert len(turn.new) != len(before), "every edit moves the span"
            assert len(turn.new) - len(case.old) <= 48
            before = turn.new
        assert case.seams == (len(case.new) - len(span),)


@pytest.mark.parametrize("edit", AGENT_EDITS)
def test_a_conversation_grows_and_is_edited_as_it_says(edit: str) -> None:
    for case in cases_of("agent_loop", edits=edit):
        assert case.edit == edit
        texts = [said(case.old), *(said(t.new) for t in case.turns)]
        assert all(text.startswith("<|system|>\nYou are") for text in texts)
        assert all(text.endswith("<|assistant|>\n") for text in texts[1:])
        assert all(len(turn.continuation) == 16 for turn in case.turns)
        first_tool = texts[0].split("<|tool|>\n")[1].split("\n")[0]
        last = texts[-1]
        if edit == "clear_tools":
            assert last.count("[cleared]") == len(texts) + 1 - 2
            assert first_tool not in last
        if edit == "replace_file":
            changed = last.split("<|tool|>\n")[1].split("\n")[0]
            assert sorted(changed) == sorted(first_tool)
            assert changed != first_tool
        if edit == "strip_reasoning":
            assert all(text.count("<|reasoning|>") == 1 for text in texts[1:])
        if edit == "drop_oldest":
            assert first_tool in texts[1]
            assert first_tool not in last
            assert last.count("<|user|>") <= 2
        if edit == "reorder_documents":
            second_tool = texts[0].split("<|tool|>\n")[2].split("\n")[0]
            assert texts[1].index(second_tool) < texts[1].index(first_tool)


def test_words_are_single_tokens_and_too_few_are_an_error() -> None:
    speaker = Speaker(MODEL)
    words = speaker.words(5)
    assert [word for word, _ in words] == list("abcde")
    assert [token for _, token in words] == [97, 98, 99, 100, 101]
    with pytest.raises(ConfigError, match="26 of the workload's words as single tokens"):
        speaker.words(99)


@pytest.mark.parametrize(
    ("workload", "values", "says"),
    [
        ("recall", {"context": (200,), "distances": (250,)}, "expected at least"),
        ("drift", {"documents": 40}, "expected at least"),
        ("agent_loop", {"sizes": (9000,)}, "expected at least"),
        ("drift", {"kv_dtype": "float13"}, "config.kv_dtype is 'float13', expected one of model, float32"),
        ("drift", {"moves": 0}, "config.moves is 0"),
        ("agent_loop", {"edits": "clear_tool"}, "did you mean 'clear_tools'"),
    ],
)
def test_what_does_not_fit_is_refused(workload: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        cases_of(workload, **values)
    assert says in str(error.value)
