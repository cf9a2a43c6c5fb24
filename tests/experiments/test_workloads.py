"""Workloads: deterministic, stable ids, real text, and edits that are what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.config import resolve
from experiments.subject import tiny_model
from experiments.workloads import make_cases
from experiments.workloads.corpus import Corpus, encode, load_corpus
from experiments.workloads.edit_grid import EDITS
from jaxkv.errors import ConfigError, TokenError

TOKENS = np.arange(4000, dtype=np.int32)  # every token tells where it comes from
GRID = {
    "context": 400,
    "edits": EDITS,
    "positions": (0.0, 0.25, 0.9, 1.0),
    "sizes": (16, 50),
    "documents": 2,
    "continuation": 8,
}


def test_same_config_same_cases_and_ids_are_unique() -> None:
    first, second = (make_cases(resolve(GRID), TOKENS) for _ in range(2))
    assert [c.id for c in first] == [c.id for c in second]
    assert len({c.id for c in first}) == len(first)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.new, b.new)
    assert first[0].id == "append-end-16-c400-d0"


def test_a_case_does_not_depend_on_what_else_is_in_the_grid() -> None:
    whole = {c.id: c for c in make_cases(resolve(GRID), TOKENS)}
    # The first edit stays first: documents rotate over the grid.
    part = make_cases(resolve({**GRID, "positions": (0.0, 0.25), "sizes": (50, 16)}), TOKENS)
    for case in part:
        np.testing.assert_array_equal(whole[case.id].new, case.new)


def test_another_seed_gives_other_text() -> None:
    one, two = (make_cases(resolve({**GRID, "seed": s}), TOKENS) for s in (0, 1))
    assert any(not np.array_equal(a.old, b.old) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("case", make_cases(resolve(GRID), TOKENS), ids=lambda c: c.id)
def test_each_edit_is_what_it_says(case) -> None:
    assert len(case.old) == 400
    np.testing.assert_array_equal(np.diff(case.old), 1)  # real text, in order
    survivors = case.new[np.isin(case.new, case.old)]
    added = case.new[~np.isin(case.new, case.old)]
    removed = case.old[~np.isin(case.old, case.new)]
    expected = {
        "append": (0, case.size),
        "delete": (case.size, 0),
        "insert": (0, case.size),
        "replace": (case.size, case.size),
        "reorder": (0, 0),
        "strip": (case.size, 0),
    }
    assert (len(removed), len(added)) == expected[case.edit]
    # The text behind the edit truly goes on: with the next token of the corpus.
    last = added[-1] if case.edit == "append" else case.old[-1]
    np.testing.assert_array_equal(case.continuation, last + 1 + np.arange(8))
    if case.edit == "reorder":
        assert sorted(case.new.tolist()) == case.old.tolist()
        assert not np.array_equal(case.new, case.old)
    else:
        assert (np.diff(survivors) > 0).all()
    # A seam is where old text goes on behind a change: the jump in the corpus is right before it.
    for seam in case.seams:
        assert case.new[seam] in case.old
        assert seam == 0 or case.new[seam] != case.new[seam - 1] + 1
    jumps = [i for i in range(1, len(case.new)) if case.new[i] != case.new[i - 1] + 1]
    assert {j for j in jumps if case.new[j] in case.old} <= set(case.seams)
    assert len(case.seams) == len(set(case.seams))


def test_positions_leave_text_behind_the_edit() -> None:
    for case in make_cases(resolve({**GRID, "sizes": 200, "edits": "delete"}), TOKENS):
        at = {"head": 0, "25%": 50, "90%": 180, "100%": 200}[case.position]
        np.testing.assert_array_equal(case.new[:at], case.old[:at])
        assert case.seams == ((at,) if at < 200 else ())


def test_distances_count_from_the_nearest_seam_before() -> None:
    case = next(c for c in make_cases(resolve(GRID), TOKENS) if c.id.startswith("strip-25%-50"))
    first, second = case.seams[:2]
    at = np.array([0, first - 1, first, first + 1, second - 1, second], np.int32)
    assert case.distances(at).tolist() == [-1, -1, 0, 1, second - 1 - first, 0]
    append = next(c for c in make_cases(resolve(GRID), TOKENS) if c.edit == "append")
    assert append.distances(at).tolist() == [-1] * 6


def test_an_edit_keeps_a_cell_however_thin_the_grid() -> None:
    config = resolve({**GRID, "edits": EDITS, "positions": (0.0, 0.5), "sizes": (16, 20), "thin": 6})
    found = [case.edit for case in make_cases(config, TOKENS)]
    assert sorted(set(found)) == sorted(EDITS)
    assert found.count("delete") == 1


def test_thinning_keeps_every_value_of_every_axis() -> None:
    config = resolve({**GRID, "edits": ("delete", "insert", "replace"), "thin": 2})
    cases = make_cases(config, TOKENS)
    assert len(cases) == 12
    assert {c.edit for c in cases} == {"delete", "insert", "replace"}
    assert {c.position for c in cases} == {"head", "25%", "90%", "100%"}
    assert {c.size for c in cases} == {16, 50}
    assert {c.document for c in cases} == {0, 1}


def test_bos_starts_old_and_new_and_shifts_the_seams() -> None:
    plain, marked = make_cases(resolve(GRID), TOKENS), make_cases(resolve(GRID), TOKENS, bos=3999)
    for a, b in zip(plain, marked, strict=True):
        assert b.old[0] == b.new[0] == 3999
        np.testing.assert_array_equal(b.new[1:], a.new)
        assert b.seams == tuple(s + 1 for s in a.seams)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"context": 1400}, "config.corpus has 4000 tokens, expected at least 4374"),
        ({"sizes": 400, "edits": "delete"}, "config.sizes holds 400, expected that delete touches"),
        ({"sizes": 200, "edits": "reorder"}, "expected that reorder touches fewer tokens"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_cases(resolve({**GRID, **values}), TOKENS)
    assert message in str(error.value)


def test_corpora_have_digests_and_bad_ones_are_refused(tmp_path: Path) -> None:
    topics, stdlib = load_corpus("topics"), load_corpus("stdlib")
    assert len(topics.text) > 100_000
    assert "def " in stdlib.text
    assert len({topics.digest, stdlib.digest}) == 2
    assert load_corpus("topics").digest == topics.digest
    path = tmp_path / "a.txt"
    path.write_text("Grüße\n", encoding="utf-8")
    assert load_corpus(str(path)).name == "a.txt"
    path.write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 2"):
        load_corpus(str(path))
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="holds no text"):
        load_corpus(str(path))
    with pytest.raises(ConfigError, match="expected 'topics', 'stdlib' or the path"):
        load_corpus(str(tmp_path / "missing.txt"))


def test_a_model_without_tokenizer_reads_bytes() -> None:
    model = tiny_model()
    assert encode(Corpus.of("c", "aé"), model).tolist() == [97, 0xC3, 0xA9]
    small = type("M", (), {"tokenizer": None, "name": "m", "config": type("C", (), {})()})()
    small.config.vocab_size = 100
    with pytest.raises(TokenError, match="vocabulary of 100"):
        encode(Corpus.of("c", "a"), small)
