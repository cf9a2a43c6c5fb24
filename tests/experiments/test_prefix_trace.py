"""Traces are deterministic and mean what their axes say; a replay saves what it says it saved."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import prefix_trace
from experiments.records import Record
from experiments.report.trace import answer, summarize
from experiments.subject import tiny_model
from experiments.trace_config import SMOKE, TraceConfig, defaults, resolve
from experiments.workloads.prefix_trace import make_trace, trace_digest
from jaxkv.errors import ConfigError
from jaxkv.serving.clock import ManualClock

pytestmark = pytest.mark.once

TOKENS = np.random.default_rng(1).integers(0, 200, 20_000).astype(np.int32)
# One pool size, so that few steps are compiled; too small for the whole trace.
SMALL: dict[str, Any] = {
    "smoke": True, "num_pages": (16,), "orders": ("poisson", "round_robin"), "requests": 10, "seed": 3,
}  # fmt: skip


def config(**values: Any) -> TraceConfig:
    return resolve(defaults(requests=60, question_tokens=10, **values))


def test_the_same_seed_gives_the_same_trace_and_another_another() -> None:
    first, again = (make_trace(config(), TOKENS, "poisson") for _ in range(2))
    assert trace_digest(first) == trace_digest(again)
    assert trace_digest(make_trace(config(seed=1), TOKENS, "poisson")) != trace_digest(first)
    assert [r.arrival for r in first] == sorted(r.arrival for r in first)
    gaps = np.diff([0.0, *(r.arrival for r in make_trace(config(rate=4.0), TOKENS, "poisson"))])
    assert 0.15 < gaps.mean() < 0.35


def test_prompts_share_what_their_system_and_template_say() -> None:
    trace = make_trace(config(), TOKENS, "poisson")
    heads = {(r.system, r.template): r.tokens[: 256 + 96].tobytes() for r in trace}
    assert len(heads) == len(set(heads.values())) <= 9
    for r in trace:
        assert r.tokens[: 256 + 96].tobytes() == heads[r.system, r.template]
    systems = {r.system: r.tokens[:256].tobytes() for r in trace}
    assert len(set(systems.values())) == len(systems) == 3
    assert {r.tenant for r in trace} == {"tenant-0", "tenant-1"}
    popular = Counter(r.system for r in trace)
    assert popular[0] > popular[2], "Zipf"


@pytest.mark.parametrize("order", ["poisson", "bursts", "round_robin"])
def test_an_order_deals_the_same_requests_and_times_out_anew(order: str) -> None:
    plain = make_trace(config(), TOKENS, "poisson")
    trace = make_trace(config(), TOKENS, order)
    assert {r.id: r.tokens.tobytes() for r in trace} == {r.id: r.tokens.tobytes() for r in plain}
    assert [r.arrival for r in trace] == [r.arrival for r in plain]
    # A follow-up holds the turn before it, and comes later.
    last: dict[int, Any] = {}
    for r in trace:
        if r.turn:
            earlier = last[r.conversation]
            assert r.turn == earlier.turn + 1
            np.testing.assert_array_equal(r.tokens[: len(earlier.tokens)], earlier.tokens)
            assert r.tenant == earlier.tenant
        last[r.conversation] = r
    assert max(r.turn for r in trace) >= 1
    groups = [(r.tenant, r.system, r.template) for r in trace]
    changes = sum(a != b for a, b in itertools.pairwise(groups))
    if order == "bursts":
        assert changes == len(set(groups)) - 1
    if order == "round_robin":
        assert set(groups[: len(set(groups))]) == set(groups)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"oders": "poisson"}, "config key 'oders' is unknown; did you mean 'orders'?"),
        ({"orders": "random"}, "config.orders holds 'random', expected one of poisson, bursts, round_robin"),
        (
            {"evictions": "lur"},
            "config.evictions holds 'lur', expected one of lru, lfu, cost_per_byte; did you",
        ),
        ({"schedules": ()}, "config.schedules is empty, expected at least one value"),
        ({"rate": 0.0}, "config.rate is 0.0, expected arrivals a second, more than 0"),
        ({"follow_ups": 1.5}, "config.follow_ups is 1.5, expected a share from 0 to 1"),
        ({"tenants": 0}, "config.tenants is 0, expected at least 1"),
        ({"page_size": 24}, "page_size is 24, expected one of"),
        ({"decode_steps": 64}, "decode_steps is 64, expected at most 32"),
        ({"prefill_budget": 8}, "prefill_budget is 8, expected at least page_size 16"),
        ({"name": "a/b"}, "config.name is 'a/b', expected a plain file name"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> prefix_trace.TraceResult:
    path = tmp_path_factory.mktemp("runs") / "trace"
    return prefix_trace.run(defaults(**SMALL), path, given=tuple(SMALL))


def records(path: Path) -> list[Record]:
    return [json.loads(line) for line in (path / "cases.jsonl").read_text().splitlines()]


def test_every_cell_is_replayed_with_reuse_and_without(replayed: prefix_trace.TraceResult) -> None:
    found = {(r["order"], r["policy"]): r for r in records(replayed.path)}
    assert (replayed.finished, replayed.failed) == (len(found), 0) == (4, 0)
    outputs = {r["id"]: r["output"] for r in found["poisson", "no_reuse"]["requests"]}
    for (order, arm), record in found.items():
        requests = record["requests"]
        assert record["case"] == f"{order}/16/lru/prefix"
        assert [r["id"] for r in requests] == [f"r{i:03}" for i in range(10)]
        for r in requests:
            assert r["generated_tokens"] == SMOKE["max_tokens"]
            assert 0 <= r["queue_seconds"] <= r["ttft"]
            if not r["preemptions"]:
                assert r["hit_tokens"] + r["computed_tokens"] == r["prompt_tokens"]
        assert (sum(r["hit_tokens"] for r in requests) > 0) == (arm == "reuse")
        assert (record["evicted_pages"] > 0) == (arm == "reuse"), "the pool does not hold the trace"
        # What is reused, evicted or served in another order changes no token.
        assert {r["id"]: r["output"] for r in requests} == outputs


def test_the_report_says_what_the_records_hold(replayed: prefix_trace.TraceResult) -> None:
    found = records(replayed.path)
    rows = summarize(found)
    page = (replayed.path / "report.html").read_text()
    with (replayed.path / "summary.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows) == 4
    for row, line, record in zip(rows, lines, found, strict=True):
        prompt = sum(r["prompt_tokens"] for r in record["requests"])
        assert row.hit_rate == pytest.approx(sum(r["hit_tokens"] for r in record["requests"]) / prompt)
        assert float(line["ttft_p95"]) == row.ttft_p95 >= row.ttft_p50
        assert row.same_output == row.requests == 10
        assert f"<td>{row.hit_rate:.1%}</td>" in page
    assert answer(rows, "tiny-random").startswith("Smoke run")
    assert "<svg" in page
    assert "--ink" in page, "the style is that of every report"
    assert {p.name for p in (replayed.path / "plots").iterdir()} >= {"ttft.png", "ttft.svg", "tokens.svg"}


def test_a_finished_trace_is_not_replayed_and_another_config_is_refused(
    replayed: prefix_trace.TraceResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefix_trace, "load_subject", lambda _: pytest.fail("the model was loaded again"))
    assert prefix_trace.run(defaults(**SMALL), replayed.path, given=tuple(SMALL)) == replayed
    assert "All replays are finished" in capsys.readouterr().err
    other = {**SMALL, "seed": 4}
    with pytest.raises(ConfigError, match="seed=3, this run has 4"):
        prefix_trace.run(defaults(**other), replayed.path, given=tuple(other))


def test_a_trace_that_does_not_fit_is_refused_before_it_runs(tmp_path: Path) -> None:
    values = {**SMALL, "num_pages": (4,)}
    with pytest.raises(ConfigError, match="num_pages holds 4, expected at least the"):
        prefix_trace.run(defaults(**values), tmp_path / "a", given=tuple(values))


def test_ctrl_c_keeps_finished_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replay: Callable[..., Any] = prefix_trace._replay

    def struck(*args: Any, reuse: bool) -> Any:
        if args[3].order == "round_robin":
            raise KeyboardInterrupt
        return replay(*args, reuse=reuse)

    values = {**SMALL, "requests": 3}
    with monkeypatch.context() as patch:
        patch.setattr(prefix_trace, "_replay", struck)
        with pytest.raises(KeyboardInterrupt):
            prefix_trace.run(defaults(**values), tmp_path / "a", given=tuple(values))
    assert "run the same command to resume" in capsys.readouterr().err
    kept = (tmp_path / "a" / "cases.jsonl").read_bytes()
    assert kept.count(b"\n") == 2
    assert prefix_trace.run(defaults(**values), tmp_path / "a", given=tuple(values)).finished == 4
    assert (tmp_path / "a" / "cases.jsonl").read_bytes().startswith(kept)


class Leaping(ManualClock):
    """A clock that stands still but for one look, at which every request has arrived."""

    def __init__(self, look: int) -> None:
        super().__init__()
        self._left = look

    def now(self) -> float:
        self._left -= 1
        if self._left == 0:
            self.advance(1000.0)
        return super().now()


def test_a_request_may_arrive_at_any_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = resolve(defaults(**SMALL, rate=1.0), tuple(SMALL))
    model = tiny_model()
    requests = [dataclasses.replace(r, arrival=5.0) for r in make_trace(trace, TOKENS % 256, "poisson")[:1]]
    for look in range(1, 9):
        monkeypatch.setattr(prefix_trace, "WallClock", lambda look=look, **_: Leaping(look))
        *_, record = prefix_trace._replay(
            trace, model, requests, prefix_trace.Cell("poisson", 16, "lru", "prefix"), reuse=False
        )
        assert [r["id"] for r in record["requests"]] == [requests[0].id], look
