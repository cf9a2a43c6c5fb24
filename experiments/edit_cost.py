"""Measures what appending, editing the middle and editing the start of a cached context cost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.cost_config import CostConfig, resolve
from experiments.fields import begin, refuse_other
from experiments.paper_model import QWEN36_27B, PaperModel
from experiments.progress import counted
from experiments.records import Record, RunDirectory
from experiments.report.cost import write_cost_report
from experiments.subject import load_subject
from experiments.workloads.corpus import encode, load_corpus
from jaxkv.cache.contract import CacheContract
from jaxkv.cache.sequence import EMPTY_SEGMENTS, Origin, Run, Sequence
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.io.models import Model
from jaxkv.model.config import ModelConfig
from jaxkv.reuse.bill import Tariff, bill
from jaxkv.reuse.ledger import attention_flops, prefix_reuse_flops, token_flops
from jaxkv.reuse.plan import plan
from jaxkv.reuse.policies import policy_from_name
from jaxkv.typing import Int32

EDITS = ("append", "edit middle", "edit start")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostResult:
    """Where the results are, and how many measurements there are."""

    path: Path
    finished: int
    failed: int


def run(
    config: Mapping[str, Any], workdir: str | Path | None = None, *, given: Collection[str] = ()
) -> CostResult:
    """Measures each edit under each policy, counts the same on paper, prices both, writes the report.

    Raises:
      ConfigError: a bad value, or a directory that holds another run.
      FetchError, FormatError: the model can't be had.
    """
    cost = resolve(config, given)
    path = cost.directory(workdir)
    out, progress = Console(), Console(stderr=True)
    with RunDirectory(path) as directory:
        refuse_other(directory, cost)
        _measure_all(cost, directory, progress)
        write_cost_report(directory, cost, paper_rows(cost, QWEN36_27B), out)
        records = directory.records()
        finished = len(directory.finished())
        return CostResult(path=path, finished=finished, failed=len(records) - finished)


def edited(text: Int32, other: Int32, edit: str, context: int, changed: int) -> Int32:
    """The new tokens of an edit of text[:context]: `changed` more, or as many replaced by `other`."""
    if edit == "append":
        return text[: context + changed]
    at = context // 2 if edit == "edit middle" else 0
    return np.concatenate([text[:at], other[:changed], text[at + changed : context]])


def bills(tariffs: list[Tariff], row: Record, age: float) -> dict[str, dict[str, Any]]:
    """What each tariff makes of a row: kept tokens count as read, also where no host would do that."""
    kept = row["matched"] + row["relocated"]
    priced = {}
    for tariff in tariffs:
        found = bill(tariff, prompt=row["prompt"], shared=kept, generated=row["generated"], age=age)
        priced[tariff.name] = {**dataclasses.asdict(found), "relative": found.relative}
    return priced


def paper_rows(config: CostConfig, model: PaperModel) -> list[Record]:
    """The table on paper: plans are made as for a real model, and counted."""
    prompt, changed = config.paper_prompt, config.paper_changed
    rows = []
    for edit in EDITS:
        context = prompt - changed if edit == "append" else prompt
        # Token ids that never repeat, so that what survives is what the edit left.
        text = np.arange(prompt, dtype=np.int32)
        new = edited(text, text + prompt, edit, context, changed)
        for name in config.policies:
            made = plan(policy_from_name(name), _cached(text[:context]), new)
            matched, forward = made.matched, made.forward
            generated = np.arange(prompt, prompt + config.paper_generated, dtype=np.int32)
            exact = name == "exact"
            rows.append(
                {
                    "edit": edit,
                    "policy": name,
                    "prompt": prompt,
                    "matched": matched,
                    "relocated": made.relocated,
                    "forwarded": len(forward),
                    "generated": config.paper_generated,
                    "eq9_flops": prefix_reuse_flops(
                        model.c_token,
                        model.c_attn,
                        prompt=prompt,
                        reused=matched,
                        generated=config.paper_generated,
                    )
                    if exact
                    else None,
                    "ledger_flops": model.flops(forward) + model.flops(generated),
                    "kv_bytes": (prompt + config.paper_generated) * model.kv_bytes_per_token,
                    "state_bytes": model.state_bytes,
                }
            )
    return rows


def _cached(tokens: Int32) -> Sequence:
    """A sequence as a plan needs it: one page holds it all."""
    segments = np.array([[0, 0, len(tokens), 0]], np.int32)
    contract = CacheContract(weights_digest="", architecture="paper", kv_dtype="bfloat16", chunk_grid=1)
    return Sequence(
        id=0,
        tokens=tokens,
        segments=segments if len(tokens) else EMPTY_SEGMENTS,
        provenance=(Run(0, len(tokens), Origin.EXACT),),
        contract=contract,
        grid_length=len(tokens),
    )


def _measure_all(config: CostConfig, directory: RunDirectory, console: Console) -> None:
    keys = [(edit, policy) for edit in EDITS for policy in config.policies]
    todo = [key for key in keys if key not in directory.finished()]
    if not todo:
        console.print(f"All measurements are finished in {directory.path}.", highlight=False)
        return
    with console.status("Loading the corpus"):
        corpus = load_corpus(config.corpus)
    model = load_subject(config)
    tokens = encode(corpus, model)
    need = config.context + config.changed
    if len(tokens) < 2 * need:
        raise ConfigError(f"config.corpus has {len(tokens)} tokens, expected at least {2 * need}")
    longest = need + config.generated
    if longest > model.config.max_positions:
        raise ConfigError(
            f"config.context is {config.context}, with edit and answer {longest} tokens, expected at most "
            f"the {model.config.max_positions} positions of {model.name}"
        )
    begin(directory, config, corpus, len(tokens), model)
    start = int(np.random.default_rng([config.seed, 9]).integers(0, len(tokens) - 2 * need + 1))
    text, other = tokens[start : start + need], tokens[start + need : start + 2 * need]
    engine = Engine(
        model,
        num_pages=config.num_pages or 4 * (-(-longest // config.page_size) + 2),
        page_size=config.page_size,
        chunk_size=config.chunk_size,
        prefix_cache=False,
    )
    with counted(console) as bar:
        task = bar.add_task("Computing the context", total=len(todo))
        old = engine.prefill(text[: config.context]).sequence
        for edit, name in todo:
            bar.update(task, description=f"{edit}: {name}")
            new = edited(text, other, edit, config.context, config.changed)
            try:
                record = _measure(engine, model, old, new, name, config)
            except JaxkvError as error:
                directory.append(
                    {"status": "failed", "case": edit, "policy": name, "error": f"{error}", "edit": edit}
                )
            else:
                directory.append({"status": "ok", "case": edit, "policy": name, "edit": edit, **record})
            bar.advance(task)
        bar.update(task, description="Measured")


def _measure(
    engine: Engine, model: Model, old: Sequence, new: Int32, name: str, config: CostConfig
) -> Record:
    """One edit under one policy: the fastest of some runs, compilation left out, then an answer."""
    policy = policy_from_name(name)
    engine.release(engine.edit(old, new, policy).sequence)  # compiles what it needs
    seconds = []
    for repeat in range(config.repeats):
        started = time.perf_counter()
        result = engine.edit(old, new, policy)
        np.asarray(result.logits)  # waits for the device
        seconds.append(time.perf_counter() - started)
        if repeat < config.repeats - 1:
            engine.release(result.sequence)
    sequence, ledger = result.sequence, result.reuse.ledger
    answer = engine.generate(sequence, max_tokens=config.generated, stop=())
    engine.release(answer.sequence)
    started = time.perf_counter()
    answer = engine.generate(sequence, max_tokens=config.generated, stop=())
    generating = time.perf_counter() - started
    engine.release(answer.sequence)
    engine.release(sequence)
    generated = len(answer.tokens)
    per_token = ledger.kv_bytes_resident // max(ledger.prompt - ledger.dropped, 1)
    return {
        "prompt": ledger.prompt,
        "matched": ledger.matched,
        "relocated": ledger.relocated,
        "forwarded": ledger.forwarded,
        "dropped": ledger.dropped,
        "generated": generated,
        "kind": result.reuse.kind,
        "eq9_flops": _equation_9(model.config, ledger.prompt, ledger.matched, generated)
        if name == "exact"
        else None,
        "ledger_flops": ledger.flops + _generated_flops(model.config, ledger.prompt, generated),
        "edit_ms": 1e3 * min(seconds),
        "edit_ms_all": [1e3 * s for s in seconds],
        "generate_ms": 1e3 * generating,
        "kv_bytes": ledger.kv_bytes_resident + generated * per_token,
        "kv_bytes_moved": ledger.kv_bytes_moved,
    }


def _equation_9(config: ModelConfig, prompt: int, reused: int, generated: int) -> float:
    return prefix_reuse_flops(
        token_flops(config), attention_flops(config), prompt=prompt, reused=reused, generated=generated
    )


def _generated_flops(config: ModelConfig, prompt: int, generated: int) -> float:
    """Every generated token is computed too, as its logits continue the sequence."""
    keys = sum(range(prompt + 1, prompt + generated + 1))
    return float(token_flops(config) * generated + attention_flops(config) * keys)
