"""Replays a trace through the serving loop, with the prefix index and without, in one process."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.fields import begin, refuse_other
from experiments.progress import counted, saying_how_to_resume
from experiments.records import Record, RunDirectory
from experiments.report.trace import write_trace_report
from experiments.subject import load_subject, make_engine
from experiments.trace_config import EVICTIONS, TraceConfig, resolve
from experiments.workloads.corpus import encode, load_corpus
from experiments.workloads.prefix_trace import TraceRequest, make_trace, trace_digest
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError
from jaxkv.io.models import Model
from jaxkv.replicas import Replicas
from jaxkv.serving.clock import WallClock

ARMS = ("reuse", "no_reuse")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceResult:
    """Where the results are, and how many replays there are."""

    path: Path
    finished: int
    failed: int


@dataclasses.dataclass(frozen=True)
class Cell:
    """One point of the axes."""

    order: str
    num_pages: int
    eviction: str
    schedule: str

    @property
    def id(self) -> str:
        """Names the cell in records and tables."""
        return f"{self.order}/{self.num_pages}/{self.eviction}/{self.schedule}"


def run(
    config: Mapping[str, Any], workdir: str | Path | None = None, *, given: Collection[str] = ()
) -> TraceResult:
    """Replays the trace in every cell, with reuse and without, writes the report, prints its gist.

    Both replays of a cell run one after the other in this process; a cell of which one is missing is
    replayed as a whole. The same command resumes.

    Raises:
      ConfigError: a bad value, or a directory that holds another run.
      FetchError, FormatError: the model can't be had.
    """
    trace = resolve(config, given)
    directory_path = trace.directory(workdir)
    out, progress = Console(), Console(stderr=True)
    with RunDirectory(directory_path) as directory:
        refuse_other(directory, trace)
        with saying_how_to_resume(progress, lambda: f"finished cells are kept in {directory_path}"):
            _replay_all(trace, directory, progress)
        write_trace_report(directory, trace, out)
        records = directory.records()
        finished = len(directory.finished())
        return TraceResult(path=directory_path, finished=finished, failed=len(records) - finished)


def _replay_all(config: TraceConfig, directory: RunDirectory, console: Console) -> None:
    cells = [
        Cell(*axes)
        for axes in itertools.product(config.orders, config.num_pages, config.evictions, config.schedules)
    ]
    todo = [c for c in cells if not {(c.id, arm) for arm in ARMS} <= directory.finished()]
    if not todo:
        console.print(f"All replays are finished in {directory.path}.", highlight=False)
        return
    with console.status("Loading the corpus"):
        corpus = load_corpus(config.corpus)
    model = load_subject(config)
    tokens = encode(corpus, model)
    traces = {order: make_trace(config, tokens, order) for order in config.orders}
    longest = _require_room(config, model, traces[config.orders[0]])
    digests = {order: trace_digest(trace) for order, trace in traces.items()}
    begin(directory, config, corpus, len(tokens), model, traces=digests)
    with counted(console) as bar:
        task = bar.add_task("Replaying", total=len(todo) * len(ARMS) * config.requests)
        without: dict[tuple[str, int], Record] = {}  # neither eviction nor schedule matters without reuse
        for pages, group in itertools.groupby(todo, key=lambda c: c.num_pages):
            bar.update(task, description=f"{pages} pages: compiling")
            engine = _engine(config, model, pages, False, config.serving("arrival"))
            engine.warm_up(tokens=longest, batch=config.max_running)
            del engine  # its pool goes before the next one comes
            for cell in group:
                if not console.is_terminal:
                    console.print(f"Cell {cell.id}", highlight=False)
                key = cell.order, cell.num_pages
                for arm in ARMS:
                    bar.update(task, description=f"{cell.id}: {arm}")
                    if arm == "no_reuse" and key in without:
                        record = without[key]
                        bar.advance(task, config.requests)
                    else:
                        record = {}
                        for step in _replay(config, model, traces[cell.order], cell, reuse=arm == "reuse"):
                            if isinstance(step, int):
                                bar.advance(task, step)
                            else:
                                record = step
                        if arm == "no_reuse":
                            without[key] = record
                    where = dataclasses.asdict(cell)
                    directory.append({"status": "ok", "case": cell.id, "policy": arm, **record, **where})
        bar.update(task, description="Replayed")


def _replay(
    config: TraceConfig, model: Model, trace: list[TraceRequest], cell: Cell, *, reuse: bool
) -> Iterator[int | Record]:
    """Yields how many requests ended as they end, then the record of the replay."""
    clock = WallClock(skip_idle=True)
    serving = config.serving(cell.schedule, clock=clock)
    engine = _engine(config, model, cell.num_pages, reuse, serving, cell.eviction)
    start = clock.now()
    names = {
        engine.submit(
            r.tokens,
            max_tokens=config.max_tokens,
            domain=r.tenant,
            priority=r.priority,
            arrival=start + r.arrival,
        ): r
        for r in trace
    }
    requests: list[Record] = []
    while True:
        done = engine.step()
        for result in done.finished:
            metrics = result.metrics
            requests.append(
                {
                    "id": names[result.request].id,
                    "tenant": names[result.request].tenant,
                    "turn": names[result.request].turn,
                    **metrics.to_dict(),
                    **{
                        name: getattr(metrics, name) - start
                        for name in ("arrival", "admitted", "first_token", "finished")
                        if not np.isnan(getattr(metrics, name))
                    },
                    "output": hashlib.sha256(result.tokens.tobytes()).hexdigest()[:16],
                }
            )
        if done.finished:
            yield len(done.finished)
        if done.idle:
            break
        if not done.progressed and not done.preempted:
            later = [request.arrival for request in names if request.arrival > clock.now()]
            if later:
                clock.wait_until(min(later))
            elif not done.pending:
                engine.run()  # raises, and names what holds the pages
            # Otherwise a request arrived since the step looked at the clock: the next one admits it.
    stats = engine.stats()
    yield {
        "seconds": clock.now() - start - trace[0].arrival,
        "evicted_pages": stats["pages_evicted"],
        "preemptions": stats["preemptions"],
        "requests": sorted(requests, key=lambda r: r["id"]),
    }


def _engine(
    config: TraceConfig, model: Model, num_pages: int, reuse: bool, serving: Any, eviction: str = "lru"
) -> Engine | Replicas:
    return make_engine(
        model,
        config.mesh,
        num_pages=num_pages,
        page_size=config.page_size,
        chunk_size=config.chunk_size,
        prefix_cache=reuse,
        eviction=EVICTIONS[eviction],
        serving=serving,
    )


def _require_room(config: TraceConfig, model: Model, trace: list[TraceRequest]) -> int:
    """Tokens of the longest request with its answer."""
    longest = max(len(r.tokens) for r in trace) + config.max_tokens
    if longest > model.config.max_positions:
        raise ConfigError(
            f"the trace's longest request has {longest} tokens, expected at most the "
            f"{model.config.max_positions} positions of {model.name}"
        )
    need = -(-longest // config.page_size)
    if need > min(config.num_pages):
        raise ConfigError(
            f"config.num_pages holds {min(config.num_pages)}, expected at least the {need} pages that the "
            f"trace's longest request of {longest} tokens needs"
        )
    return longest
