"""Writes docs/scale.md:

    python -m experiments.scale                            # plans, and what was compiled before
    python -m experiments.scale --compile="v5e-8;v6e-8"      # compiles what is not known yet
    python -m experiments.scale --simulate                 # simulates the routes anew

Results of compilers and simulations are kept beside this file, so that the page can be made without them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from experiments.environment import version
from experiments.scale.machines import MACHINES
from experiments.scale.page import key, render, rows
from experiments.scale.routing import Routed, Traffic, simulate
from jaxkv.serving.routing import ROUTES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"
KEPT = Path(__file__).with_name("results.json")
REPLICAS = (1, 2, 4, 8, 16, 32, 64)


def compile_for(machine: str, known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the compiler says of every line of a machine that is not known yet, as it says it."""
    lines = [row for row in rows() if row.machine.name == machine and row.layout.model > 1]
    topology = lines[0].machine.topology
    cases = [row.case for row in lines if key(topology, row.case) not in known]
    if not cases:
        return
    told = 0
    command = [sys.executable, "-m", "experiments.scale.compiled", topology, json.dumps(cases)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                case = json.loads(line)
                told += 1
                yield key(topology, case), case
    if process.returncode or told != len(cases):
        raise SystemExit(f"error: {machine} could not be compiled for; is libtpu installed?")


def simulate_all(traffic: Traffic, console: Console) -> list[Routed]:
    """Every route with every number of replicas."""
    total = sum(REPLICAS) * len(ROUTES) * traffic.requests
    found = []
    with Progress(console=console) as bar:
        task = bar.add_task("Routing", total=total)
        for count in REPLICAS:
            found += [simulate(traffic, count, route, advance=lambda: bar.advance(task)) for route in ROUTES]
    return found


def _keep(kept: dict[str, Any]) -> None:
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description="Writes docs/scale.md.")
    known = [machine.name for machine in MACHINES if machine.topology]
    parser.add_argument("--compile", default="", help=f"machines to compile for, of {'; '.join(known)}")
    parser.add_argument("--simulate", action="store_true", help="simulate the routes anew")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    console, traffic = Console(stderr=True), Traffic()
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {"programs": {}, "routed": []}
    for machine in [name for name in arguments.compile.split(";") if name]:
        if machine not in known:
            parser.error(f"--compile holds '{machine}', expected some of {'; '.join(known)}")
        kept["versions"] = f"jax {version('jax')}, libtpu {version('libtpu')}"
        for name, program in compile_for(machine, kept["programs"]):
            kept["programs"][name] = program
            _keep(kept)
            console.print(f"Compiled {name}", highlight=False)
    if arguments.simulate:
        kept["routed"] = [dataclasses.asdict(routed) for routed in simulate_all(traffic, console)]
        _keep(kept)
    routed = [Routed(**values) for values in kept["routed"]]
    text = render(kept["programs"], routed, traffic, kept.get("versions", "not asked"))
    arguments.output.write_text(text, encoding="utf-8")
    console.print(f"Wrote {arguments.output}", highlight=False)


if __name__ == "__main__":
    main()
