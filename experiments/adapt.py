"""Fine-tunes an adapter so that a model tolerates reuse, and judges it on held-out text.

    python -m experiments.launch --config=configs/adapt.py

Training differentiates through both states (`experiments.adaptation`); judging goes through the engine, with
the adapter merged into the weights, as one would serve it. A run directory holds `cases.jsonl` (every step
and every held-out edit), checkpoints, the adapter and the report; the same command resumes.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from experiments.adapt_config import AdaptConfig, resolve
from experiments.adaptation.edits import Shape
from experiments.adaptation.forward import require_attention
from experiments.adaptation.judge import held_out_edits, judge
from experiments.adaptation.lora import init_lora, load_tree, merged_model, save_tree
from experiments.adaptation.training import Recipe, State, init_state, make_step
from experiments.fields import begin, refuse_other
from experiments.progress import counted, saying_how_to_resume
from experiments.records import RunDirectory
from experiments.report.adapt import write_adapt_report
from experiments.subject import load_subject
from experiments.workloads.corpus import encode, load_corpus
from jaxkv.errors import ConfigError
from jaxkv.io.checkpoint import save_checkpoint
from jaxkv.io.models import Model
from jaxkv.reuse.policies import Policy, policy_from_name
from jaxkv.typing import Int32

TRAIN, BEFORE, AFTER = "train", "before", "after"  # what stands for a policy in a record
_CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptResult:
    """Where the results are, and how many steps and judgements there are."""

    path: Path
    finished: int
    failed: int


def run(
    config: Mapping[str, Any], workdir: str | Path | None = None, *, given: Collection[str] = ()
) -> AdaptResult:
    """Judges the model, trains the adapter, judges again, writes the report and prints its gist.

    Everything follows from the config: step i draws its edits from the seed and i, so a run that was
    interrupted ends with the same weights as one that was not.

    Raises:
      ConfigError: a bad value, a corpus that is too short, or a directory that holds another run.
      FetchError, FormatError: the model can't be had.
    """
    adapt = resolve(config, given)
    path = adapt.directory(workdir)
    out, progress = Console(), Console(stderr=True)
    with RunDirectory(path) as directory:
        refuse_other(directory, adapt)
        with saying_how_to_resume(progress, lambda: f"finished steps are kept in {path}"):
            _run(adapt, directory, progress)
        write_adapt_report(directory, out)
        finished = len(directory.finished())
        return AdaptResult(path=path, finished=finished, failed=len(directory.records()) - finished)


def _run(config: AdaptConfig, directory: RunDirectory, console: Console) -> None:
    done = directory.finished()
    if {(f"held-{config.held_out - 1}", AFTER), (f"step-{config.steps}", TRAIN)} <= done and (
        (directory.path / "adapter").is_dir()
    ):
        console.print(f"Everything is finished in {directory.path}.", highlight=False)
        return
    policy = policy_from_name(config.policy)
    shape = Shape.of(config.draw, policy)  # refuses a policy that can't be trained, before anything is loaded
    with console.status("Loading the corpus"):
        corpus = load_corpus(config.corpus)
    model = load_subject(config)
    require_attention(model.config)
    tokens = encode(corpus, model)
    split = len(tokens) - int(config.held_share * len(tokens))
    seen, held = tokens[:split], tokens[split:]
    for part, text in (("training", seen), ("held-out", held)):
        if len(text) < config.draw.need:
            raise ConfigError(
                f"config.corpus has {len(text)} {part} tokens, expected at least {config.draw.need}"
            )
    if config.draw.need > model.config.max_positions:
        raise ConfigError(
            f"config.context is {config.context}, with edit and continuation {config.draw.need} tokens, "
            f"expected at most the {model.config.max_positions} positions of {model.name}"
        )
    begin(directory, config, corpus, len(tokens), model, held_out_tokens=len(held))
    with counted(console) as bar:
        _judge(config, directory, model, held, BEFORE, bar)
        state = _train(config, directory, model, seen, policy, shape, bar)
        merged = merged_model(model, state.lora, config.scale)
        if not (directory.path / "adapter").is_dir():
            save_tree(directory.path / "adapter", state.lora)
        if config.export and not (directory.path / "model").exists():
            save_checkpoint(directory.path / "model", merged)
        _judge(config, directory, merged, held, AFTER, bar)


def _judge(
    config: AdaptConfig, directory: RunDirectory, model: Model, held: Int32, when: str, bar: Progress
) -> None:
    done = directory.finished()
    edits = held_out_edits(config.draw, held, config.held_out, config.seed)
    missing = [i for i in range(len(edits)) if (f"held-{i}", when) not in done]
    task = bar.add_task(f"Held-out edits, {when}", total=len(edits), completed=len(edits) - len(missing))
    if not missing:
        return
    records = judge(
        model,
        [edits[i] for i in missing],
        policy_from_name(config.policy),
        page_size=config.page_size,
        chunk_size=config.chunk_size,
    )
    for i, record in zip(missing, records, strict=True):
        directory.append({"status": "ok", "case": f"held-{i}", "policy": when, **record})
        bar.advance(task)


def _train(
    config: AdaptConfig,
    directory: RunDirectory,
    model: Model,
    seen: Int32,
    policy: Policy,
    shape: Shape,
    bar: Progress,
) -> State:
    names = [field.name for field in dataclasses.fields(Recipe)]
    recipe = Recipe(**{name: getattr(config, name) for name in names})
    state = init_state(init_lora(model.config, config.rank, config.seed), recipe)
    saved = _latest(directory.path)
    if saved is not None:
        # Copies: a step donates its state, and Orbax may still look at what it read.
        state = cast(State, jax.tree.map(jnp.array, load_tree(saved, state)))
    start = int(state.step)
    task = bar.add_task("Training", total=config.steps, completed=start)
    step = make_step(model.config, recipe)
    for number in range(start + 1, config.steps + 1):
        began = time.perf_counter()
        rng = np.random.default_rng([config.seed, 5, number])
        batch = config.draw.batch(seen, config.batch, rng, policy, shape)
        state, losses = step(state, model.params, batch)
        found = {name: float(value) for name, value in losses._asdict().items()}
        if not all(map(np.isfinite, found.values())):
            raise ConfigError(
                f"step {number} has loss {found['total']}: config.learning_rate is {config.learning_rate}, "
                "expected one that does not diverge"
            )
        seconds = time.perf_counter() - began
        directory.append(
            {"status": "ok", "case": f"step-{number}", "policy": TRAIN, **found, "seconds": seconds}
        )
        if not bar.console.is_terminal:
            bar.console.print(f"Step {number}: KL {found['kl']:.4g}, NLL {found['nll']:.4g}", highlight=False)
        bar.advance(task)
        if number % config.checkpoint_every == 0 or number == config.steps:
            _save(directory.path, number, state)
    return state


def _save(path: Path, number: int, state: State) -> None:
    """Writes a checkpoint, then removes those before it: there is a whole one at any time."""
    folder = path / _CHECKPOINTS
    folder.mkdir(exist_ok=True)
    save_tree(folder / f"step-{number:06d}", state)
    for other in folder.glob("step-*"):
        if other.name < f"step-{number:06d}":
            shutil.rmtree(other, ignore_errors=True)


def _latest(path: Path) -> Path | None:
    """The newest whole checkpoint. Orbax writes aside under another name and renames."""
    found = sorted(p for p in (path / _CHECKPOINTS).glob("step-??????") if p.is_dir())
    return found[-1] if found else None
