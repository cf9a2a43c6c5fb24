"""The compiled steps: prefill, decode, relocate. Pure; `pages` are donated and come back as a new value.

    pages, logits = prefill(params, pages, step, config=config)

A pages value is spent by the step it is given to. Using it again raises `HandleError`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.cache.pages import KVPages, copy_slots
from jaxkv.cache.states import Pages, StatePool, compose_states, kv_groups, spent
from jaxkv.cache.table import GroupInput, PageTable, StateInput, StepInput
from jaxkv.errors import HandleError, RelocationError
from jaxkv.model.attention import append_of
from jaxkv.model.backend import AUTO, Backend
from jaxkv.model.config import ModelConfig, RopeConfig
from jaxkv.model.contiguous import KVCopy, copy_tables, place_in_copy
from jaxkv.model.params import Params
from jaxkv.model.rope import rope_angles, rotate
from jaxkv.model.sampling import SamplingInput, sample
from jaxkv.model.sharding import keep_pages, make_whole, settle, tracing_on
from jaxkv.model.transformer import StepOutput, forward_step
from jaxkv.typing import Array


@struct.dataclass(kw_only=True)
class DecodeInput:
    """Many decode steps of a batch: every slot and table entry they will need, decided beforehand.

    The tables already hold the slots that later steps write: causality hides them until then.
    """

    logits: Array  # f32[B, V], of the last token of each sequence
    positions: Array  # i32[B], where the next token will stand
    limits: Array  # i32[B], tokens to generate at most; 0 for a padding row
    stop: Array  # i32[B, E], a row that draws one of its own stops; padded with -1
    slots: tuple[Array, ...]  # per group i32[B, steps]
    tables: tuple[PageTable, ...]  # per group
    sampling: SamplingInput
    states: StateInput | None = None  # with recurrent layers: of the first token; then rows go on in `write`


@struct.dataclass(kw_only=True)
class DecodeOutput:
    pages: Pages
    tokens: Array  # i32[B, steps], -1 after a row's end
    counts: Array  # i32[B], tokens generated; a stop token is not counted and not written
    stopped: Array  # bool[B], ended by a stop token
    logits: Array  # f32[B, V], of the last token of each sequence


@struct.dataclass(kw_only=True)
class Moves:
    """Slots to copy with their keys rotated by `delta`; `num_slots` as destination drops a row."""

    source: Array  # i32[n]
    target: Array  # i32[n]
    delta: Array  # i32[n]


def _check_live(pages: Pages) -> None:
    if spent(pages):
        raise HandleError(
            "pages were given to an earlier step, expected the value that the last step returned"
        )


@functools.partial(
    jax.jit, static_argnames=("config", "logits", "capture", "backend"), donate_argnames=("pages",)
)
def _step(
    params: Params,
    pages: Pages,
    step: StepInput,
    *,
    config: ModelConfig,
    logits: str,
    capture: bool,
    backend: Backend = AUTO,
) -> StepOutput:
    with tracing_on(backend.mesh):
        out = forward_step(
            params, pages, step, config=config, logits=logits, capture=capture, backend=backend
        )
    return settle(out, backend.mesh)


def run_step(
    params: Params,
    pages: Pages,
    step: StepInput,
    *,
    config: ModelConfig,
    logits: str = "last",
    capture: bool = False,
    backend: Backend = AUTO,
) -> StepOutput:
    """Compiled `forward_step`. Donates `pages`.

    Raises:
      HandleError: `pages` was already donated.
    """
    _check_live(pages)
    out: StepOutput = _step(
        params, pages, step, config=config, logits=logits, capture=capture, backend=backend
    )
    return out


def prefill(
    params: Params, pages: Pages, step: StepInput, *, config: ModelConfig, backend: Backend = AUTO
) -> tuple[Pages, Array]:
    """Computes T tokens a sequence at any positions: prompt chunk, appended text, or repair.

    Returns the new pages and logits f32[B, V] of each row's last valid token.
    """
    out = run_step(params, pages, step, config=config, backend=backend)
    return out.pages, out.logits


def decode(
    params: Params, pages: Pages, step: StepInput, *, config: ModelConfig, backend: Backend = AUTO
) -> tuple[Pages, Array]:
    """Computes one token a sequence (T = 1). Returns the new pages and logits f32[B, V]."""
    return prefill(params, pages, step, config=config, backend=backend)


def _next_states(states: StateInput, pool: StatePool, step: Array, active: Array) -> StateInput:
    """The first token starts from the state that is given, every later one from the row's own."""
    return StateInput(
        read=jnp.where(step == 0, states.read, states.write),
        write=jnp.where(active, states.write, pool.num_slots),
        fresh=None if states.fresh is None else states.fresh & (step == 0),
    )


@functools.partial(jax.jit, static_argnames=("config", "backend", "copied"), donate_argnames=("pages",))
def _decode_many(
    params: Params,
    pages: Pages,
    inputs: DecodeInput,
    *,
    config: ModelConfig,
    backend: Backend = AUTO,
    copied: bool = False,
) -> DecodeOutput:
    batch, steps = inputs.slots[0].shape
    held = kv_groups(pages)
    drop = tuple(group.num_slots for group in held)
    copies: tuple[KVCopy, ...] | None = None
    places: tuple[Array, ...] = ()
    if copied:
        copies = tuple(
            copy_tables(group, table, inputs.positions)
            for group, table in zip(held, inputs.tables, strict=True)
        )
        places = tuple(
            place_in_copy(table, slots, group.page_size)
            for group, table, slots in zip(held, inputs.tables, inputs.slots, strict=True)
        )

    def unfinished(state: tuple[Any, ...]) -> Array:
        i, _, _, _, counts, stopped, _ = state
        return (i < steps) & jnp.any(~stopped & (counts < inputs.limits))

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        i, pages, logits, tokens, counts, stopped, copies = state
        positions = inputs.positions + i
        token = sample(logits, inputs.sampling, positions)
        active = ~stopped & (counts < inputs.limits)
        stops = active & jnp.any(token[:, None] == inputs.stop, axis=1)
        active = active & ~stops
        groups = tuple(
            GroupInput(
                slots=jnp.where(active[:, None], jax.lax.dynamic_slice_in_dim(slots, i, 1, axis=1), unused),
                table=table,
            )
            for slots, table, unused in zip(inputs.slots, inputs.tables, drop, strict=True)
        )
        step = StepInput(
            tokens=token[:, None],
            positions=positions[:, None],
            lengths=active.astype(jnp.int32),
            groups=groups,
            states=None if inputs.states is None else _next_states(inputs.states, pages[-1], i, active),
        )
        with tracing_on(backend.mesh):
            out = forward_step(
                params,
                pages,
                step,
                config=config,
                backend=backend,
                copies=copies,
                at=tuple(jax.lax.dynamic_index_in_dim(place, i, 1, keepdims=False) for place in places),
            )
        tokens = tokens.at[:, i].set(jnp.where(active, token, -1))
        # Whole on every device: drawing a token sorts them.
        logits = jnp.where(active[:, None], make_whole(out.logits, backend.mesh), logits)
        counts = counts + active.astype(jnp.int32)
        kept = keep_pages(out.pages, backend.mesh)
        return i + 1, kept, logits, tokens, counts, stopped | stops, out.copies

    start = (
        jnp.int32(0),
        pages,
        inputs.logits,
        jnp.full((batch, steps), -1, jnp.int32),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch,), bool),
        copies,
    )
    _, pages, logits, tokens, counts, stopped, _ = jax.lax.while_loop(unfinished, body, start)
    out = DecodeOutput(pages=pages, tokens=tokens, counts=counts, stopped=stopped, logits=logits)
    return settle(out, backend.mesh)


def decode_many(
    params: Params,
    pages: Pages,
    inputs: DecodeInput,
    *,
    config: ModelConfig,
    backend: Backend = AUTO,
    copied: bool = False,
) -> DecodeOutput:
    """Generates up to `steps` tokens a row in one compiled loop, sampling inside. Donates `pages`.

    Each iteration draws a token from the logits at hand, stops the row if it is a stop token, else
    writes its KV and computes the next logits. So every counted token's KV is in the pages, and the
    returned logits continue the sequence.

    Args:
      copied: attend a copy of what the tables show, made once, instead of the pages: faster where XLA runs
        attention on CPU, for `4·B·S·2·K·H` bytes a layer, S being a table's entries times P.

    Raises:
      HandleError: `pages` was already donated.
    """
    _check_live(pages)
    out: DecodeOutput = _decode_many(params, pages, inputs, config=config, backend=backend, copied=copied)
    return out


@functools.partial(jax.jit, donate_argnames=("pages",))
def compose(pages: Pages, start: Array, source: Array, chain: Array, end: Array, target: Array) -> Pages:
    """`compose_states` on the pages of an engine, which are donated."""
    return (*pages[:-1], compose_states(pages[-1], start, source, chain, end, target))


def _relocate_group(
    pages: KVPages, moves: Moves, rope: RopeConfig, config: ModelConfig, backend: Backend
) -> KVPages:
    # R(-d) is R(d) transposed: cosine even, sine odd. Tables start at position 0.
    cos, sin = rope_angles(jnp.abs(moves.delta), rope, config.max_positions)
    cos, sin = cos[:, None], (sin * jnp.sign(moves.delta).astype(jnp.float32)[:, None])[:, None]
    append = append_of(backend)

    def turn(keys: Array) -> Array:
        # No magnitude here: YaRN's factor went into the key at birth.
        return rotate(keys, cos, sin)

    def copy_layer(layer: Array, pages: KVPages) -> KVPages:
        return copy_slots(pages, layer, moves.source, moves.target, turn, append)

    layers = pages.kv.shape[0] // pages.num_pages
    moved: KVPages = jax.lax.fori_loop(0, layers, copy_layer, pages)
    return moved


@functools.partial(jax.jit, static_argnames=("config", "backend"), donate_argnames=("pages",))
def _relocate(
    pages: Pages, moves: tuple[Moves, ...], *, config: ModelConfig, backend: Backend = AUTO
) -> Pages:
    kv = kv_groups(pages)
    relocated = tuple(
        _relocate_group(held, moved, group.rope, config, backend)
        for group, held, moved in zip(config.groups, kv, moves, strict=True)
    )
    return keep_pages((*relocated, *pages[len(kv) :]), backend.mesh)


def relocate(
    pages: Pages, moves: tuple[Moves, ...], *, config: ModelConfig, backend: Backend = AUTO
) -> Pages:
    """Copies slots of every layer with K' = R(delta) K, V' = V, in float32. Donates `pages`.

    R is that of the layer's group: local and global layers may turn at different frequencies. Quantized
    keys are dequantized, turned and quantized once; what quantized values are is copied as it is.

    The literal form of Suffix Cache Reuse (arXiv 2609.37725 §4.3), and the reference for the view form.
    Sources and targets must not overlap.

    Raises:
      HandleError: `pages` was already donated.
      RelocationError: the model's rotations do not compose.
    """
    _check_live(pages)
    reason = config.relocation_refused
    if reason:
        raise RelocationError(f"keys cannot be moved: {reason}, expected positions that compose")
    moved: Pages = _relocate(pages, moves, config=config, backend=backend)
    return moved
