"""The loss, the optimizer and one step of adaptation. Pure functions of values; nothing is kept here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.adaptation.edits import EditBatch
from experiments.adaptation.forward import answers
from experiments.adaptation.lora import Lora, merge
from jaxkv.model.config import ModelConfig
from jaxkv.model.params import Params
from jaxkv.typing import Array


class State(NamedTuple):
    """What changes from step to step, and what a checkpoint holds."""

    step: Array  # i32[], steps done
    lora: Lora
    optimizer: Any


class Losses(NamedTuple):
    """Means over the answers of a batch, nats per token, f32[]."""

    total: Array
    kl: Array  # KL(exact‖reused)
    nll: Array  # of the true text, from exact state


def divergences(exact: Array, reused: Array, targets: Array) -> tuple[Array, Array]:
    """Mean KL(exact‖reused), and mean NLL of `targets` under exact, of logits f32[B, T, V].

    The exact answers are the target of the KL, not a way to lower it: no gradient passes through them.
    """
    log_p, log_q = jax.nn.log_softmax(exact), jax.nn.log_softmax(reused)
    fixed = jax.lax.stop_gradient(log_p)
    kl = jnp.sum(jnp.exp(fixed) * (fixed - log_q), axis=-1).mean()
    nll = -jnp.take_along_axis(log_p, targets[..., None], axis=-1).mean()
    return kl, nll


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Numbers that a compiled step depends on."""

    learning_rate: float
    warmup: int
    steps: int
    clip: float  # global norm of the gradients
    weight_decay: float
    scale: float  # of the deltas
    plain_weight: float
    remat: bool

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW under a clipped global norm; the rate rises linearly, then falls as a cosine to a tenth."""
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=self.warmup,
            decay_steps=max(self.steps, self.warmup + 1),
            end_value=0.1 * self.learning_rate,
        )
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(schedule, b2=0.99, weight_decay=self.weight_decay),
        )


def init_state(lora: Lora, recipe: Recipe) -> State:
    """Before the first step."""
    return State(step=jnp.zeros((), jnp.int32), lora=lora, optimizer=recipe.optimizer.init(lora))


@functools.lru_cache(maxsize=4)
def make_step(
    config: ModelConfig, recipe: Recipe
) -> Callable[[State, Params, EditBatch], tuple[State, Losses]]:
    """A compiled step: `step(state, params, batch)` returns the next state and the losses before it.

    loss = KL(exact‖reused) + plain_weight · NLL of the true text from exact state. Both states are those
    of the adapted weights, and gradients pass through the stale keys and values as well: that is where
    tolerance is learned.
    """
    optimizer = recipe.optimizer

    def loss(lora: Lora, params: Params, batch: EditBatch) -> tuple[Array, Losses]:
        exact, reused = answers(merge(params, lora, recipe.scale), batch, config=config, remat=recipe.remat)
        kl, nll = divergences(exact, reused, batch.targets)
        total = kl + jnp.float32(recipe.plain_weight) * nll
        return total, Losses(total=total, kl=kl, nll=nll)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, params: Params, batch: EditBatch) -> tuple[State, Losses]:
        gradients, losses = jax.grad(loss, has_aux=True)(state.lora, params, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
            updates, moments = optimizer.update(gradients, state.optimizer, state.lora)
            lora = optax.apply_updates(state.lora, updates)
        return State(step=state.step + 1, lora=lora, optimizer=moments), losses

    return step
