"""Domains share nothing but what is declared; each test is paired, so that no cache at all cannot pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from judge import ATOL
from reference import Decoder
from tiny import NUM_PAGES, PAGE_SIZE

import jaxkv
from jaxkv import Cause, Domain

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
PAGE_BYTES = PAGE_SIZE * 2 * 2 * 2 * 16 * 4  # K and V of two layers, two heads of 16 float32


@pytest.mark.parametrize("field", ["tenant", "authorization", "instance", "salt"])
def test_every_field_of_a_domain_separates(engine: jaxkv.Engine, text: Text, field: str) -> None:
    """CASES 4, 5: also where one field has the text of another."""
    mine = Domain(tenant="X", authorization="X", instance="X", salt="X")
    engine.prefill(text(40), domain=mine)
    other = dataclasses.replace(mine, **{field: "Y"})
    missed = engine.prefill(text(40), domain=other).reuse
    assert (missed.matched, missed.match_end.cause) == (0, Cause.ABSENT)
    assert engine.prefill(text(40), domain=mine).reuse.matched == 39
    only = Domain(**{field: "X"})
    assert engine.prefill(text(40), domain=only).reuse.matched == 0


def test_what_a_domain_can_see_does_not_depend_on_others(make_engine: Engines, text: Text) -> None:
    """CASE 5, metrics included: the same answers with another domain's work and without it."""

    def seen_by_b(engine: jaxkv.Engine) -> tuple[object, ...]:
        results = [engine.prefill(text(40, seed=s), domain="B").reuse for s in (0, 1, 0)]
        answers = [(r.matched, r.match_end, r.ledger) for r in results]
        return answers, engine.stats(domain="B"), engine.stats(domain="C")

    crowded, alone = make_engine(), make_engine()
    for seed in (0, 1, 2):
        crowded.prefill(text(40, seed=seed), domain="A")
    crowded.pin(text(40), domain="A")
    assert seen_by_b(crowded) == seen_by_b(alone)
    assert crowded.stats(domain="B")["hit_tokens"] == 40
    assert crowded.stats(domain="A")["lookups"] == 3
    assert crowded.stats()["lookups"] == 6


def test_an_engine_without_an_adapter_does_not_find_what_one_with_it_computed(
    make_engine: Engines,
) -> None:
    """CASE 3: adapter content is part of the contract."""
    plain, adapted = make_engine(), make_engine(adapter_digest="a" * 64)
    found = plain.contract.mismatch(adapted.contract)
    assert found == (("adapter_digest", "", "a" * 64),)
    with pytest.raises(jaxkv.ContractError, match="adapter_digest is 'aaa"):
        plain.contract.require(adapted.contract)


def test_what_the_token_ids_say_is_what_counts(engine: jaxkv.Engine, text: Text) -> None:
    """CASE 8: a special token in front, or another whitespace token inside."""
    engine.prefill(np.concatenate([[1], text(40)]))
    bare = engine.prefill(text(40)).reuse
    assert (bare.matched, bare.match_end) == (0, jaxkv.MatchEnd(Cause.TOKENS, 0))
    spaced = np.concatenate([[1], text(40)[:20], [3], text(40)[20:]])
    end = engine.prefill(spaced).reuse
    assert (end.matched, end.match_end) == (21, jaxkv.MatchEnd(Cause.TOKENS, 21))
    assert engine.prefill(np.concatenate([[1], text(40)])).reuse.matched == 40


def test_a_declared_prefix_is_read_by_all_and_written_by_none(
    engine: jaxkv.Engine, decoder: Decoder, text: Text
) -> None:
    declared = engine.publish_prefix(text(45))
    assert (declared.forwarded, declared.matched) == (45, 0)
    assert engine.stats()["sequences"] == 0
    pages = engine.stats()["pages_live"]
    results = {}
    for name in "AB":
        tokens = np.concatenate([text(45), text(9, seed=ord(name))])
        result = engine.prefill(tokens, domain=name)
        assert result.reuse.matched == 45
        np.testing.assert_allclose(result.logits, decoder.logits(tokens)[-1], atol=ATOL)
        results[name] = (tokens, result)
    # The first to go on does so in the last page, in slots that no other segment names.
    assert engine.stats()["pages_live"] == pages + 1 + 2, "the prefix is there once"
    # What stands behind it is private: A does not find B's, and nobody finds it as public.
    assert engine.prefill(results["B"][0], domain="A").reuse.matched == 45
    assert engine.prefill(results["A"][0], domain="C").reuse.matched == 45
    assert engine.prefill(results["A"][0], domain="A").reuse.matched == 53
    assert engine.publish_prefix(text(45)).matched == 44


def test_declared_prefixes_are_taken_back(engine: jaxkv.Engine, text: Text) -> None:
    engine.publish_prefix(text(40), pin_seconds=60)
    held = engine.prefill(np.concatenate([text(40), [1]]), domain="A")
    engine.withdraw_prefixes()
    assert engine.prefill(np.concatenate([text(40), [1]]), domain="B").reuse.matched == 0
    assert engine.prefill(np.concatenate([text(40), [2]]), domain="A").reuse.matched == 40
    assert np.isfinite(engine.read_kv(held.sequence).keys).all()


def test_an_engine_without_a_cache_declares_nothing(make_engine: Engines, text: Text) -> None:
    with pytest.raises(jaxkv.ConfigError, match="prefix_cache is False"):
        make_engine(prefix_cache=False).publish_prefix(text(9))


def test_no_domain_can_declare(engine: jaxkv.Engine, text: Text) -> None:
    """CASE 4: the scope is no part of a domain."""
    for fake in ("public", Domain(tenant="", salt="public"), Domain()):
        engine.prefill(text(40), domain=fake)
    assert engine.prefill(text(40), domain="A").reuse.matched == 0
    assert engine.prefill(text(40), domain="public").reuse.matched == 39


def test_quotas_keep_domains_out_of_each_others_cache(make_engine: Engines, text: Text) -> None:
    engine = make_engine(domain_quota_bytes=20 * PAGE_BYTES)
    for seed in range(2):
        engine.release(engine.prefill(text(10 * PAGE_SIZE, seed=seed), domain="A").sequence)
    for seed in range(9):
        engine.release(engine.prefill(text(10 * PAGE_SIZE, seed=50 + seed), domain="B").sequence)
    assert engine.stats()["entries_evicted"] == 0
    assert engine.stats()["entries_quota"] == 7
    for seed in range(2):
        assert engine.prefill(text(10 * PAGE_SIZE, seed=seed), domain="A").reuse.matched == 79
    assert engine.prefill(text(10 * PAGE_SIZE, seed=50), domain="B").reuse.match_end.cause is Cause.QUOTA
    mine = engine.stats(domain="B")
    assert (mine["quota_pages"], mine["quota_pages_used"]) == (20, 20)
    engine.set_quota("B", 5 * PAGE_BYTES)
    assert engine.stats(domain="B")["quota_pages_used"] <= 5
    engine.set_quota("B", None)
    for seed in range(2):
        engine.release(engine.prefill(text(10 * PAGE_SIZE, seed=70 + seed), domain="B").sequence)
    assert engine.stats(domain="B")["quota_pages"] == -1
    assert engine.stats(domain="B")["quota_pages_used"] >= 20


def test_forgetting_a_domain_forgets_it_alone(engine: jaxkv.Engine, text: Text) -> None:
    kept = engine.prefill(text(30), domain="A").sequence
    engine.prefill(text(30), domain="B")
    engine.forget_domain("A")
    assert np.isfinite(engine.read_kv(kept).keys).all()
    assert engine.prefill(text(30), domain="A").reuse.matched == 0
    assert engine.prefill(text(30), domain="B").reuse.matched == 29


def test_old_weights_are_named_in_the_miss_and_only_to_their_domain(
    engine: jaxkv.Engine, model: jaxkv.Model, text: Text
) -> None:
    """CASE 7."""
    engine.prefill(text(30), domain="A")
    engine.replace_params(model.params, "another digest")
    end = engine.prefill(text(30), domain="A").reuse.match_end
    assert (end.cause, end.fields) == (Cause.CONTRACT, ("weights_digest",))
    assert str(end) == "what this domain has cached is under another contract: weights_digest"
    assert engine.prefill(text(30), domain="B").reuse.match_end.cause is Cause.ABSENT
    assert engine.stats()["end_contract"] == 1


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_pins_last_as_long_as_they_were_made_for(make_engine: Engines, text: Text) -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    pinned = engine.prefill(text(20 * PAGE_SIZE))
    pin = engine.pin(pinned.sequence, seconds=30)
    assert pin.length == 20 * PAGE_SIZE
    engine.release(pinned.sequence)
    for seed in range(1, 4):
        engine.release(engine.prefill(text(40 * PAGE_SIZE, seed=seed)).sequence)
    assert engine.stats()["pages_pinned"] == 20
    with pytest.raises(jaxkv.CapacityError, match="pages are needed"):
        engine.prefill(text((NUM_PAGES - 19) * PAGE_SIZE, seed=9))
    assert engine.prefill(text(20 * PAGE_SIZE)[:90]).reuse.matched == 89
    clock.now += 30
    assert engine.stats()["pages_pinned"] == 0
    engine.release(engine.prefill(text((NUM_PAGES - 3) * PAGE_SIZE, seed=9)).sequence)
    assert engine.prefill(text(90)).reuse.matched < 89
    other = engine.pin(text(20), domain="nobody")
    assert other.length == 0
    engine.unpin(other)
    for wrong in (0, -1, "1", True):
        with pytest.raises(jaxkv.ConfigError, match="seconds is"):
            engine.pin(text(20), seconds=wrong)  # type: ignore[arg-type]
    with pytest.raises(jaxkv.HandleError, match="pin is a int"):
        engine.unpin(3)  # type: ignore[arg-type]


def test_a_pool_is_asked_for_in_pages_or_in_bytes(make_engine: Engines) -> None:
    engine = make_engine(num_pages=None, capacity_bytes=9 * PAGE_BYTES + 5)
    assert engine.stats()["pages_total"] == 9
    assert engine.stats()["page_bytes"] == PAGE_BYTES
    half = make_engine(num_pages=None, capacity_bytes=9 * PAGE_BYTES, kv_dtype="bfloat16")
    assert half.stats()["pages_total"] == 18
    with pytest.raises(jaxkv.ConfigError, match="num_pages is 64 and capacity_bytes 99, expected one"):
        make_engine(capacity_bytes=99)
    for wrong, says in ((PAGE_BYTES - 1, f"at least {PAGE_BYTES} bytes"), (1.5, "whole number of bytes")):
        with pytest.raises(jaxkv.ConfigError, match=says):
            make_engine(num_pages=None, capacity_bytes=wrong)
    with pytest.raises(jaxkv.ConfigError, match="eviction is 'lru', expected a policy"):
        make_engine(eviction="lru")


def test_priorities_are_inherited_by_what_grows(make_engine: Engines, text: Text) -> None:
    engine = make_engine(eviction=jaxkv.Priority())
    dear = engine.prefill(text(80), priority=1).sequence
    grown = engine.extend(dear, text(80, seed=1)).sequence
    tokens = grown.tokens
    engine.release(dear)
    engine.release(grown)
    for seed in range(2, 6):
        engine.release(engine.prefill(text(30 * PAGE_SIZE, seed=seed)).sequence)
    assert engine.prefill(tokens).reuse.matched == 159


def test_fragmentation_and_lookups_are_counted(make_engine: Engines, text: Text) -> None:
    engine = make_engine()
    first = engine.prefill(text(PAGE_SIZE + 2))
    stats = engine.stats()
    assert stats["fragmentation"] == pytest.approx(1 - (PAGE_SIZE + 2) / (2 * PAGE_SIZE))
    engine.prefill(first.sequence.tokens)
    stats = engine.stats()
    assert (stats["lookups"], stats["end_absent"], stats["end_complete"]) == (2, 1, 1)
    assert (stats["lookup_tokens"], stats["hit_tokens"]) == (2 * PAGE_SIZE + 4, PAGE_SIZE + 2)
    engine.prefill(text(9), reuse=False)
    assert engine.stats()["lookups"] == 2
