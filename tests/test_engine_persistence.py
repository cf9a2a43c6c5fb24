"""Saved caches: what loads, what is left out, what is refused, and what a kill leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judge import ATOL
from reference import Decoder
from tiny import CHUNK, PAGE_SIZE, make_model, tiny_config

import jaxkv
from jaxkv import Domain, persistence
from jaxkv.io import cache_files
from jaxkv.io.checkpoint import json_digest

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]


def same_bits(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_loaded_cache_answers_bit_by_bit_like_the_saved_one(
    make_engine: Engines, text: Text, tmp_path: Path, kv_dtype: str
) -> None:
    def make() -> jaxkv.Engine:
        return make_engine(reuse_granularity="chunk", kv_dtype=kv_dtype)

    engine = make()
    tokens = np.concatenate([text(3 * CHUNK), text(CHUNK, seed=1)])
    engine.prefill(tokens)
    engine.prefill(np.concatenate([text(3 * CHUNK), text(CHUNK, seed=2)]))
    asked = np.concatenate([tokens, [5]])
    warm = engine.prefill(asked)
    saved = engine.save_cache(tmp_path / "c")
    assert (saved.tokens, saved.entries) == (5 * CHUNK, 3)
    other = make()
    loaded = other.load_cache(tmp_path / "c")
    assert (loaded.tokens, loaded.entries, loaded.left_out) == (saved.tokens, saved.entries, {})
    other.check()
    again = other.prefill(asked)
    assert again.reuse.matched == 4 * CHUNK
    same_bits(again.logits, warm.logits)


def test_page_size_and_pool_may_differ(
    make_engine: Engines, decoder: Decoder, text: Text, tmp_path: Path
) -> None:
    engine = make_engine()
    tokens = np.concatenate([text(45), text(30, seed=1)])
    engine.prefill(text(45))
    engine.prefill(tokens)
    engine.save_cache(tmp_path / "c")
    other = make_engine(page_size=16, num_pages=20)
    assert str(other.load_cache(tmp_path / "c")) == "75 tokens loaded in 2 entries"
    result = other.prefill(np.concatenate([tokens, [7]]))
    assert result.reuse.matched == 75
    np.testing.assert_allclose(result.logits, decoder.logits([*tokens, 7])[-1], atol=ATOL)


def test_domains_salts_and_declared_prefixes_come_back_as_they_were(
    make_engine: Engines, text: Text, tmp_path: Path
) -> None:
    """CASE 6."""
    engine = make_engine()
    salted = Domain(tenant="t", salt="s")
    engine.prefill(text(40), domain=salted)
    engine.publish_prefix(text(30, seed=1))
    engine.save_cache(tmp_path / "c")
    other = make_engine()
    other.load_cache(tmp_path / "c")
    for domain in ("t", Domain(tenant="t", salt="S"), Domain(salt="s"), "default"):
        assert other.prefill(text(40), domain=domain).reuse.matched == 0
    assert other.prefill(text(40), domain=salted).reuse.matched == 39
    assert other.prefill(text(30, seed=1), domain="anyone").reuse.matched == 29
    assert (tmp_path / "c").stat().st_mode & 0o077 == 0


def test_what_fits_is_loaded_most_valuable_first(make_engine: Engines, text: Text, tmp_path: Path) -> None:
    engine = make_engine()
    for seed in range(5):
        engine.release(engine.prefill(text(10 * PAGE_SIZE, seed=seed)).sequence)
    engine.prefill(text(10 * PAGE_SIZE, seed=0))  # used last
    engine.save_cache(tmp_path / "c")
    small = make_engine()
    held = small.prefill(text(39 * PAGE_SIZE, seed=99), domain="held").sequence
    loaded = small.load_cache(tmp_path / "c")
    assert loaded.tokens == 20 * PAGE_SIZE
    assert loaded.left_out == {persistence.NO_ROOM: 30 * PAGE_SIZE}
    assert str(loaded) == "160 tokens loaded in 2 entries; 240 tokens left out: no free pages"
    small.check()
    found = [small._memory.index.node_at(small.contract.within(Domain(tenant="default")).digest(),
                                         text(10 * PAGE_SIZE, seed=s)) for s in range(5)]  # fmt: skip
    assert [f is not None for f in found] == [True, False, False, False, True]
    # And the order of use is kept: what was worth less goes first.
    small.release(small.prefill(text(10 * PAGE_SIZE, seed=9)).sequence)
    assert len(held) == 39 * PAGE_SIZE
    assert small.prefill(text(10 * PAGE_SIZE)).reuse.matched == 79


def test_loading_adds_to_what_is_there_and_takes_nothing_from_it(
    make_engine: Engines, decoder: Decoder, text: Text, tmp_path: Path
) -> None:
    engine = make_engine()
    tokens = np.concatenate([text(50), text(30, seed=1)])
    engine.prefill(text(50))
    engine.prefill(tokens)
    engine.prefill(text(20, seed=2))
    engine.save_cache(tmp_path / "c")
    other = make_engine()
    other.prefill(np.concatenate([text(50)[:31], text(9, seed=3)]))
    other.prefill(text(20, seed=2))
    loaded = other.load_cache(tmp_path / "c")
    assert loaded.left_out == {persistence.CACHED: 20}
    other.check()
    assert other.load_cache(tmp_path / "c").left_out == {persistence.CACHED: 100}
    result = other.prefill(np.concatenate([tokens, [3]]))
    assert result.reuse.matched == 80
    np.testing.assert_allclose(result.logits, decoder.logits([*tokens, 3])[-1], atol=ATOL)
    assert other.prefill(np.concatenate([text(50)[:31], text(9, seed=3)])).reuse.matched == 39


def test_long_entries_are_saved_in_pieces(
    make_engine: Engines, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "BLOCK_BYTES", 40 * 512)  # 40 tokens
    engine = make_engine()
    engine.prefill(text(200))
    engine.prefill(np.concatenate([text(200), text(5, seed=1)]))
    assert engine.save_cache(tmp_path / "c").entries == 6
    other = make_engine()
    held = other.prefill(text(48 * PAGE_SIZE, seed=99), reuse=False).sequence
    loaded = other.load_cache(tmp_path / "c")
    assert (loaded.tokens, loaded.left_out) == (
        120,
        {persistence.NO_ROOM: 40, persistence.NO_PREFIX: 45},
    )
    assert len(held) == 48 * PAGE_SIZE
    assert other._memory.index.peek(
        other.contract.within(Domain(tenant="default")).digest(), text(200), limit=200
    )[0] == 120  # fmt: skip


def test_an_empty_cache_and_a_quota(make_engine: Engines, text: Text, tmp_path: Path) -> None:
    assert make_engine().save_cache(tmp_path / "e").entries == 0
    assert make_engine().load_cache(tmp_path / "e").entries == 0
    engine = make_engine()
    engine.prefill(text(60))
    engine.save_cache(tmp_path / "c")
    page = engine.stats()["page_bytes"]
    limited = make_engine(domain_quota_bytes=int(3 * page))
    assert limited.load_cache(tmp_path / "c").left_out == {persistence.QUOTA: 60}
    assert limited.stats(domain="default")["quota_pages_used"] <= 3


# ---- refused -----------------------------------------------------------------------------------


def head(path: Path) -> Path:
    return path / (path / "CURRENT").read_text() / "cache.json"


def rewrite(path: Path, **changes: Any) -> None:
    """Changes the head and makes its digest right again."""
    body = json.loads(head(path).read_text())
    body.pop("digest")
    body |= changes
    head(path).write_text(json.dumps({"digest": json_digest(body), **body}))


def biggest(path: Path) -> Path:
    return max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no pointer": (lambda p: (p / "CURRENT").unlink(), "CURRENT cannot be read"),
    "a pointer to elsewhere": (lambda p: (p / "CURRENT").write_text("../x"), "names no generation"),
    "a pointer to nothing": (lambda p: (p / "CURRENT").write_text("generation-x"), "cannot be read"),
    "a pointer of noise": (lambda p: (p / "CURRENT").write_bytes(b"\xff\xfe"), "CURRENT cannot be read"),
    "no head": (lambda p: head(p).unlink(), "cache.json cannot be read"),
    "half a head": (
        lambda p: head(p).write_bytes(head(p).read_bytes()[:99]), "cache.json is truncated or corrupt",
    ),
    "a flipped head": (lambda p: flip(head(p)), "cache.json"),
    "an older version": (lambda p: rewrite(p, format_version=0), "format_version is 0, expected 1"),
    "a flipped block": (lambda p: flip(biggest(p)), "is corrupt, expected SHA-256"),
    "half a block": (
        lambda p: biggest(p).write_bytes(biggest(p).read_bytes()[:-7]), "bytes, expected",
    ),
    "no block": (lambda p: biggest(p).unlink(), "cannot be read"),
    "other rows": (lambda p: rewrite(p, rows=[[0, 0]]), "its head is not readable"),
    "another entry's digest": (
        lambda p: rewrite(p, rows=[[0, 0, -1, 0, 60, 1, 0, "00" * 32]]), "does not have the digest it claims",
    ),
    "a contract cut short": (lambda p: rewrite(p, base="00"), "contract starts with"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(DAMAGE))
def test_a_damaged_cache_is_refused_with_the_reason_and_nothing_is_loaded(
    make_engine: Engines, text: Text, tmp_path: Path, name: str
) -> None:
    """CASE 40."""
    path = tmp_path / "c"
    engine = make_engine()
    engine.prefill(text(60))
    engine.save_cache(path)
    damage, says = DAMAGE[name]
    damage(path)
    other = make_engine()
    with pytest.raises(jaxkv.FormatError, match=says) as caught:
        other.load_cache(path)
    assert "\n" not in str(caught.value)
    assert other.stats()["pages_free"] == other.stats()["pages_total"]


def test_another_contract_is_refused_and_named(make_engine: Engines, text: Text, tmp_path: Path) -> None:
    """CASES 3, 40."""
    engine = make_engine()
    engine.prefill(text(60))
    engine.save_cache(tmp_path / "c")
    config = tiny_config(rope=jaxkv.RopeConfig(theta=500.0, rotary_dim=16))
    for other, field in (
        (make_engine(model=make_model(tiny_config(), seed=3)), "weights_digest"),
        (make_engine(model=make_model(config)), "architecture.rope.theta is 10000.0, expected 500.0"),
        (make_engine(kv_dtype="bfloat16"), "kv_dtype is 'float32', expected 'bfloat16'"),
        (make_engine(reuse_granularity="chunk"), "chunk_grid is 1, expected 32"),
        (make_engine(adapter_digest="a"), "adapter_digest is '', expected 'a'"),
    ):
        with pytest.raises(jaxkv.ContractError, match=field):
            other.load_cache(tmp_path / "c")
        assert other.stats()["index_tokens"] == 0


def test_places_that_hold_something_else_are_left_alone(
    make_engine: Engines, text: Text, tmp_path: Path
) -> None:
    (tmp_path / "photo.jpg").write_text("precious")
    engine = make_engine()
    engine.prefill(text(20))
    with pytest.raises(jaxkv.FormatError, match="exists and is not a saved cache"):
        engine.save_cache(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["photo.jpg"]
    with pytest.raises(jaxkv.FormatError, match="CURRENT cannot be read, expected a saved cache"):
        engine.load_cache(tmp_path)


def test_a_save_that_fails_leaves_the_old_cache(
    make_engine: Engines, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.prefill(text(60))
    engine.save_cache(tmp_path / "c")
    engine.prefill(text(60, seed=1))
    for name in ("write_block", "write_head", "fsync_tree"):
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise OSError("no space left")

            patch.setattr(cache_files, name, fail)
            with pytest.raises(OSError, match="no space left"):
                engine.save_cache(tmp_path / "c")
        assert len(list((tmp_path / "c").glob("generation-*"))) == 1
        assert make_engine().load_cache(tmp_path / "c").tokens == 60
    engine.save_cache(tmp_path / "c")
    assert make_engine().load_cache(tmp_path / "c").tokens == 120


def kill_savers(
    engine: jaxkv.Engine, load: Callable[[], jaxkv.Engine], root: Path, kills: int, *kind: str
) -> None:
    source, target = root / "source", root / "target"
    engine.save_cache(source)
    expected = engine.stats()["index_tokens"]
    shutil.copytree(source, target)
    rng = np.random.default_rng(kills)
    command = [sys.executable, str(Path(__file__).with_name("saver.py")), str(source), str(target), *kind]
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    for _ in range(kills):
        # A fresh process each time: a fork of one that has imported JAX may inherit a lock that is held.
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as saver:
            assert saver.stdout is not None
            assert saver.stdout.readline() == "saving\n"
            time.sleep(rng.uniform(0, 0.25))
            saver.kill()
        assert load().load_cache(target).tokens == expected
    engine.save_cache(target)
    assert len(list(target.glob("generation-*"))) == 1, "the next save removes what the dead left"


def make_full(make_engine: Engines, text: Text) -> jaxkv.Engine:
    engine = make_engine()
    for seed in range(6):
        engine.release(engine.prefill(text(60, seed=seed)).sequence)
    return engine


def test_a_saver_that_is_killed_leaves_a_cache_that_loads(
    make_engine: Engines, text: Text, tmp_path: Path
) -> None:
    """CASE 40, a few times; the slow tier does it 200 times."""
    kill_savers(make_full(make_engine, text), make_engine, tmp_path, 3)


@pytest.mark.slow
def test_two_hundred_killed_savers_leave_a_cache_that_loads(
    make_engine: Engines, text: Text, tmp_path: Path
) -> None:
    """CASE 40."""
    kill_savers(make_full(make_engine, text), make_engine, tmp_path, 200)
