"""The ledger: every token is counted once, FLOPs equal a direct sum and the published numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.errors import ConfigError
from jaxkv.model.config import ModelConfig, RopeConfig
from jaxkv.reuse.ledger import (
    Ledger,
    attention_flops,
    make_ledger,
    prefix_reuse_flops,
    token_flops,
)

CONFIG = ModelConfig(
    vocab_size=64,
    num_layers=3,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=32,
    max_positions=4096,
    rope=RopeConfig(rotary_dim=4),
)
# Qwen3.6-27B, as EVALUATION gives it: 16 full-attention layers, 24 query heads of 256.
QWEN_TOKEN, QWEN_ATTENTION = 48.70e9, 16 * 24 * 256 * 4


def positions(start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions start..end-1, each attending everything before it and itself."""
    at = np.arange(start, end, dtype=np.int32)
    return at, at + 1


@pytest.mark.parametrize(("reused", "expected"), [(18_000, 1.41e14), (10_000, 5.74e14), (0, 10.81e14)])
def test_equation_9_gives_the_published_numbers(reused: int, expected: float) -> None:
    assert QWEN_ATTENTION == 393_216
    flops = prefix_reuse_flops(QWEN_TOKEN, QWEN_ATTENTION, prompt=20_000, reused=reused, generated=500)
    assert abs(flops - expected) <= 0.005e14


def test_flops_of_a_token_are_those_of_its_matrices() -> None:
    d, kv, mlp = 16, 2 * 4, 32
    matrices = 3 * (2 * d * d + 2 * d * kv + 3 * d * mlp)
    norms = 3 * 2 * d + d
    assert token_flops(CONFIG) == 2 * (matrices + norms)
    assert attention_flops(CONFIG) == 4 * 3 * 4 * 4


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 50))
def test_equation_9_is_a_direct_sum_but_for_half_a_key_a_token(a: int, b: int, g: int) -> None:
    reused, prompt = sorted((a, b))
    computed = range(reused, prompt + g)
    direct = sum(1000 + 7 * (i + 1) for i in computed)
    equation = prefix_reuse_flops(1000, 7, prompt=prompt, reused=reused, generated=g)
    assert direct - equation == 7 * len(computed) / 2


def test_a_ledger_of_a_prefix_is_equation_9_and_the_half_term() -> None:
    ledger = make_ledger(
        CONFIG,
        matched=30,
        relocated=0,
        causes={"inserted": positions(30, 100)},
        beyond_prompt={"generated": positions(100, 110)},
    )
    token, key = token_flops(CONFIG), attention_flops(CONFIG)
    equation = prefix_reuse_flops(token, key, prompt=100, reused=30, generated=10)
    assert ledger.flops == equation + key * (70 + 10) / 2
    assert (ledger.prompt, ledger.forwarded) == (100, 70)
    assert ledger.forwarded_by_cause == {"inserted": 70}
    assert set(ledger.flops_by_cause) == {"inserted", "generated"}


def test_an_edit_is_counted_by_cause() -> None:
    tail = np.array([90, 91], np.int32)
    ledger = make_ledger(
        CONFIG,
        matched=40,
        relocated=48,
        dropped=5,
        causes={"inserted": positions(40, 50), "tail": (tail, tail + 1), "probe": ([], [])},
        kv_dtype="bfloat16",
        moved=48,
    )
    assert ledger.prompt == 40 + 48 + 5 + 12
    assert ledger.forwarded_by_cause == {"inserted": 10, "tail": 2, "probe": 0}
    assert ledger.flops_by_cause["tail"] == 2 * token_flops(CONFIG) + attention_flops(CONFIG) * 183
    per_token = 2 * 3 * 2 * 4 * 2
    assert ledger.kv_bytes_moved == 48 * per_token
    assert ledger.kv_bytes_resident == 100 * per_token


def test_a_ledger_is_json() -> None:
    ledger = make_ledger(CONFIG, matched=3, relocated=1, causes={"inserted": positions(3, 9)})
    read = json.loads(json.dumps(ledger.to_dict()))
    assert read["flops"] == ledger.flops
    assert read["forwarded_by_cause"] == {"inserted": 6}


@pytest.mark.parametrize("field", ["prompt", "matched", "relocated", "forwarded", "dropped"])
def test_counts_that_do_not_add_up_are_refused(field: str) -> None:
    counts = {"prompt": 10, "matched": 4, "relocated": 3, "forwarded": 2, "dropped": 1}
    causes = {"forwarded_by_cause": {"inserted": 2}, "flops_by_cause": {"inserted": 1.0}}
    Ledger(**counts, **causes)
    for change in (1, -20):
        with pytest.raises(ConfigError, match="ledger\\."):
            Ledger(**{**counts, field: counts[field] + change}, **causes)
    with pytest.raises(ConfigError, match="sums to 1, expected forwarded 2"):
        Ledger(**counts, forwarded_by_cause={"inserted": 1}, flops_by_cause={})


@pytest.mark.parametrize(
    ("causes", "message"),
    [
        ({"a": ([1, 2], [2])}, "'a' has 2 positions and 1 key counts"),
        ({"a": ([1], [0])}, "'a' attends 0 keys"),
        ({"a": ([1], [2]), "b": ([1], [2])}, "repeat 1 positions"),
        ({"a": ([1, 1], [2, 2])}, "repeat 1 positions"),
    ],
)
def test_work_that_cannot_be_is_refused(causes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_ledger(CONFIG, matched=0, relocated=0, causes=causes)


def test_a_cause_is_in_the_prompt_or_beyond_it() -> None:
    work = {"a": ([1], [2])}
    with pytest.raises(ConfigError, match="'a' is both"):
        make_ledger(CONFIG, matched=0, relocated=0, causes=work, beyond_prompt=work)


@pytest.mark.parametrize(("reused", "generated"), [(-1, 0), (11, 0), (0, -1)])
def test_impossible_turns_are_refused(reused: int, generated: int) -> None:
    with pytest.raises(ConfigError, match=f"reused is {reused}"):
        prefix_reuse_flops(1, 1, prompt=10, reused=reused, generated=generated)
