"""Snapshots in saved caches and tiers: bit by bit what was saved, or not there at all."""

# ruff: noqa: F401, F811 - fixtures are imported

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recurrent_reference import hybrid_logits
from test_engine_persistence import biggest, flip, kill_savers, rewrite
from test_engine_tiers import CONTRACT
from test_hybrid_engine import EVERY, Make, hybrid, make
from tiny import PAGE_SIZE
from tolerances import tolerance

import jaxkv
from jaxkv.cache.entry import SavedState, make_entry, pack, unpack
from jaxkv.cache.tiers import HostTier, Tiers
from jaxkv.io import cache_files
from jaxkv.transfer import read_state


def contents(engine: jaxkv.Engine) -> dict[int, tuple[np.ndarray, ...]]:
    """Snapshots of one text by position, as bytes on the host."""
    states = engine._memory.states
    assert states is not None
    return {s.position: read_state(engine._memory.pages, s.slot) for s in states.snapshots._all.values()}


def same(a: dict[int, tuple[np.ndarray, ...]], b: dict[int, tuple[np.ndarray, ...]]) -> None:
    assert sorted(a) == sorted(b)
    for position, arrays in a.items():
        for one, two in zip(arrays, b[position], strict=True):
            assert one.dtype == two.dtype
            np.testing.assert_array_equal(one.view(np.uint8), two.view(np.uint8))


def bits(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.mark.parametrize("granularity", ["token", "chunk"])
def test_a_loaded_cache_answers_bit_by_bit_like_the_saved_one(
    make: Make, hybrid: jaxkv.Model, text: Any, tmp_path: Path, granularity: str
) -> None:
    engine, tokens = make(reuse_granularity=granularity), text(80)
    engine.prefill(tokens)
    asked = np.append(tokens, 5)
    warm = engine.prefill(asked)
    saved = engine.save_cache(tmp_path / "c")
    kept = engine.stats()["snapshots"]
    assert (saved.snapshots, saved.tokens) == (kept, engine.stats()["index_tokens"])
    other = make(reuse_granularity=granularity)
    loaded = other.load_cache(tmp_path / "c")
    assert (loaded.snapshots, loaded.tokens, loaded.left_out) == (kept, saved.tokens, {})
    same(contents(engine), contents(other))
    again = other.prefill(asked)
    assert again.reuse.matched == 80
    bits(again.logits, warm.logits)
    said = [e.generate(r.sequence, max_tokens=6, stop=()).tokens for e, r in ((engine, warm), (other, again))]
    np.testing.assert_array_equal(*said)
    expected = hybrid_logits(hybrid.params, hybrid.config, asked)[0][-1]
    np.testing.assert_allclose(again.logits, expected, atol=tolerance("logits"), rtol=0)
    assert other.load_cache(tmp_path / "c").snapshots == 0


def test_operators_come_back_and_compose_as_before(make: Make, text: Any, tmp_path: Path) -> None:
    """And a cache without them loads where they are kept: then there is nothing to compose with."""
    old = text(110)
    new = np.delete(old, slice(40, 50))
    policy = jaxkv.SCR(min_span=16, tail=6, states="compose")
    engine, plain = make(keep_operators=True), make()
    engine.release(engine.prefill(old).sequence)
    plain.release(plain.prefill(old).sequence)
    engine.save_cache(tmp_path / "operators")
    plain.save_cache(tmp_path / "plain")
    other = make(keep_operators=True)
    other.load_cache(tmp_path / "operators")
    same(contents(engine), contents(other))
    composed = [e.edit(e.prefill(old).sequence, new, policy) for e in (engine, other)]
    assert composed[1].reuse.relocated == 32
    bits(composed[0].logits, composed[1].logits)
    lacking = make(keep_operators=True)
    lacking.load_cache(tmp_path / "plain")
    assert lacking.edit(lacking.prefill(old).sequence, new, policy).reuse.relocated == 0
    without = make()
    without.load_cache(tmp_path / "operators")
    same({p: a[:2] for p, a in contents(engine).items() if p in (32, 64, 96)},
         {p: a for p, a in contents(without).items() if p in (32, 64, 96)})  # fmt: skip
    assert without.prefill(np.append(old, 1)).reuse.forwarded == 1


def test_what_fits_is_loaded_and_the_rest_is_counted(make: Make, text: Any, tmp_path: Path) -> None:
    engine = make()
    for seed in range(2):
        engine.release(engine.prefill(text(70, seed=seed)).sequence)
    saved = engine.save_cache(tmp_path / "c")
    assert (saved.entries, saved.snapshots) == (6, 6)  # behind 32, 64 and 70 tokens of each text
    few = make(num_states=4)
    loaded = few.load_cache(tmp_path / "c")
    assert (loaded.tokens, loaded.snapshots, loaded.snapshots_left_out) == (140, 4, 2)
    assert str(loaded) == "140 tokens loaded in 6 entries, 4 snapshots; 2 snapshots left out"
    newest = few.prefill(np.append(text(70, seed=1), 3))
    assert newest.reuse.matched == 70  # what was used last came first
    small = make(num_pages=9)
    loaded = small.load_cache(tmp_path / "c")
    assert loaded.tokens == 70
    assert (loaded.snapshots, sum(loaded.left_out.values())) == (3, 70)
    there = make()  # a text that is cached already, whose snapshots are not
    there.prefill(text(70, seed=1))
    states = there._memory.states
    assert states is not None
    states.snapshots.evict(99, jaxkv.LRU())
    assert there.load_cache(tmp_path / "c").snapshots == 5  # that of a live sequence stayed


@pytest.mark.parametrize("what", ["file", "state", "rows"])
def test_damaged_snapshots_are_refused_and_nothing_is_loaded(
    make: Make, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """CASE 40."""
    engine = make()
    engine.release(engine.prefill(text(40)).sequence)
    engine.save_cache(tmp_path / "c")
    read = cache_files.read_block

    def changed(*args: Any) -> Any:
        block = read(*args)
        block["state1"] = block["state1"].copy()
        block["state1"][-1].view(np.uint8).reshape(-1)[5] ^= 1
        return block

    if what == "file":
        flip(biggest(tmp_path / "c"))
    elif what == "rows":
        rewrite(tmp_path / "c", states=[[99, 32, 0, 1]])
    else:
        monkeypatch.setattr(cache_files, "read_block", changed)
    other = make()
    says = {"file": "is corrupt", "rows": "head is not readable", "state": "digest it claims"}[what]
    with pytest.raises(jaxkv.FormatError, match=says):
        other.load_cache(tmp_path / "c")
    stats = other.stats()
    assert stats["snapshots"] <= 1  # entries in front of the damaged one were whole
    assert stats["states_free"] == stats["states_total"] - stats["snapshots"]


@pytest.mark.slow
def test_killed_savers_of_a_hybrid_leave_a_cache_that_loads(make: Make, text: Any, tmp_path: Path) -> None:
    engine = make()
    for seed in range(4):
        engine.release(engine.prefill(text(60, seed=seed)).sequence)
    kill_savers(engine, make, tmp_path, 20, "hybrid")


# ---- tiers -------------------------------------------------------------------------------------


def crowd(engine: jaxkv.Engine, text: Any, domain: str = "crowd") -> None:
    """Work that evicts everything else from a pool of 64 pages."""
    for seed in range(60, 63):
        engine.release(engine.prefill(text(40 * PAGE_SIZE, seed=seed), domain=domain).sequence)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_entry_comes_back_from_a_tier_with_its_snapshots(
    make: Make, text: Any, tmp_path: Path, tier: str
) -> None:
    options: dict[str, Any] = {"host_tier_bytes": 2**26} if tier == "host" else {"disk_tier": tmp_path}
    engine = make(reuse_granularity="chunk", num_states=32, **options)
    asked = np.append(text(96), 5)
    engine.release(engine.prefill(asked).sequence)
    warm = engine.prefill(asked)
    logits, before = np.asarray(warm.logits), contents(engine)
    engine.release(warm.sequence)
    crowd(engine, text)
    assert engine.stats()["tokens_spilled"] >= 96
    again = engine.prefill(asked)
    assert (again.reuse.matched, engine.stats()["tokens_restored"]) == (96, 96)
    bits(again.logits, logits)
    root = engine.contract.within(jaxkv.Domain(tenant="default")).digest()
    back = engine._memory.index.all_snapshots((root,), text(96))
    assert sorted(back) == [32, 64, 96]
    same({p: before[p] for p in back}, {p: read_state(engine._memory.pages, s) for p, s in back.items()})
    elsewhere = engine.prefill(asked, domain="other")
    assert elsewhere.reuse.matched == 0


def test_a_tier_keeps_the_snapshots_of_both_copies() -> None:
    kv = (np.ones((1, 4, 1, 2), np.float32),)
    text = np.arange(4, dtype=np.int32).tobytes()

    def entry(count: int, *positions: int) -> Any:
        states = tuple(SavedState(p, 0, (np.full((1, 2), p, np.float32),)) for p in positions)
        return make_entry(CONTRACT, text[: 4 * count], 0, (kv[0][:, :count],), states)

    tiers = Tiers(HostTier(10_000), None, 1)
    tiers.put(entry(4, 2))
    tiers.put(entry(3, 1, 2, 3))
    found = tiers.find(CONTRACT.digest(), text, 0)
    assert found is not None
    assert (found.end, [s.position for s in found.states]) == (4, [1, 2, 3])
    assert unpack(b"".join(bytes(part) for part in pack(found))).verify()
    for at, arrays in ((0, (np.zeros((1, 2), np.float32),)), (1, found.states[1].arrays)):
        bad = (*found.states[:at], SavedState(9, 0, arrays), *found.states[at + 1 :])
        assert not dataclasses.replace(found, states=bad).verify()


# ---- quotas ------------------------------------------------------------------------------------


def test_a_quota_counts_snapshots_and_keeps_the_deepest_that_fits(make: Make, text: Any) -> None:
    engine = make()
    stats = engine.stats()
    page, state = stats["page_bytes"], stats["state_bytes"]
    with pytest.raises(jaxkv.ConfigError, match=f"quota_bytes is {page + state - 1}, expected at least"):
        engine.set_quota("a", int(page + state - 1))
    engine.prefill(text(60, seed=9), domain="b")
    quota = int(8 * page + 2 * state)
    engine.set_quota("a", quota)
    engine.release(engine.prefill(text(100), domain="a").sequence)  # 13 pages and 4 snapshots
    mine = engine.stats(domain="a")
    assert 8 * page < mine["quota_bytes_used"] <= quota == mine["quota_bytes"]
    again = engine.prefill(text(100), domain="a")
    assert again.reuse.matched == 64  # the KV was cut to leave room for one snapshot, the deepest in front
    engine.release(again.sequence)
    for seed in range(3):
        engine.release(engine.prefill(text(50, seed=seed), domain="a").sequence)
        assert engine.stats(domain="a")["quota_bytes_used"] <= quota
    other = engine.prefill(np.append(text(60, seed=9), 1), domain="b")
    assert other.reuse.matched == 60
    engine.set_quota("a", int(page + state))
    assert engine.stats(domain="a")["quota_bytes_used"] <= page + state
    engine.set_quota("a", None)
    assert engine.stats(domain="a")["quota_bytes"] == -1
