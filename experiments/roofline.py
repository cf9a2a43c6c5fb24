"""The roofline sheet on paper: bytes, FLOPs and expected times of the kernels, for chips that are not here.

    python -m experiments.roofline                      # writes docs/roofline.md
    python -m experiments.roofline --compile=v5e,v6e,tpu7x    # with what these compilers say beside it

A kernel is expected to take the longer of two times: its bytes at the HBM's rate, its FLOPs at the matrix
units'. `--compile` runs the real compiler in a process of its own for each chip
(`experiments.kernels.compiled` says what that needs) and adds the `optimal_seconds` of its cost analysis,
which counts what the kernels declare.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from experiments.kernels.chips import CHIPS, MEASURED_COPY, Chip
from experiments.kernels.sweep import Moves
from pallas_kernels import shapes

PAGE = Path(__file__).parents[1] / "docs" / "roofline.md"
SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One line of the sheet."""

    kernel: str
    shape: str
    bytes: int  # that must pass the HBM
    flops: int  # that the mathematics needs
    rows: int  # query rows that share a read of the keys
    compiled: dict[str, Any]  # the case of `experiments.kernels.compiled`


def decode(heads: str, batch: int, context: int) -> Work:
    """One query a sequence: keys and values once, queries and answers in float32."""
    return _attention("decode", heads, batch, context, 1)


def prefill(heads: str, length: int, context: int) -> Work:
    """The last `length` tokens of a sequence."""
    return _attention("prefill", heads, 1, context, length)


def _attention(kernel: str, heads: str, batch: int, context: int, length: int) -> Work:
    case = shapes.benchmark_case(heads, batch, context, length=length, page_size=SIZE)
    queries = 2 * 4 * batch * length * case.kv_heads * case.group * case.head_dim
    at = f"T {length}, " if length > 1 else f"B {batch}, "
    return Work(
        kernel=kernel,
        shape=f"{heads}, {at}context {context:,}",
        bytes=case.kv_bytes + queries,
        flops=case.flops,
        rows=length * case.group,
        compiled={
            "kernel": kernel,
            "heads": heads,
            "batch": batch,
            "length": length,
            "context": context,
            "page_size": SIZE,
        },
    )


def relocate(heads: str, pages: int) -> Work:
    """Pages in and out."""
    kv_heads, _, head_dim = shapes.HEADS[heads]
    moves = Moves(
        name="", pages=pages, kv_heads=kv_heads, head_dim=head_dim, page_size=SIZE, dtype="bfloat16"
    )
    return Work(
        kernel="relocate",
        shape=f"{heads}, {pages:,} pages of {SIZE}",
        bytes=moves.kv_bytes,
        flops=0,  # on vector units, and few
        rows=0,
        compiled={"kernel": "relocate", "heads": heads, "pages": pages, "page_size": SIZE},
    )


def sheet() -> list[Work]:
    """The lines of the sheet."""
    work = [decode("smollm2", 8, 4096)]
    work += [decode("llama-8b", b, c) for b, c in ((1, 4096), (8, 4096), (64, 4096), (1, 131072), (8, 32768))]
    work += [decode("gemma", 8, 4096)]
    work += [prefill("llama-8b", t, c) for t, c in ((512, 4096), (2048, 2048), (2048, 32768))]
    return [*work, relocate("smollm2", 4096), relocate("llama-8b", 256), relocate("llama-8b", 4096)]


def expected(work: Work, chip: Chip) -> tuple[float, str]:
    """Seconds at the roofline, and which roof: "HBM" or "matrix units"."""
    memory, compute = work.bytes / chip.bandwidth, work.flops / chip.flops
    return max(memory, compute), "HBM" if memory >= compute else "matrix units"


def padded(work: Work, chip: Chip) -> float:
    """Seconds of the matrix units when decode's rows are padded to what an instruction holds."""
    if not work.rows:
        return 0.0
    return work.flops * max(1.0, chip.rows / work.rows) / chip.flops


def compiled(chip: str, lines: list[Work]) -> list[float | None]:
    """The compiler's `optimal_seconds` for every line; None where it says nothing."""
    cases = json.dumps([{**work.compiled, "implementation": "auto"} for work in lines])
    command = [sys.executable, "-m", "experiments.kernels.compiled", chip, cases]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if len(found) != len(lines):
        raise SystemExit(f"error: {chip} could not be compiled for: {run.stderr.strip().splitlines()[-1:]}")
    for work, line in zip(lines, found, strict=True):
        if "error" in line:
            print(f"{chip}, {work.kernel}, {work.shape}: {line['error']}", file=sys.stderr)
    return [line.get("optimal_seconds") for line in found]


def page(lines: list[Work], optimal: dict[str, list[float | None]], versions: str) -> str:
    """The sheet as Markdown."""
    text = [_INTRODUCTION, "## Chips", ""]
    text += [
        "| | bf16 TFLOP/s | HBM GB/s | FLOP a byte | VMEM or shared memory | source |",
        "|---|---|---|---|---|---|",
    ]
    for chip in CHIPS.values():
        fast = (
            f"{chip.fast_bytes >> 20} MiB" if chip.fast_bytes >= 1 << 20 else f"{chip.fast_bytes >> 10} KiB"
        )
        text.append(
            f"| {chip.name} | {chip.flops / 1e12:,.0f} | {chip.bandwidth / 1e9:,.0f} "
            f"| {chip.flops / chip.bandwidth:,.0f} | {fast} | {chip.source} |"
        )
    text += [
        "",
        "## Bytes and FLOPs",
        "",
        "| kernel | shape | MB | GFLOP | FLOP a byte |",
        "|---|---|---|---|---|",
    ]
    for work in lines:
        text.append(
            f"| {work.kernel} | {work.shape} | {work.bytes / 1e6:,.1f} | {work.flops / 1e9:,.1f} "
            f"| {work.flops / work.bytes:,.1f} |"
        )
    text += ["", "## Expected microseconds", "", _TIMES, ""]
    names = [chip.name.split(",")[0] for chip in CHIPS.values()]
    text += [f"| kernel | shape | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for i, work in enumerate(lines):
        cells = []
        for key, chip in CHIPS.items():
            seconds, roof = expected(work, chip)
            cell = f"{seconds * 1e6:,.1f}" + ("" if roof == "HBM" else " c")
            said = optimal.get(key, [None] * len(lines))[i]
            if said is not None:
                cell += f" ({said * 1e6:,.1f})" if said > 0 else " (-)"
            cells.append(cell)
        text.append(f"| {work.kernel} | {work.shape} | {' | '.join(cells)} |")
    text += ["", f"Compilers: {versions}." if optimal else "Compilers: not asked.", ""]
    return "\n".join([*text, *_hopper(lines)])


def _hopper(lines: list[Work]) -> list[str]:
    chip, copy = CHIPS["h200"], MEASURED_COPY["h200"]
    work = next(w for w in lines if w.kernel == "decode" and "B 8, context 32,768" in w.shape)
    at_copy = work.bytes / copy * 1e6
    text = (
        f"Of {work.shape}: {work.bytes / chip.bandwidth * 1e6:,.0f} µs at the data sheet's rate, "
        f"{at_copy:,.0f} µs at the {copy / 1e12:.1f} TB/s that a copy was measured to move. The goal of 80% "
        f"of the copy is {at_copy / 0.8:,.0f} µs. Its {work.rows} query rows are padded to {chip.rows}, so "
        f"the matrix units are busy for {padded(work, chip) * 1e6:,.0f} µs instead of "
        f"{work.flops / chip.flops * 1e6:,.0f}: hidden behind the reads only if reads and products overlap, "
        "which is what the ring of tiles and the second thread block of a multiprocessor are for."
    )
    return ["## Reading it for the Hopper decode kernel", "", *textwrap.wrap(text, 108), ""]


_INTRODUCTION = """# Roofline sheet

Made by `python -m experiments.roofline`; nothing here was measured on these chips. Bytes are those that must
pass the HBM once: keys and values of the context in bfloat16, queries and answers in float32; pages of 16
slots. FLOPs are those of scores and values that a query may see, a multiply-add counted as two. Heads:
smollm2 has 9 query and 3 KV heads of 64, llama-8b 32 and 8 of 128, gemma 8 and 4 of 256. Relocated tables
read the same bytes.
"""
_TIMES = """The longer of bytes over HBM rate and FLOPs over peak; `c` where the FLOPs are the longer. In
brackets: the compiler's own `optimal_seconds` for the compiled kernel, asked of the TPU compilers only. XLA
counts what a Pallas kernel declares, so a difference to our figure is in what is counted, not in how fast it
is. `-` where it adds up to less than nothing: XLA counts -1 second for an operation that it can't judge."""


def main() -> None:
    """Writes the sheet."""
    parser = argparse.ArgumentParser(description="Writes the roofline sheet.")
    parser.add_argument("--compile", default="", help=f"chips to compile for, of {', '.join(CHIPS)}")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    chips = [name for name in arguments.compile.split(",") if name]
    for name in chips:
        if name not in CHIPS:
            parser.error(f"--compile holds '{name}', expected some of {', '.join(CHIPS)}")
    lines = sheet()
    optimal = {chip: compiled(chip, lines) for chip in chips}
    from experiments.environment import version

    versions = f"jax {version('jax')}, libtpu {version('libtpu')}"
    arguments.output.write_text(page(lines, optimal, versions), encoding="utf-8")
    print(f"Wrote {arguments.output}")


if __name__ == "__main__":
    main()
