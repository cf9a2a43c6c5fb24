"""Trains a tiny model for a few minutes, so that divergence is measured on trained weights:

python -m experiments.launch --config=configs/train_hybrid.py --workdir=runs/tiny-hybrid
python -m experiments.launch --config=configs/hybrid.py --config.model=runs/tiny-hybrid/model

The run directory holds `model/` (for `jaxkv.load`), `loss.csv`, `loss.png` and `config.json`.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from experiments.environment import environment
from experiments.records import RunDirectory, refuse_changes
from experiments.runner import RunResult
from experiments.train_config import TrainConfig, resolve
from experiments.workloads.corpus import Corpus, load_corpus
from jaxkv.errors import ConfigError
from jaxkv.io.checkpoint import Model, is_checkpoint, save_checkpoint
from jaxkv.model.params import Params, init_params, params_digest, stays_float32
from jaxkv.model.transformer import forward_dense
from jaxkv.typing import Array, Int32

MODEL, CURVE = "model", "loss.csv"
HELD_OUT = 0.05  # share of the text, its end


@dataclasses.dataclass(frozen=True)
class Point:
    """A line of the loss curve: nats a byte, of the step's batch and of held-out text (None: not now).

    `seconds` count from the first step, compilation excluded.
    """

    step: int
    seconds: float
    loss: float
    held_out: float | None


def run(
    config: Mapping[str, Any], workdir: str | Path | None = None, *, given: Collection[str] = ()
) -> RunResult:
    """Trains and saves; a directory that has the model already is left as it is.

    Raises:
      ConfigError: a bad value, too short a text, or a directory of another run.
    """
    settings = resolve(config, given)
    path = settings.directory(workdir)
    console = Console(stderr=True)
    with RunDirectory(path) as directory:
        previous = directory.read_config()
        if previous is not None:
            refuse_changes(path, previous["config"], settings.to_dict())
        if is_checkpoint(path / MODEL):
            console.print(f"The model is in {path / MODEL} already.", highlight=False, soft_wrap=True)
            return RunResult(path=path, finished=1, failed=0)
        corpus = load_corpus(settings.corpus)
        params, points = train(settings, corpus, console)
        digest = params_digest(params)
        directory.write_config(
            {
                "config": settings.to_dict(),
                "config_digest": settings.digest,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "corpus": {"name": corpus.name, "sha256": corpus.digest},
                "model": {"weights_digest": digest, **settings.model_config().to_dict()},
                "environment": environment(),
                "steps": points[-1].step,
            }
        )
        write_curve(path, points, settings)
        save_checkpoint(
            path / MODEL,
            Model(
                config=settings.model_config(),
                params=params,
                tokenizer=None,
                name=path.name,
                dtype=settings.dtype,
                weights_digest=digest,
                source=f"trained on {corpus.name}, {points[-1].step} steps, seed {settings.seed}",
            ),
        )
    last = points[-1]
    console.print(
        f"{last.step} steps in {last.seconds:.0f} s: {last.held_out:.3f} nats a byte on held-out text; "
        f"{path / MODEL}",
        highlight=False,
        soft_wrap=True,
    )
    return RunResult(path=path, finished=1, failed=0)


def train(settings: TrainConfig, corpus: Corpus, console: Console) -> tuple[Params, list[Point]]:
    """Minimizes the loss of the next byte. One config gives the same batches; a time limit may end it."""
    model = settings.model_config()
    text, held_out = split(corpus, settings)
    params = init_params(model, settings.seed, jnp.float32)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, min(settings.warmup, settings.steps - 1), settings.steps,
        settings.learning_rate / 10,
    )  # fmt: skip
    optimizer = optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(schedule, b2=0.98, weight_decay=settings.weight_decay, mask=decayed),
    )

    def loss_of(params: Params, rows: Array) -> Array:
        logits = forward_dense(params, rows[:, :-1], config=model)
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    @jax.jit
    def update(params: Params, state: Any, rows: Array) -> tuple[Params, Any, Array]:
        loss, gradient = jax.value_and_grad(loss_of)(params, rows)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, loss

    evaluate = jax.jit(loss_of)
    state, points = optimizer.init(params), []
    # optax promotes dtypes, also where whoever calls this forbids it.
    with jax.numpy_dtype_promotion("standard"), console.status("Compiling the training step"):
        first = next(batches(text, settings))
        compiled = update.lower(params, state, first).compile()
        judge = evaluate.lower(params, held_out).compile()
    start = time.perf_counter()
    with Progress(console=console) as progress:
        task = progress.add_task("Training", total=settings.steps)
        for step, rows in zip(range(1, settings.steps + 1), batches(text, settings), strict=False):
            params, state, loss = compiled(params, state, rows)
            value, seconds = float(loss), time.perf_counter() - start
            last = step == settings.steps or seconds >= 60 * settings.minutes
            judged = last or step % settings.evaluate == 0
            points.append(Point(step, seconds, value, float(judge(params, held_out)) if judged else None))
            if not np.isfinite(value):
                raise ConfigError(
                    f"config.learning_rate is {settings.learning_rate}, expected a smaller one: the loss is "
                    f"{value} at step {step}"
                )
            progress.update(task, advance=1, description=f"Training, {value:.3f} nats a byte")
            if last:
                break
    if settings.dtype != "float32":
        params = _converted(params, settings.dtype)
    return params, points


def split(corpus: Corpus, settings: TrainConfig) -> tuple[Int32, Int32]:
    """Bytes to train on i32[n], and rows of the rest, i32[held_out, length + 1], spread over it."""
    tokens = np.frombuffer(corpus.text.encode(), np.uint8).astype(np.int32)
    border = int(len(tokens) * (1 - HELD_OUT))
    rest, width = tokens[border:], settings.length + 1
    if len(rest) < width:
        raise ConfigError(
            f"config.length is {settings.length}, expected fewer than the {len(rest)} bytes held out of "
            f"'{corpus.name}'"
        )
    starts = np.linspace(0, len(rest) - width, settings.held_out).astype(int)
    return tokens[:border], np.stack([rest[s : s + width] for s in starts])


def batches(text: Int32, settings: TrainConfig) -> Iterator[Int32]:
    """Endless rows i32[batch, length + 1] from random places."""
    rng = np.random.default_rng(settings.seed)
    while True:
        starts = rng.integers(0, len(text) - settings.length, settings.batch)
        yield np.stack([text[s : s + settings.length + 1] for s in starts])


def decayed(params: Params) -> Any:
    """Which weights decay: matrices, not norms, biases and rates."""
    return jax.tree.map_with_path(lambda path, _: not stays_float32(path[-1].name), params)


def _converted(params: Params, dtype: str) -> Params:
    def convert(path: tuple[Any, ...], leaf: Array) -> Array:
        return leaf if stays_float32(path[-1].name) else leaf.astype(dtype)

    converted: Params = jax.tree.map_with_path(convert, params)
    return converted


def write_curve(path: Path, points: list[Point], settings: TrainConfig) -> None:
    """`loss.csv`, a line a step, and `loss.png`."""
    with (path / CURVE).open("w", newline="", encoding="utf-8") as sink:
        writer = csv.writer(sink)
        writer.writerow(["step", "seconds", "loss", "held_out"])
        for point in points:
            shown = "" if point.held_out is None else f"{point.held_out:.5f}"
            writer.writerow([point.step, f"{point.seconds:.2f}", f"{point.loss:.5f}", shown])
    figure = Figure(figsize=(4.5, 3.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([p.step for p in points], [p.loss for p in points], color="#2b8cdb", lw=0.8, label="batch")
    judged = [(p.step, p.held_out) for p in points if p.held_out is not None]
    axes.plot(
        [step for step, _ in judged], [loss for _, loss in judged],
        color="#d55e00", marker="o", ms=3, label="held out",
    )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("nats a byte")
    axes.set_title(f"{settings.kind}, {points[-1].seconds / 60:.1f} minutes", fontsize=9.5)
    axes.legend(frameon=False)
    figure.savefig(path / "loss.png", dpi=150)
