"""What the loop refuses, in one sentence each, and how many programs it compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny import NUM_PAGES, PAGE_SIZE

import jaxkv
from jaxkv import (
    CapacityError,
    ConfigError,
    HandleError,
    ManualClock,
    Sampling,
    ServingConfig,
    TokenError,
    WallClock,
)

Engines = Callable[..., jaxkv.Engine]
Text = Callable[..., np.ndarray]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_running": 0}, "max_running is 0, expected a whole number of at least 1"),
        ({"max_running": 2.5}, "max_running is 2.5, expected a whole number"),
        ({"decode_steps": 33}, "decode_steps is 33, expected at most 32"),
        ({"decode_steps": True}, "decode_steps is True, expected a whole number"),
        ({"prefill_budget": -1}, "prefill_budget is -1, expected a whole number of at least 0"),
        ({"max_waiting": 0}, "max_waiting is 0, expected a whole number"),
        ({"patience": -1}, "patience is -1, expected a whole number of at least 0"),
        (
            {"admission": "reserved"},
            "admission is 'reserved', expected one of preempt, reserve; did you",
        ),
        ({"order": "fifo"}, "order is 'fifo', expected one of prefix, arrival"),
        ({"clock": 3}, "clock is a int, expected one with now() and wait_until()"),
    ],
)
def test_bad_limits_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServingConfig(**values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_budget_below_one_part_is_refused(make_engine: Engines) -> None:
    with pytest.raises(ConfigError, match="prefill_budget is 7, expected at least page_size 8"):
        make_engine(serving=ServingConfig(prefill_budget=7))
    config = ServingConfig(prefill_budget=31)
    with pytest.raises(ConfigError, match="prefill_budget is 31, expected at least chunk_size 32"):
        make_engine(serving=config, reuse_granularity="chunk")
    make_engine(serving=config)
    with pytest.raises(ConfigError, match="serving is a dict, expected"):
        make_engine(serving={})


def test_bad_requests_are_refused_and_leave_nothing(make_engine: Engines, text: Text) -> None:
    engine = make_engine(serving=ServingConfig(max_waiting=1, clock=ManualClock()))
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TokenError, "tokens are empty", {"tokens": []}),
        (TokenError, r"tokens\[0\] is 97", {"tokens": [97]}),
        (ConfigError, "max_tokens is 0, expected a whole number of at least 1", {"max_tokens": 0}),
        (ConfigError, "max_tokens is 1.5", {"max_tokens": 1.5}),
        (ConfigError, "sampling is a dict, expected jaxkv.Sampling", {"sampling": {}}),
        (ConfigError, "priority is 'high', expected a whole number", {"priority": "high"}),
        (ConfigError, "priority is True", {"priority": True}),
        (ConfigError, "arrival is nan, expected seconds", {"arrival": float("nan")}),
        (ConfigError, "arrival is 'now', expected seconds", {"arrival": "now"}),
        (CapacityError, "513 tokens, expected at most the model's 512", {"max_tokens": 503}),
    ]
    for kind, message, changes in cases:
        with pytest.raises(kind, match=message):
            engine.submit(**{"tokens": text(10), "max_tokens": 4, **changes})
    assert engine.run() == []
    engine.submit(text(3), max_tokens=1)
    with pytest.raises(CapacityError, match="1 requests are waiting, expected fewer than max_waiting 1"):
        engine.submit(text(3), max_tokens=1)
    with pytest.raises(HandleError, match="request is a int, expected what submit returned"):
        engine.cancel(3)  # type: ignore[arg-type]
    assert len(engine.run()) == 1


def test_what_can_never_fit_is_refused_at_once(make_engine: Engines, text: Text) -> None:
    engine = make_engine(num_pages=8)
    engine.submit(text(60), max_tokens=4)
    with pytest.raises(CapacityError, match="60 tokens and max_tokens 5 need 9 pages, expected at most"):
        engine.submit(text(60), max_tokens=5)


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(3.0)
    clock.advance(2.0)
    clock.wait_until(4.0)
    assert clock.now() == 5.0
    clock.wait_until(9.0)
    assert clock.now() == 9.0
    with pytest.raises(ConfigError, match="seconds is -1"):
        clock.advance(-1)
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    real = WallClock()
    real.wait_until(real.now() + 100.0)
    assert len(slept) == 1
    assert 99 < slept[0] <= 100
    skipping = WallClock(skip_idle=True)
    skipping.wait_until(1e6)
    assert skipping.now() >= 1e6
    skipping.wait_until(5.0)
    assert len(slept) == 1


def test_a_mixed_load_compiles_a_bounded_number_of_programs_and_its_repeat_none(
    make_engine: Engines, text: Text, compiled: list[str]
) -> None:
    """Batches of 1 to 4 rows, prompts of any length, limits from 1 to 40, preemption, sampling."""

    def load(seed: int) -> None:
        rng = np.random.default_rng(seed)
        clock = ManualClock()
        config = ServingConfig(max_running=4, prefill_budget=40, decode_steps=6, clock=clock)
        engine = make_engine(poison_free_pages=False, serving=config)
        engine.prefill(text((NUM_PAGES - 24) * PAGE_SIZE, seed=99), reuse=False)
        for _ in range(24):
            choice = Sampling(temperature=float(rng.integers(0, 2)), seed=int(rng.integers(9)))
            engine.submit(
                text(int(rng.integers(1, 120)), seed=int(rng.integers(3))),
                max_tokens=int(rng.integers(1, 40)),
                sampling=choice,
                arrival=float(rng.integers(0, 9)),
            )
        while not (done := engine.step()).idle:
            clock.advance(0.3)
        assert done.idle
        assert engine.stats()["shapes"] <= 3, "steps of 1, 16 and 32 tokens"

    load(0)
    # Three steps, three decode loops (1, 2 and 4 rows), and small programs around them.
    assert len(compiled) <= 30
    compiled.clear()
    load(1)
    load(2)
    assert compiled == [], "another load must not compile again"
