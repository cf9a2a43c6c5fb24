"""The examples of the documentation run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxkv
from jaxkv import SCR, policy_from_name

PAGE = Path(__file__).parents[1] / "docs" / "policies.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that the page tells its reader to write."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 32, "adding a policy takes about thirty lines"
    (tmp_path / "line_policies.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    return importlib.import_module("line_policies")


def test_the_pages_policy_repairs_what_it_says(
    engine: jaxkv.Engine, text: Callable[..., np.ndarray], example: Any
) -> None:
    old = text(150)
    new = np.concatenate([old[:40], old[55:]]).astype(np.int32)
    policy = SCR(min_span=8, tail=0) | example.LineStarts(int(new[60]), k=2)
    result = engine.edit(engine.prefill(old).sequence, new, policy)
    breaks = np.flatnonzero(new == new[60])
    breaks = breaks[breaks >= 40]
    expected = {p + i for p in breaks for i in (1, 2) if p + i < len(new)}
    runs = [r for r in result.sequence.provenance if r.origin != "relocated"]
    computed = {p for r in runs for p in range(r.start, r.end)}
    assert expected <= computed
    by_cause = result.reuse.ledger.forwarded_by_cause
    assert by_cause["line_starts"] == len(expected)
    assert str(policy) == f"scr(min_span=8,tail=0)|line_starts({new[60]},2)"


def test_a_policy_of_ones_own_is_named_by_where_it_is_defined(example: Any) -> None:
    policy = policy_from_name("scr|line_policies:LineStarts(7,k=3)")
    assert policy == SCR() | example.LineStarts(7, 3)
    for bad, says in {
        "line_policies:Nothing": "can't be imported",
        "no_such_module:A": "can't be imported",
        "line_policies:np": "expected a policy's class",
        "line_policies:LineStarts(a=1)": "expected arguments: newline, k",
    }.items():
        with pytest.raises(jaxkv.ConfigError, match=says):
            policy_from_name(bad)


def test_every_policy_and_probe_of_the_package_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = "Exact SCR FirstK Sinks TopDeviation Dependents Erratum Budget Forget Drop NoRotation Composed"
    for name in [*names.split(), "Deviation", "Attention", "Encoded", "Trial"]:
        assert f"{name}(" in text
