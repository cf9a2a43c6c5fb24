"""The plan beyond these machines: figures that can be checked by hand, and routes that tell apart."""

from __future__ import annotations

import json

import pytest

from experiments.scale.machines import LLAMA3_8B, MACHINES, QWEN36_27B, SMOLLM2
from experiments.scale.page import KEPT_FIELDS, key, render, rows
from experiments.scale.plan import Layout, Load, plan
from experiments.scale.routing import Routed, Traffic, simulate, trace_of
from jaxkv.serving.routing import ROUTES

pytestmark = pytest.mark.once


def test_models_are_as_large_as_they_are() -> None:
    one = Layout(data=1, model=1)
    sizes = {s.name: plan(s, one, Load(batch=1, context=1)).weights for s in (SMOLLM2, LLAMA3_8B, QWEN36_27B)}
    assert sizes["SmolLM2-135M"] == pytest.approx(2 * 134.5e6, rel=1e-3)
    assert sizes["Llama-3-8B"] == pytest.approx(2 * 8.03e9, rel=1e-3)
    embeddings = 2 * 2 * 248_320 * 5120
    assert sizes["Qwen3.6-27B"] - embeddings == pytest.approx(48.70e9, rel=1e-3)  # 2 bytes, 2 FLOPs each


def test_shares_of_a_device() -> None:
    whole = plan(LLAMA3_8B, Layout(data=1, model=1), Load(batch=8, context=4096))
    eighth = plan(LLAMA3_8B, Layout(data=1, model=8), Load(batch=8, context=4096))
    assert whole.kv == 8 * 4096 * 2 * 32 * 8 * 128 * 2 == 8 * eighth.kv
    norms = 65 * 4096 * 4
    assert (whole.weights - norms) == 8 * (eighth.weights - norms)
    assert not whole.collectives
    assert whole.link_seconds(MACHINES[0], Layout(data=1, model=1)) == 0
    # Sixteen devices do not divide eight KV heads: every device has all pages.
    assert plan(LLAMA3_8B, Layout(data=1, model=16), Load(batch=8, context=4096)).kv == whole.kv
    assert len(eighth.collectives) == 2 * 32 + 1 + 1
    reduced, gathered = 8 * 4096 * 4, 8 * 128_256 * 4
    # The embedding's rows are bfloat16, sums of products float32.
    sent = 64.5 * 2 * 7 / 8 * reduced + 7 / 8 * gathered
    assert eighth.link_bytes(Layout(data=1, model=8)) == pytest.approx(sent)
    machine = MACHINES[0]
    assert eighth.link_seconds(machine, Layout(data=1, model=8)) == pytest.approx(sent / 100e9)
    read = eighth.weights - 128_256 * 4096 * 2 / 8 + eighth.kv
    assert eighth.hbm_seconds(machine) == pytest.approx(read / machine.bandwidth)
    assert eighth.hop_seconds(machine, Layout(data=1, model=8)) == pytest.approx((65 * 2 + 1) * 7e-6)


def test_a_ring_over_two_hosts_is_as_slow_as_its_slowest_link() -> None:
    machine = next(m for m in MACHINES if m.name == "2 × 8 × H200")
    for size, rate in ((8, 450e9), (16, 50e9)):
        layout = Layout(data=16 // size, model=size)
        found = plan(SMOLLM2, layout, Load(batch=8, context=64))
        assert found.link_seconds(machine, layout) == pytest.approx(found.link_bytes(layout) / rate)


def test_routes_differ_as_they_should() -> None:
    traffic = Traffic(requests=60, num_pages=256, systems=8, templates=4)
    found = {route: simulate(traffic, 4, route) for route in ROUTES}
    assert found["longest_match"].hit_rate > found["random"].hit_rate + 0.2
    assert found["least_work"].hit_rate > found["random"].hit_rate + 0.2
    assert found["round_robin"].wait_mean > 5 * found["longest_match"].wait_mean
    assert found["least_work"].imbalance < found["longest_match"].imbalance
    assert all(0 <= r.hit_rate <= 1 <= r.imbalance and r.wait_mean <= r.wait_p95 for r in found.values())
    alone = {simulate(traffic, 1, route).hit_rate for route in ROUTES}
    assert len(alone) == 1, "one replica leaves no choice"


def test_what_is_found_alone_is_what_was_sent_before() -> None:
    """With one replica and room for everything, hits are the longest prefixes of earlier requests."""
    traffic = Traffic(requests=30, num_pages=4096, systems=3, templates=2, tenants=2)
    trace, _ = trace_of(traffic, 1)
    seen: dict[str, list[tuple[int, ...]]] = {}
    found = 0
    for request in trace:
        tokens = tuple(request.tokens.tolist())
        earlier = seen.setdefault(request.tenant, [])
        shared = [
            next(
                (i for i, (a, b) in enumerate(zip(e, tokens, strict=False)) if a != b),
                min(len(e), len(tokens)),
            )
            for e in earlier
        ]
        found += min(max(shared, default=0), len(tokens) - 1)
        earlier.append(tokens)
    total = sum(len(request.tokens) for request in trace)
    assert simulate(traffic, 1, "longest_match").hit_rate == pytest.approx(found / total, abs=1e-9)


def test_the_page_holds_every_line() -> None:
    lines = rows()
    assert {row.machine.name for row in lines} == {m.name for m in MACHINES}
    row = next(r for r in lines if r.machine.name == "v5e-8" and r.layout.model == 8)
    program = {"collectives": [["all-reduce", 8]], "arguments": 1e9, "in_place": 1e12, "temporary": 5e6}
    name = key(row.machine.topology, row.case)
    assert json.loads(json.dumps(row.case)) == row.case
    assert set(row.case) == set(KEPT_FIELDS)
    routed = [
        Routed(replicas=2, route=r, hit_rate=0.5, imbalance=1.2, wait_mean=0.1, wait_p95=0.2) for r in ROUTES
    ]
    text = render({name: program}, routed, Traffic(), "jax 1")
    assert text.count("\n| v5e-8 |") == sum(r.machine.name == "v5e-8" for r in lines)
    assert "| 1 all-reduce |" in text
    assert "least work 50.0%" in " ".join(text.split())
    failed = render({name: {"error": "no"}}, [], Traffic(), "jax 1")
    assert "not compiled: no" in failed
