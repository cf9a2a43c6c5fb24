"""The cost of edits: counted by two formulas, measured, priced, and on paper as published."""

from __future__ import annotations

import copy
import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import edit_cost
from experiments.cost_config import defaults, resolve
from experiments.edit_cost import EDITS, edited, paper_rows
from experiments.paper_model import QWEN36_27B
from jaxkv.errors import ConfigError
from jaxkv.reuse.bill import bill

pytestmark = pytest.mark.once

CONFIG = Path(__file__).parents[2] / "configs" / "edit_cost.py"


def shipped() -> Any:
    """The config file as the launcher loads it."""
    spec = importlib.util.spec_from_file_location("edit_cost_config", CONFIG)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def test_the_paper_model_has_the_published_figures() -> None:
    assert QWEN36_27B.c_attn == 393_216
    assert QWEN36_27B.kv_bytes_per_token == 65_536
    assert 32_768 * QWEN36_27B.kv_bytes_per_token == 2 * 2**30
    assert round(QWEN36_27B.state_bytes / 65_536) == 2_349


def test_on_paper_appends_and_edits_cost_what_is_published() -> None:
    """P=20,000, G=500; R=18,000, 10,000 and 0: 1.41e14, 5.74e14 and 10.81e14 FLOPs."""
    rows = {(r["edit"], r["policy"]): r for r in paper_rows(resolve(shipped()), QWEN36_27B)}
    append, start = rows["append", "exact"], rows["edit start", "exact"]
    assert (append["prompt"], append["matched"], append["generated"]) == (20_000, 18_000, 500)
    assert abs(append["eq9_flops"] - 1.41e14) <= 0.005e14
    assert abs(start["eq9_flops"] - 10.81e14) <= 0.005e14
    assert start["matched"] == 0
    middle = rows["edit middle", "exact"]
    assert middle["matched"] == 10_000
    assert abs(middle["eq9_flops"] - 5.74e14) <= 0.005e14
    for (_, policy), row in rows.items():
        assert row["matched"] + row["relocated"] + row["forwarded"] == row["prompt"] == 20_000
        assert row["kv_bytes"] == 20_500 * 65_536
        if policy == "exact":  # the equation is the integral of the sum: half a key a token
            computed = row["forwarded"] + row["generated"]
            assert row["ledger_flops"] - row["eq9_flops"] == pytest.approx(393_216 * computed / 2, rel=1e-6)
        else:
            assert row["eq9_flops"] is None
    assert rows["edit start", "first_k(32)"]["ledger_flops"] < 0.25 * start["ledger_flops"]


@pytest.mark.parametrize("edit", EDITS)
def test_edits_change_what_they_say(edit: str) -> None:
    text, other = np.arange(120, dtype=np.int32), np.arange(500, 620, dtype=np.int32)
    new = edited(text, other, edit, 100, 20)
    if edit == "append":
        np.testing.assert_array_equal(new, text)
        return
    assert len(new) == 100
    changed = np.flatnonzero(new != text[:100])
    start = 50 if edit == "edit middle" else 0
    np.testing.assert_array_equal(changed, np.arange(start, start + 20))
    np.testing.assert_array_equal(new[changed], other[:20])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> edit_cost.CostResult:
    config = shipped()
    config.smoke = True
    return edit_cost.run(config, tmp_path_factory.mktemp("runs") / "cost", given=("smoke",))


def test_every_edit_is_measured_under_every_policy(measured: edit_cost.CostResult) -> None:
    records = [json.loads(line) for line in (measured.path / "cases.jsonl").read_text().splitlines()]
    rows = {(r["edit"], r["policy"]): r for r in records}
    assert set(rows) == {(e, p) for e in EDITS for p in ("exact", "scr", "first_k(32)")}
    assert (measured.finished, measured.failed) == (9, 0)
    # Two layers, four heads of 16, embedding 32, MLP 64: counted by hand.
    token = 2 * (2 * (32 * 8 * 16 + 64 * 32 + 3 * 32 * 64 + 2 * 32) + 32)
    key = 4 * 2 * 4 * 16
    for (edit, policy), row in rows.items():
        assert row["matched"] + row["relocated"] + row["forwarded"] + row["dropped"] == row["prompt"]
        assert row["prompt"] == 368 if edit == "append" else 320
        assert row["generated"] == 4
        assert row["edit_ms"] > 0
        assert row["kv_bytes"] == (row["prompt"] + 4) * 2 * 2 * 2 * 16 * 4
        if policy == "exact":
            assert row["kind"] == "exact"
            first = row["matched"]
            least = {"append": 320, "edit middle": 160, "edit start": 0}[edit]
            assert least <= first <= least + 8, "some more where both texts happen to agree"
            keys = sum(range(first + 1, row["prompt"] + 4 + 1))
            assert row["ledger_flops"] == token * (row["forwarded"] + 4) + key * keys
            assert row["ledger_flops"] - row["eq9_flops"] == key * (row["forwarded"] + 4) / 2
        elif edit != "append":
            assert row["kind"] == "approximate"
            assert row["ledger_flops"] < rows[edit, "exact"]["ledger_flops"]


def test_the_report_shows_measured_paper_prices_and_their_sources(measured: edit_cost.CostResult) -> None:
    page = (measured.path / "report.html").read_text()
    for text in ("Measured, tiny-random", "On paper, Qwen3.6-27B", "65,536 bytes", "2 GiB", "1.41e+14",
                 "5.74e+14", "1.08e+15", "Prices", "not confirmed", "read there", "--ink"):  # fmt: skip
        assert text in page
    with (measured.path / "summary.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    tariffs = {t.tariff.name: t.tariff for t in resolve(shipped()).tariffs()}
    for line in lines:
        kept = int(line["matched"]) + int(line["relocated"])
        for name, tariff in tariffs.items():
            found = bill(tariff, prompt=int(line["prompt"]), shared=kept, generated=4, age=60.0)
            assert float(line[f"{name}.cost"]) == pytest.approx(found.cost)
    assert (measured.path / "plots" / "cost.png").stat().st_size > 10_000


def test_every_shipped_price_has_a_date_and_a_source() -> None:
    tariffs = resolve(shipped()).tariffs()
    assert {"anthropic 5 min", "openai, half", "google implicit"} <= {t.tariff.name for t in tariffs}
    for priced in tariffs:
        for price in priced.prices.values():
            assert price.date == "2026-11-30"
            assert len(price.source) > 10
        assert priced.tariff.read < 1 <= priced.tariff.write < priced.tariff.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("read"), "config.prices.a.read is missing, expected a value with date and source"),
        (lambda p: p.update(raed=p.pop("read")), "config.prices.a.raed is unknown; did you mean 'read'?"),
        (
            lambda p: p["ttl"].update(date="yesterday"),
            "prices.a.ttl.date is 'yesterday', expected YYYY",
        ),
        (lambda p: p["ttl"].update(source=" "), "prices.a.ttl.source is ' ', expected where it is from"),
        (lambda p: p["ttl"].update(confirmed="yes"), "prices.a.ttl.confirmed is 'yes', expected True or"),
        (lambda p: p.update(step=5), "prices.a.step is 5, expected the keys value, date, source, confirmed"),
        (lambda p: p["write"].update(value=-1.0), "a.write is -1.0, expected a number of 0 or more"),
    ],
)
def test_bad_prices_are_refused_by_name(change: Any, message: str) -> None:
    prices = {"a": copy.deepcopy(shipped().prices.to_dict()["anthropic 5 min"])}
    resolve(defaults(prices=prices))
    change(prices["a"])
    with pytest.raises(ConfigError) as error:
        resolve({"prices": prices})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"contxt": 5}, "config key 'contxt' is unknown; did you mean 'context'?"),
        ({"changed": 1001}, "config.changed is 1001, expected at most half of context 2000"),
        ({"policies": "scrr"}, "policy 'scrr' is unknown"),
        ({"repeats": 0}, "config.repeats is 0, expected at least 1"),
        ({"dtype": "f32"}, "config.dtype is 'f32', expected float32 or bfloat16"),
        ({"prices": 3}, "config.prices holds 3, expected a mapping"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(values)
    assert message in str(error.value)
