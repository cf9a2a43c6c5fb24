"""Bills: hand-computed turns, and what must hold for any tariff."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.errors import ConfigError
from jaxkv.reuse.bill import Tariff, bill, bill_ledger
from jaxkv.reuse.ledger import Ledger

WRITES = Tariff(name="writes", read=0.1, write=1.25, output=5.0, minimum=1024, step=1, ttl=300.0)
STEPS = Tariff(name="steps", read=0.5, write=1.0, output=4.0, minimum=1024, step=128, ttl=600.0)


def test_a_cold_prompt_pays_for_writing() -> None:
    """2,000 tokens at 1.25, 100 generated at 5: 2,500 + 500."""
    found = bill(WRITES, prompt=2000, shared=0, generated=100)
    assert (found.read, found.written, found.plain) == (0, 2000, 0)
    assert found.cost == 3000
    assert found.uncached == 2500
    assert found.relative == 1.2


def test_an_appended_prompt_reads_its_past() -> None:
    """2,000 read at 0.1, 200 written at 1.25: 200 + 250."""
    found = bill(WRITES, prompt=2200, shared=2000)
    assert (found.read, found.written, found.plain) == (2000, 200, 0)
    assert found.cost == pytest.approx(450)


def test_an_edit_in_the_middle_reads_half_and_one_at_the_start_nothing() -> None:
    middle, start = (bill(WRITES, prompt=4000, shared=shared) for shared in (2000, 0))
    assert middle.cost == pytest.approx(2000 * 0.1 + 2000 * 1.25)
    assert start.cost == pytest.approx(4000 * 1.25)


def test_below_the_minimum_nothing_is_cached() -> None:
    for shared in (0, 1023):
        found = bill(WRITES, prompt=1023, shared=shared)
        assert (found.read, found.written, found.cost) == (0, 0, 1023)
    short = bill(WRITES, prompt=1500, shared=1000)
    assert (short.read, short.written) == (0, 1500), "the shared part is too short to be read"


def test_prefixes_end_on_steps() -> None:
    """1,300 shared are 10 steps of 128; 1,500 of the prompt are 11: 1,280 read, 128 written, 92 plain."""
    found = bill(STEPS, prompt=1500, shared=1300, generated=10)
    assert (found.read, found.written, found.plain) == (1280, 128, 92)
    assert found.cost == 640 + 128 + 92 + 40
    assert bill(STEPS, prompt=1024, shared=1024).read == 1024
    assert bill(STEPS, prompt=1151, shared=1151).read == 1024


def test_an_expired_prefix_is_written_again() -> None:
    assert bill(WRITES, prompt=2000, shared=2000, age=300.0).cost == pytest.approx(200)
    late = bill(WRITES, prompt=2000, shared=2000, age=300.5)
    assert (late.read, late.cost) == (0, 2500)


def test_a_ledger_is_priced_as_if_relocated_kv_were_read() -> None:
    ledger = Ledger(
        prompt=3000,
        matched=1000,
        relocated=1700,
        forwarded=200,
        dropped=100,
        forwarded_by_cause={"inserted": 200},
        flops_by_cause={"inserted": 1.0},
    )
    found = bill_ledger(WRITES, ledger)
    assert (found.read, found.written, found.plain) == (2700, 200, 0)
    assert found.cost == pytest.approx(270 + 250)


@given(
    st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 100), st.sampled_from([WRITES, STEPS]),
    st.floats(0, 1000),
)  # fmt: skip
def test_every_token_is_billed_once_and_more_shared_never_costs_more(
    a: int, b: int, generated: int, tariff: Tariff, age: float
) -> None:
    shared, prompt = sorted((a, b))
    found = bill(tariff, prompt=prompt, shared=shared, generated=generated, age=age)
    assert found.read + found.written + found.plain == prompt
    assert min(found.read, found.written, found.plain) >= 0
    assert found.read <= shared
    cold = bill(tariff, prompt=prompt, shared=0, generated=generated)
    assert found.cost <= cold.cost + 1e-9
    assert found.uncached == prompt + tariff.output * generated


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"read": -0.1}, "x.read is -0.1, expected a number of 0 or more"),
        ({"write": float("inf")}, "x.write is inf"),
        ({"output": "5"}, "x.output is '5'"),
        ({"minimum": 0}, "x.minimum is 0, expected a whole number of 1 or more"),
        ({"step": 1.5}, "x.step is 1.5"),
        ({"ttl": float("nan")}, "x.ttl is nan"),
    ],
)
def test_bad_tariffs_are_refused(changes: dict[str, Any], message: str) -> None:
    values = {"read": 0.1, "write": 1.0, "output": 4.0, "minimum": 1, "step": 1, "ttl": 1.0}
    with pytest.raises(ConfigError) as error:
        Tariff(name="x", **{**values, **changes})
    assert message in str(error.value)


@pytest.mark.parametrize("values", [{"shared": 11}, {"shared": -1}, {"generated": -1}, {"age": -1.0}])
def test_bad_turns_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected 0 to the prompt's 10"):
        bill(WRITES, **{"prompt": 10, "shared": 5, **values})
