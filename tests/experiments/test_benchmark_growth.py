"""The growth benchmark measures every axis, and its slope is the exponent of a power law."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from experiments import benchmark_growth
from experiments.benchmark_growth import Point, curves, slope


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_slope_is_the_exponent(exponent: float) -> None:
    points = [Point("n", n, "x", 3.0 * n**exponent) for n in (1, 2, 4, 8, 16)]
    assert slope(points) == pytest.approx(exponent, abs=1e-9)
    assert math.isnan(slope(points[:1]))


@pytest.mark.slow
def test_every_axis_is_measured_written_and_drawn(tmp_path: Path) -> None:
    small = ["--contexts", "128,256", "--pools", "2,4", "--prompts", "256,512", "--branches", "1,2"]
    points = benchmark_growth.main([*small, "--repeat", "1", "--out", str(tmp_path)])
    found = curves(points)
    assert {axis for axis, _ in found} == {"context", "pool, MiB", "warm prompt", "tokens cached"}
    assert all(p.value > 0 for p in points)
    assert all(len(each) == 2 for each in found.values())
    with (tmp_path / "growth.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(points)
    assert (tmp_path / "growth.png").stat().st_size > 1000
    # What a step allocates does not depend on the pool.
    one, two = (p.value for p in found["pool, MiB", "temporary KiB of a step"])
    assert one == two
