"""Tiers behind the pool: what is evicted comes back, verified, to its own domain, and equal bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge import ATOL
from reference import Decoder
from tiny import CHUNK, PAGE_SIZE

import jaxkv
from jaxkv import Cause, Domain
from jaxkv.cache.contract import CacheContract
from jaxkv.cache.entry import make_entry, pack, unpack
from jaxkv.cache.tiers import DiskTier, HostTier, Tiers, key_of
from jaxkv.errors import FormatError

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]
MB = 2**20


def same_bits(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


def crowd(engine: jaxkv.Engine, text: Text, domain: str = "crowd") -> None:
    """Work that evicts everything else from a pool of 64 pages."""
    for seed in range(60, 63):
        engine.release(engine.prefill(text(40 * PAGE_SIZE, seed=seed), domain=domain).sequence)


def test_what_was_evicted_comes_back_bit_by_bit(make_engine: Engines, text: Text) -> None:
    engine = make_engine(reuse_granularity="chunk", host_tier_bytes=64 * MB)
    first, second = (np.concatenate([text(3 * CHUNK), text(CHUNK, seed=s), [7]]) for s in (1, 2))
    cold = {n: engine.prefill(t) for n, t in enumerate((first, second))}
    logits = {n: np.asarray(r.logits) for n, r in cold.items()}
    cold.clear()
    crowd(engine, text)
    stats = engine.stats()
    assert stats["tokens_spilled"] >= 5 * CHUNK
    assert stats["host_tier_bytes"] > 0
    for n, tokens in enumerate((first, second)):
        warm = engine.prefill(tokens)
        assert warm.reuse.matched == 4 * CHUNK
        same_bits(warm.logits, logits[n])
    assert engine.stats()["tokens_restored"] == 5 * CHUNK
    without = make_engine(reuse_granularity="chunk")
    without.release(without.prefill(first).sequence)
    crowd(without, text)
    end = without.prefill(first).reuse
    assert (end.matched, end.match_end.limiting) == (0, Cause.EVICTED)


def test_domains_and_salts_keep_apart_in_every_tier(make_engine: Engines, text: Text, tmp_path: Path) -> None:
    """CASE 6, paired with a hit of the domain itself."""
    mine = Domain(tenant="t", salt="s")
    for tiers in ({"host_tier_bytes": 64 * MB}, {"disk_tier": tmp_path}):
        engine = make_engine(**tiers)
        engine.release(engine.prefill(text(60), domain=mine).sequence)
        crowd(engine, text)
        assert engine.stats()["tokens_spilled"] > 0
        before = engine.stats()["entries_restored"]
        for other in ("t", Domain(tenant="t", salt="S"), Domain(salt="s")):
            assert engine.prefill(text(60), domain=other).reuse.matched == 0
        assert engine.stats()["entries_restored"] == before
        assert engine.prefill(text(60), domain=mine).reuse.matched == 59
        engine.forget_domain(mine)
        crowd(engine, text)
        assert engine.prefill(text(60), domain=mine).reuse.matched == 0


def test_the_disk_tier_outlives_the_engine_and_takes_what_the_host_gives_up(
    make_engine: Engines, decoder: Decoder, text: Text, tmp_path: Path
) -> None:
    engine = make_engine(host_tier_bytes=200_000, disk_tier=tmp_path / "d")
    engine.release(engine.prefill(text(100)).sequence)
    crowd(engine, text)
    crowd(engine, text, "others")
    assert engine.stats()["disk_tier_bytes"] > 0
    assert engine.stats()["host_tier_bytes"] <= 200_000
    other = make_engine(disk_tier=tmp_path / "d")
    result = other.prefill(np.concatenate([text(100), [5]]))
    assert result.reuse.matched == 100
    np.testing.assert_allclose(result.logits, decoder.logits([*text(100), 5])[-1], atol=ATOL)
    assert (tmp_path / "d").stat().st_mode & 0o077 == 0
    changed = make_engine(disk_tier=tmp_path / "d", adapter_digest="a")
    assert changed.prefill(text(100)).reuse.matched == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone", "other"])
def test_damaged_files_are_never_used_and_removed(
    make_engine: Engines, decoder: Decoder, text: Text, tmp_path: Path, damage: str
) -> None:
    """CASE 40."""
    engine = make_engine(disk_tier=tmp_path)
    engine.release(engine.prefill(text(60)).sequence)
    crowd(engine, text)
    files = sorted(tmp_path.glob("*.kv"))
    contents = [file.read_bytes() for file in files]
    assert len(files) > 1
    for number, file in enumerate(files):
        data = bytearray(contents[number])
        if damage == "flip":
            data[-9] ^= 1
        elif damage == "other":
            data = bytearray(contents[number - 1])
        file.write_bytes(b"" if damage == "empty" else data[: -1 if damage == "cut" else None])
        if damage == "gone":
            file.unlink()
    result = engine.prefill(text(60))
    assert result.reuse.matched == 0
    np.testing.assert_allclose(result.logits, decoder.logits(text(60))[-1], atol=ATOL)
    assert engine.stats()["entries_refused"] == (0 if damage == "gone" else 1)
    engine.check()


def test_host_memory_that_changed_is_refused(make_engine: Engines, text: Text) -> None:
    engine = make_engine(host_tier_bytes=64 * MB)
    engine.release(engine.prefill(text(60)).sequence)
    crowd(engine, text)
    tiers = engine._memory.tiers
    assert tiers is not None
    assert tiers.host is not None
    for entry in tiers.host.entries():
        entry.kv[0].flags.writeable = True
        entry.kv[0].view(np.uint8).reshape(-1)[3] ^= 1
    assert engine.prefill(text(60)).reuse.matched == 0
    assert engine.stats()["entries_refused"] == 1


def test_quotas_hold_in_each_tier(make_engine: Engines, text: Text, tmp_path: Path) -> None:
    engine = make_engine(host_tier_bytes=64 * MB, disk_tier=tmp_path)
    page = int(engine.stats()["page_bytes"])
    quota, tiers = 12 * page, engine._memory.tiers
    assert tiers is not None
    assert tiers.host is not None
    assert tiers.disk is not None
    engine.set_quota("a", quota)
    engine.release(engine.prefill(text(80, seed=9), domain="b").sequence)
    for seed in range(5):
        engine.release(engine.prefill(text(60, seed=seed), domain="a").sequence)
    crowd(engine, text)
    a, b = (engine.contract.within(Domain(tenant=name)).digest() for name in "ab")
    for tier in (tiers.host, tiers.disk):
        assert 0 < tier.shares.payload(a) <= quota
    assert tiers.host.shares.payload(b) == 10 * page
    hits = [engine.prefill(text(60, seed=seed), domain="a").reuse.matched for seed in (4, 3)]
    assert hits == [59, 59]  # the newest: one in the pool's share, what it displaced in the tiers
    engine.set_quota("a", 6 * page)
    for tier in (tiers.host, tiers.disk):
        assert tier.shares.payload(a) <= 6 * page
    assert engine.prefill(text(80, seed=9), domain="b").reuse.matched == 79


def test_a_match_says_that_the_pool_had_no_page_for_the_rest(make_engine: Engines, text: Text) -> None:
    engine = make_engine(host_tier_bytes=64 * MB)
    engine.release(engine.prefill(text(80)).sequence)
    crowd(engine, text)
    held = engine.prefill(text(55 * PAGE_SIZE, seed=9)).sequence
    engine.pin(held)
    refused = engine.prefill(text(80)[:20])
    assert refused.reuse.matched == 0
    assert refused.reuse.match_end.cause is Cause.PINNED
    assert "pinned or in use" in str(refused.reuse.match_end)


def test_tiers_are_checked(make_engine: Engines, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for options, says in (
        ({"host_tier_bytes": -1}, "host_tier_bytes is -1"),
        ({"host_tier_bytes": 1.5}, "host_tier_bytes is 1.5"),
        ({"disk_tier": tmp_path / "file"}, "disk_tier is .*, expected a directory"),
        ({"disk_tier": 3}, "disk_tier is 3"),
        ({"disk_tier": tmp_path, "disk_tier_bytes": None}, "disk_tier_bytes is None"),
    ):
        with pytest.raises(jaxkv.ConfigError, match=says):
            make_engine(**options)


# ---- tiers alone -------------------------------------------------------------------------------

CONTRACT = CacheContract(weights_digest="w", architecture="{}", kv_dtype="float32")


def entry(tokens: list[int], start: int, fill: float = 0.0) -> Any:
    kv = (np.full((2, len(tokens) - start, 1, 4), fill, np.float32),)
    return make_entry(CONTRACT, np.array(tokens, np.int32).tobytes(), start, kv)


def test_the_host_tier_gives_up_what_was_used_longest_ago() -> None:
    size = entry([1, 2], 0).nbytes
    tier = HostTier(2 * size)
    keys = [bytes([i]) for i in range(3)]
    entries = [entry([i, 2], 0) for i in range(3)]
    assert tier.put(keys[0], entries[0]) == []
    assert tier.put(keys[1], entries[1]) == []
    assert tier.get(keys[0]) is entries[0]
    assert tier.put(keys[2], entries[2]) == [(keys[1], entries[1])]
    assert (tier.bytes, len(tier)) == (2 * size, 2)
    big = entry(list(range(50)), 0)
    assert tier.put(b"big", big) == [(b"big", big)]


def test_the_disk_tier_keeps_within_its_bytes(tmp_path: Path) -> None:
    size = sum(len(p) for p in pack(entry([1, 2], 0)))
    tier = DiskTier(tmp_path, 2 * size + 5)
    for i in range(4):
        tier.put(bytes([i]) * 32, entry([i, 2], 0))
    assert (len(tier), tier.bytes) == (2, 2 * size)
    assert len(list(tmp_path.glob("*.kv"))) == 2
    assert DiskTier(tmp_path, size).bytes == size
    (tmp_path / "noise.kv").write_text("not ours")
    assert len(DiskTier(tmp_path, 10 * size)) == 1
    assert (tmp_path / "noise.kv").exists()


def owned(name: str, tokens: list[int]) -> Any:
    kv = (np.zeros((2, len(tokens), 1, 4), np.float32),)
    return make_entry(CONTRACT.within(Domain(tenant=name)), np.array(tokens, np.int32).tobytes(), 0, kv)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_quota_displaces_the_domains_own_and_nobody_elses(tmp_path: Path, kind: str) -> None:
    """Paired: without the quota it is the other domain, whose entry is the oldest, that pays."""
    size = owned("a", [1, 2]).payload
    for quota in (2 * size, None):
        directory = tmp_path / str(quota)
        entries = {"b": owned("b", [1, 2])} | {f"a{i}": owned("a", [i, 2]) for i in range(4)}
        room = sum(sum(len(p) for p in pack(e)) for e in list(entries.values())[:3])
        tier = HostTier(3 * entries["b"].nbytes) if kind == "host" else DiskTier(directory, room)
        for name, each in entries.items():
            tier.put(name.encode().ljust(32), each, quota if name[0] == "a" else None)
        kept = [name for name in entries if tier.get(name.encode().ljust(32)) is not None]
        assert kept == (["a1", "a2", "a3"] if quota is None else ["b", "a2", "a3"])
        assert tier.shares.payload(entries["a0"].contract.digest()) == (3 if quota is None else 2) * size
        if kind == "disk":  # what counts is known again from the files' names
            again = DiskTier(directory, room)
            assert again.shares.payload(entries["a0"].contract.digest()) == tier.shares.payload(
                entries["a0"].contract.digest()
            )
            again.enforce(entries["a0"].contract.digest(), size)
            assert [n for n in entries if again.get(n.encode().ljust(32))][-1] == "a3"
        big = owned("a", [7] * 9)
        if quota is not None:
            tier.put(b"big".ljust(32), big, quota)
            assert tier.get(b"big".ljust(32)) is None


def test_a_key_is_only_an_index() -> None:
    """CASE 1: an entry filed under a wrong key is not used, whatever its tokens are."""
    tiers = Tiers(HostTier(MB), None, 1)
    root, wanted = CONTRACT.digest(), np.array([1, 2, 3, 4], np.int32).tobytes()
    assert tiers.host is not None
    for wrong in (entry([9, 2, 3, 4], 2), entry([1, 2, 3], 0)):
        tiers.host.put(key_of(root, wanted, 2, 1), wrong)
        assert tiers.find(root, wanted, 2) is None
    right = entry([1, 2, 3, 9], 2)
    tiers.put(right)
    assert tiers.find(root, wanted, 2) is right
    assert tiers.find(b"other root", wanted, 2) is None
    assert tiers.counts["refused"] == 2
    tiers.put(entry([1, 2, 3], 2))  # a beginning of what is there
    assert tiers.find(root, wanted, 2) is right


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_entries_read_back_and_damage_is_refused(data: Any) -> None:
    whole = b"".join(bytes(p) for p in pack(entry([1, 2, 3], 1, fill=2.5)))
    assert unpack(whole).verify()
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        bad = whole[:at]
    else:
        changed = bytearray(whole)
        changed[at] ^= 1 << data.draw(st.integers(0, 7))
        bad = bytes(changed)
    with pytest.raises(FormatError):
        unpack(bad)
