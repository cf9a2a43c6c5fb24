"""Runs a serving-speed experiment: interleaved repeats, medians, ratios to limits and peers."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from experiments.fields import begin, refuse_other
from experiments.records import Record, RunDirectory
from experiments.speed import limits
from experiments.speed.config import SpeedConfig, resolve
from experiments.speed.measure import Compilations, Subject, start_up
from experiments.speed.peak import peak_bytes
from experiments.speed.peers import CONTEXT, Peer
from experiments.subject import load_subject
from experiments.workloads.corpus import encode, load_corpus
from jaxkv.errors import ConfigError
from jaxkv.io.models import Model
from jaxkv.reuse.ledger import attention_flops, token_flops

OURS = "jaxkv"
ROUNDS = "rounds.json"  # of a run directory
Times = dict[tuple[str, str], list[float]]  # (measurement, system) -> seconds of each repeat


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedResult:
    """Where the results are, and how many measurements there are."""

    path: Path
    finished: int
    failed: int


def run(
    config: Mapping[str, Any], workdir: str | Path | None = None, *, given: Collection[str] = ()
) -> SpeedResult:
    """Measures prompts, decoding, edits and start-up, prints a table, writes rows.

    A directory that holds a run is refused: times of two runs are not comparable.

    Raises:
      ConfigError: a bad value, or a directory that holds a run.
      FetchError, FormatError: the model can't be had.
    """
    speed = resolve(config, given)
    names = [name for name in speed.peers if name != "none"]
    if names and not Path(speed.peer_gguf).is_file():
        raise ConfigError(f"config.peer_gguf is '{speed.peer_gguf}', expected the GGUF file that peers load")
    path = speed.directory(workdir)
    out, progress = Console(), Console(stderr=True)
    if not out.is_terminal:
        out.width = max(out.width, 120)  # or names and figures are cut to fit 80 columns
    with RunDirectory(path) as directory:
        refuse_other(directory, speed)
        if directory.records():
            raise ConfigError(f"workdir '{path}' holds a run already, expected a new directory")
        compiled = Compilations()
        model = load_subject(speed)
        corpus = load_corpus(speed.corpus)
        tokens = encode(corpus, model)
        subject = Subject(model, speed, tokens)
        document = begin(directory, speed, corpus, len(tokens), model)
        peers = _start(names, speed, progress)
        try:
            rates = _rates(model, speed)
            times, forwarded = _measure(speed, subject, peers, progress, path / ROUNDS)
            peaks = {peer.name: peer.close() for peer in peers}
        finally:
            for peer in peers:
                peer.kill()
        rows = list(_rows(speed, model, times, forwarded, rates, subject))
        for row in rows:
            directory.append(row)
        start = {}
        try:
            start = start_up(speed) if speed.start_up else {}
        except RuntimeError as error:
            progress.print(f"Left out: {error}", highlight=False, soft_wrap=True)
        facts = {
            "rates": rates,
            "start_up": start,
            "compiled": dict(compiled.totals),
            "bytes": _bytes(model, subject),
            "peak_bytes": {OURS: peak_bytes(), **peaks},
            "peer_versions": {peer.name: peer.version for peer in peers},
        }
        directory.write_config({**document, **facts})
        _print(rows, facts, out)
        out.print(f"Run directory: {path}", highlight=False, soft_wrap=True)
        return SpeedResult(path=path, finished=len(rows), failed=0)


def _start(names: list[str], config: SpeedConfig, console: Console) -> list[Peer]:
    peers = []
    for name in names:
        with console.status(f"Starting {name}"):
            try:
                peers.append(Peer(name, str(Path(config.peer_gguf).absolute()), config.peer_python))
            except (RuntimeError, OSError) as error:
                console.print(f"Left out: {error}", highlight=False, soft_wrap=True)
    return peers


def _rates(model: Model, config: SpeedConfig) -> dict[str, float]:
    c, rows = model.config, min(config.chunk_size, max(config.prefill))
    return {
        "matmul_flops": limits.matmul_rate(rows, c.embed_dim, c.mlp_dim, config.dtype, config.repeats + 2),
        "row_bytes": limits.read_rate(c.embed_dim, c.mlp_dim, config.repeats + 2),
        "copy_bytes": limits.copy_rate(config.repeats + 2),
    }


def _measure(
    config: SpeedConfig, subject: Subject, peers: list[Peer], console: Console, kept_at: Path
) -> tuple[Times, dict[str, int]]:
    """Times of all rounds; what is finished of them is in a file, should the run be broken off."""
    times: Times = defaultdict(list)
    forwarded: dict[str, int] = {}
    for repeat in range(-1, config.repeats):  # the first one compiles
        kept = repeat >= 0
        console.print(f"Round {repeat + 1} of {config.repeats}, {'timed' if kept else 'compiles'}")

        def note(what: str, system: str, seconds: float, kept: bool = kept) -> None:
            if kept:
                times[what, system].append(seconds)

        for n in config.prefill:
            note(f"prefill {n}", OURS, subject.prefill(n))
            for peer in peers if n <= CONTEXT - 64 else ():
                note(f"prefill {n}", peer.name, peer.ask(prefill=n))
        for context in config.contexts:
            for batch in config.batches:
                what = f"decode at {context}, batch {batch}"
                note(what, OURS, subject.decode(context, batch))
                for peer in peers if batch == 1 else ():
                    note(what, peer.name, peer.ask(context=context, decode=config.decode_tokens))
        for policy, (seconds, count) in subject.edits(config.policies).items():
            note(f"edit, {policy}", OURS, seconds)
            forwarded[policy] = count
        finished = [{"what": what, "system": system, "seconds": s} for (what, system), s in times.items()]
        kept_at.write_text(json.dumps(finished, indent=1))
    return times, forwarded


def _rows(
    config: SpeedConfig,
    model: Model,
    times: Times,
    forwarded: dict[str, int],
    rates: dict[str, float],
    subject: Subject,
) -> Iterator[Record]:
    body, attention = token_flops(model.config), attention_flops(model.config)
    weights = _weight_bytes(model)
    kv = subject.page_bytes // config.page_size
    ours = {what: statistics.median(all_) for (what, system), all_ in times.items() if system == OURS}
    for (what, system), repeats in times.items():
        seconds = statistics.median(repeats)
        row: Record = {
            "case": what,
            "policy": system,
            "status": "ok",
            "seconds": repeats,
            "median_seconds": seconds,
            "against_jaxkv": seconds / ours[what],
        }
        kind, *rest = what.replace(",", "").split()
        if kind == "prefill":
            n = int(rest[0])
            row["tokens_per_second"] = n / seconds
            if system == OURS:
                flops = body * n + attention * n * (n + 1) / 2
                row["of_limit"] = flops / seconds / rates["matmul_flops"]
        elif kind == "decode":
            context, batch = int(rest[1]), int(rest[3])
            row["tokens_per_second"] = batch * config.decode_tokens / seconds
            if system == OURS:
                moved = config.decode_tokens * (weights + batch * kv * (context + config.decode_tokens / 2))
                row["of_limit"] = moved / seconds / rates["row_bytes"]
        else:
            policy = what.removeprefix("edit, ")
            row["forwarded"] = forwarded[policy]
            row["faster_than_exact"] = ours[f"edit, {config.policies[0]}"] / seconds
        yield row


def _weight_bytes(model: Model) -> int:
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(model.params))


def _bytes(model: Model, subject: Subject) -> dict[str, int]:
    """Bytes of arrays that this process holds, by what they are; each is there once."""
    held = sum(array.nbytes for array in jax.live_arrays())
    weights = _weight_bytes(model)
    pages = subject.engine.stats()["pages_total"] * subject.page_bytes
    return {"weights": weights, "pages": pages, "all live arrays": held}


def _print(rows: list[Record], facts: dict[str, Any], out: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("measurement", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for name in ("median s", "tokens/s", "of limit", "time / jaxkv", "vs exact"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["case"],
            row["policy"],
            f"{row['median_seconds']:.3f}",
            f"{row['tokens_per_second']:,.1f}" if "tokens_per_second" in row else "",
            f"{row['of_limit']:.0%}" if "of_limit" in row else "",
            f"{row['against_jaxkv']:.2f}",
            f"{row['faster_than_exact']:.1f}×" if "faster_than_exact" in row else "",
        )
    table.caption = (
        "of limit: prefill against the matrix product's FLOP/s, decode against the bytes/s of one row."
    )
    table.caption_justify = "left"
    out.print(table)
    rates, held = facts["rates"], facts["bytes"]
    out.print(
        f"Matrix product {rates['matmul_flops'] / 1e9:,.0f} GFLOP/s, one row × weights "
        f"{rates['row_bytes'] / 1e9:.1f} GB/s, copy {rates['copy_bytes'] / 1e9:.1f} GB/s. "
        f"Weights {held['weights'] / 2**20:,.0f} MiB, pages {held['pages'] / 2**20:,.0f} MiB, all arrays "
        f"{held['all live arrays'] / 2**20:,.0f} MiB. Compiled {facts['compiled'].get('count', 0)} "
        f"programs in {facts['compiled'].get('milliseconds', 0) / 1000:.0f} s.",
        highlight=False,
    )
    for name, peak in facts["peak_bytes"].items():
        out.print(f"Peak memory of {name}: {peak / 2**20:,.0f} MiB.", highlight=False)
    start = facts["start_up"]
    if start:
        for which in ("first", "second"):
            stages = ", ".join(f"{name} {s:.1f} s" for name, s in start[which].items())
            out.print(f"Fresh process, the {which}: {stages}.", highlight=False)
        out.print(
            f"Loading raised its peak by {start['load_peak'] / 2**20:,.0f} MiB, "
            f"{start['load_peak'] / start['weights']:.2f} times the weights.",
            highlight=False,
        )
