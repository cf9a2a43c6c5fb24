"""The contract: every field is part of identity, none can imitate another, bytes read back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.cache.contract import CacheContract, describe
from jaxkv.cache.domain import Domain, as_domain
from jaxkv.errors import ConfigError, ContractError, FormatError
from jaxkv.model.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    vocab_size=64,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=32,
    max_positions=128,
    rope=RopeConfig(rotary_dim=4),
)
BASE = CacheContract(
    weights_digest="w" * 64,
    architecture=describe(CONFIG),
    kv_dtype="float32",
    tokenizer_digest="t" * 64,
    template_digest="c" * 64,
    adapter_digest="a" * 64,
    scope="scope",
    tenant="alice",
    authorization="admin",
    instance="canary",
    salt="grain",
)
NAMES = [f.name for f in dataclasses.fields(CacheContract)]
NUMBERS = {"page_layout", "chunk_grid"}

texts = st.text(st.characters(exclude_categories=()), max_size=12)
contracts = st.builds(
    CacheContract,
    **{n: st.integers(1, 2**63 - 1) if n in NUMBERS else texts for n in NAMES},
)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_part_of_identity_and_is_named(name: str) -> None:
    """CASE 3."""
    other = dataclasses.replace(BASE, **{name: 77 if name in NUMBERS else "other"})
    assert other.digest() != BASE.digest()
    assert [found[0] for found in BASE.mismatch(other)] == [name]
    with pytest.raises(ContractError, match=f"contract field {name} is"):
        BASE.require(other)
    assert dataclasses.replace(other, **{name: getattr(BASE, name)}).digest() == BASE.digest()


def test_equal_contracts_agree() -> None:
    same = dataclasses.replace(BASE)
    assert same == BASE
    assert same.digest() == BASE.digest()
    assert len(BASE.digest()) == 32
    assert BASE.mismatch(same) == ()
    BASE.require(same)


def test_both_values_are_given_and_further_differences_counted() -> None:
    other = dataclasses.replace(BASE, kv_dtype="bfloat16", chunk_grid=256)
    assert BASE.mismatch(other) == (("kv_dtype", "float32", "bfloat16"), ("chunk_grid", 1, 256))
    with pytest.raises(
        ContractError, match=r"kv_dtype is 'bfloat16', expected 'float32' \(1 more field differs\)"
    ):
        BASE.require(other)


def test_another_rope_is_named_within_the_architecture() -> None:
    rope = dataclasses.replace(CONFIG.rope, theta=1e6)
    other = dataclasses.replace(
        BASE, architecture=describe(dataclasses.replace(CONFIG, rope=rope, num_heads=8))
    )
    assert BASE.mismatch(other) == (
        ("architecture.num_heads", 4, 8),
        ("architecture.rope.theta", 10_000.0, 1e6),
    )


def test_an_architecture_that_is_no_json_is_compared_whole() -> None:
    other = dataclasses.replace(BASE, architecture="[[[")
    assert BASE.mismatch(other) == (("architecture", BASE.architecture, "[[["),)


def test_whose_cache_it_is_stays_secret() -> None:
    other = dataclasses.replace(BASE, tenant="mallory", salt="pepper", authorization="root", instance="i7")
    with pytest.raises(ContractError) as error:
        BASE.require(other)
    for text in (str(error.value), str(BASE.mismatch(other)), repr(BASE)):
        assert not any(secret in text for secret in ("mallory", "pepper", "grain", "root", "i7"))


def test_adapter_and_tenant_and_salt_of_one_name_do_not_collide() -> None:
    """CASE 4."""
    names = ("adapter_digest", "scope", "tenant", "authorization", "instance", "salt")
    plain = dataclasses.replace(BASE, **dict.fromkeys(names, ""))
    digests = {dataclasses.replace(plain, **{name: "X"}).digest() for name in names}
    assert len(digests | {plain.digest()}) == 7


def test_a_salt_cannot_bring_the_bytes_of_other_fields() -> None:
    """CASE 4."""
    plain = dataclasses.replace(BASE, tenant="", authorization="", instance="", salt="bob")
    tail = plain.serialize()[BASE.serialize().index(b"tenant") :]
    crafted = dataclasses.replace(BASE, tenant=tail.decode("latin-1"), salt="")
    assert crafted.digest() != plain.digest()
    assert CacheContract.deserialize(crafted.serialize()) == crafted


@settings(max_examples=100, deadline=None)
@given(contracts, contracts)
def test_serialization_is_injective(one: CacheContract, two: CacheContract) -> None:
    assert CacheContract.deserialize(one.serialize()) == one
    assert (one.serialize() == two.serialize()) == (one == two)


@settings(max_examples=100, deadline=None)
@given(contracts, st.data())
def test_moving_text_from_one_field_to_the_next_is_seen(one: CacheContract, data) -> None:
    index = data.draw(st.integers(0, len(NAMES) - 2))
    left, right = NAMES[index : index + 2]
    if {left, right} & NUMBERS:
        return
    joined = getattr(one, left) + getattr(one, right)
    at = data.draw(st.integers(0, len(joined)))
    two = dataclasses.replace(one, **{left: joined[:at], right: joined[at:]})
    assert (one.digest() == two.digest()) == (one == two)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_another_contract(data) -> None:
    good = BASE.serialize()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = CacheContract.deserialize(bytes(bad))
    except FormatError:
        return
    assert read != BASE


def test_every_truncation_and_any_addition_is_refused() -> None:
    good = BASE.serialize()
    for n in range(len(good)):
        with pytest.raises(FormatError, match="contract"):
            CacheContract.deserialize(good[:n])
    with pytest.raises(FormatError, match="1 bytes behind its last field"):
        CacheContract.deserialize(good + b"\0")


@pytest.mark.parametrize("text", [b"+1", b"01", b"1_0", b" 1", b"-1", b"0", b"x", b"9" * 5000])
def test_numbers_have_one_form(text: bytes) -> None:
    good = BASE.serialize()
    old = b"i" + (1).to_bytes(8, "big") + b"1"
    bad = good.replace(old, b"i" + len(text).to_bytes(8, "big") + text, 1)
    assert bad != good
    with pytest.raises(FormatError, match="contract"):
        CacheContract.deserialize(bad)


@pytest.mark.parametrize(
    ("name", "value"),
    [("salt", b"bytes"), ("tenant", None), ("chunk_grid", 0), ("chunk_grid", True), ("salt", 3)],
)
def test_fields_have_one_type(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"contract field {name} is"):
        dataclasses.replace(BASE, **{name: value})


def test_architecture_text_does_not_depend_on_the_order_of_keys() -> None:
    again = ModelConfig.from_dict(dict(reversed(CONFIG.to_dict().items())))
    assert describe(again) == describe(CONFIG)
    assert describe(CONFIG).startswith('{"')
    assert " " not in describe(CONFIG)


def test_a_domain_takes_its_fields_of_the_contract_and_no_more() -> None:
    owner = Domain(tenant="t", authorization="a", instance="i", salt="s")
    mine = BASE.within(owner)
    assert mine.domain == owner
    assert [name for name, *_ in mine.mismatch(BASE)] == [
        "scope",
        "tenant",
        "authorization",
        "instance",
        "salt",
    ]
    assert mine.within(BASE.domain, scope=BASE.scope) == BASE
    assert as_domain("t") == Domain(tenant="t")
    assert as_domain(owner) is owner
    assert "secret" not in repr(Domain(tenant="t", authorization="secret", salt="secret"))


@pytest.mark.parametrize("wrong", [None, 3, b"t", ("t",)])
def test_a_domain_is_a_name_or_a_domain(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"domain is a \w+, expected a tenant's name"):
        as_domain(wrong)
    with pytest.raises(ConfigError, match=r"domain.salt is a \w+, expected text"):
        Domain(salt=wrong)
