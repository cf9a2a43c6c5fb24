"""What the Hopper kernels share: what they support, and the order in which tiles of keys are visited.

A **tile** is `tile` consecutive slots of a sequence's table, all of one delta block. XLA works out once for
every tile whether any query can see anything of it and where each of its slots stands; the kernels then
visit only the tiles that count. All layers of a step share this plan: it depends on the table and the
positions, not on the pages, so XLA computes it once.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

Array = Any

LOG2E = math.log2(math.e)
NOWHERE = 2**30  # position of a slot that nobody may read
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
MASKED = -1e30  # score of such a slot, in units of log2
PEAK = -1e20  # where running maxima start: above MASKED, so that exp2(MASKED - peak) is exactly 0
ROWS = 64  # rows of a wgmma: queries are padded to it
SHARED_BYTES = 227 * 1024  # what a block may allocate on Hopper
RESERVED_BYTES = 6 * 1024  # barriers, reductions, alignment of the other buffers
MAX_DELTAS = 64
NAMES = ("ACC", "Barrier", "Layout", "Mesh", "RefUnion", "kernel", "wgmma")  # that a version must have


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which tiles of keys each group of queries visits, and where their slots stand."""

    where: Array  # i32[B, M·P], position of every slot, NOWHERE where nobody may read
    code: Array  # i32[B, Nq, Nt], visited tiles in front: tile << 8 | delta << 1 | (holds unreadable slots)
    count: Array  # i32[B, Nq, 2]: visited tiles; those of them, in front, that need no mask


def backend() -> Any:
    """The module of Mosaic GPU.

    Raises:
      NotImplementedError: this JAX has none, or one without a name that the kernels use.
    """
    try:
        from jax.experimental.pallas import mosaic_gpu as plgpu
    except ImportError as error:
        raise NotImplementedError(f"jax {jax.__version__} can't load Mosaic GPU: {error}") from error
    for name in NAMES:
        if not hasattr(plgpu, name):
            raise NotImplementedError(f"Mosaic GPU of jax {jax.__version__} has no `{name}`")
    return plgpu


def tile_size(page_size: int, block: int, limit: int) -> int:
    """Slots of a tile: a multiple or a divisor of the page that divides a block of the table.

    Raises:
      NotImplementedError: none of 64 .. limit fits.
    """
    for tile in range(limit - limit % 64, 0, -64):
        whole = tile % page_size == 0 or page_size % tile == 0
        if whole and (block * page_size) % tile == 0:
            return tile
    raise NotImplementedError(
        f"Hopper kernels read tiles of 64 or 128 slots: pages of {page_size} slots in blocks of {block} "
        "entries hold no whole number of them"
    )


def check(q: Array, kv: Array, dtypes: tuple[str, ...], interpret: Any, what: str) -> None:
    """Raises NotImplementedError, naming the reason, for what the Hopper kernels don't do."""
    check_device(interpret)
    head_dim, page_size = kv.shape[3] // 2, kv.shape[2]
    if jnp.dtype(kv.dtype).name not in dtypes:
        raise NotImplementedError(
            f"the Hopper kernel for {what} reads {', '.join(dtypes)} pages, found {kv.dtype}"
        )
    if head_dim % 64 or head_dim > 256:
        raise NotImplementedError(f"Hopper kernels take head dims 64, 128, 192, 256, found {head_dim}")
    if page_size % 8:
        raise NotImplementedError(f"Hopper kernels take pages of a multiple of 8 slots, found {page_size}")
    if q.shape[1] > MAX_DELTAS:
        raise NotImplementedError(f"Hopper kernels take up to {MAX_DELTAS} deltas, found {q.shape[1]}")


def swizzled(dtype: Any) -> tuple[Any, ...]:
    """Transforms of a shared buffer that wgmma reads: rows of 128 bytes, swizzled."""
    plgpu = backend()
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def plan(
    first: Array,
    lo: Array,
    hi: Array,
    delta_index: Array,
    row_positions: Array,
    *,
    page_size: int,
    tile: int,
    window: int | None,
    full_first: bool,
) -> Plan:
    """Plans the visits.

    Args:
      first, lo, hi: i32[B, M].
      delta_index: i32[B, M/block].
      row_positions: i32[B, Nq, rows] of the queries; negative for padding.
      page_size: P.
      tile: slots of a tile.
      window: how many positions back a query sees, itself included; None for all.
      full_first: whether tiles that need no mask are visited first.
    """
    batch, groups = row_positions.shape[:2]
    entries = first.shape[1]
    slot = jnp.arange(page_size, dtype=jnp.int32)
    where = first[..., None] + slot
    owned = (slot >= lo[..., None]) & (slot < hi[..., None])
    real = row_positions >= 0
    latest = jnp.where(real, row_positions, -1).max(-1)  # [B, Nq]
    earliest = jnp.where(real, row_positions, NOWHERE).min(-1)
    # A slot behind the last query may not be written yet, one before every window may be given back.
    readable = owned & (where <= latest.max(1)[:, None, None])
    if window is not None:
        readable &= where > earliest.min(1)[:, None, None] - window
    where = jnp.where(readable, where, NOWHERE).reshape(batch, entries * page_size)

    tiles = where.reshape(batch, 1, -1, tile)
    inside = tiles < NOWHERE
    whole = inside.all(-1)
    lowest = tiles.min(-1)
    highest = jnp.where(inside, tiles, -1).max(-1)
    visited = lowest <= latest[..., None]  # [B, Nq, Nt]
    full = whole & (highest <= earliest[..., None])
    if window is not None:
        visited &= highest > earliest[..., None] - window
        full &= lowest > latest[..., None] - window
    full &= visited

    number = tiles.shape[2]
    per_tile = jnp.repeat(delta_index, number // delta_index.shape[1], axis=1)[:, None]
    code = jnp.arange(number, dtype=jnp.int32) << 8 | per_tile << 1 | (~whole).astype(jnp.int32)
    code = jnp.broadcast_to(code, (batch, groups, number))
    rank = jnp.where(full & full_first, 0, jnp.where(visited, 1, 2)).astype(jnp.int32)
    # Stable: equal ranks keep the order of the table.
    order = jnp.argsort(rank, axis=-1, stable=True)
    code = jnp.take_along_axis(code, order, axis=-1)
    count = jnp.stack([visited.sum(-1), full.sum(-1)], axis=-1).astype(jnp.int32)
    return Plan(where=where, code=code, count=count)


def pages_of_tile(tile: int, page_size: int) -> tuple[int, int]:
    """How many page boxes a tile is fetched by, and the slots of one box."""
    return (tile // page_size, page_size) if tile >= page_size else (1, tile)


def pad_rows(q: Array, rows: int) -> Array:
    """f32[B, R, T, K, G, H] -> bf16[B, R, K, rows, H], row t·G + g, padded with zeros."""
    batch, deltas, length, kv_heads, group, head_dim = q.shape
    q = q.transpose(0, 1, 3, 2, 4, 5).reshape(batch, deltas, kv_heads, length * group, head_dim)
    return jnp.pad(q, ((0, 0),) * 3 + ((0, rows - length * group), (0, 0))).astype(jnp.bfloat16)


def pad_positions(positions: Array, group: int, rows: int) -> Array:
    """i32[B, T] -> i32[B, rows]: the position of row t·G + g, -1 for padding."""
    found = jnp.repeat(positions, group, axis=1)
    return jnp.pad(found, ((0, 0), (0, rows - found.shape[1])), constant_values=-1)


def capped(x: Array, soft_cap: float | None) -> Array:
    """Scores in units of log2, after cap·tanh(x / cap). By exp2: the GPU's own tanh is off by 5e-4."""
    if soft_cap is None:
        return x * LOG2E
    return (soft_cap * LOG2E) * (1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2E / soft_cap)) + 1.0))


def check_device(interpret: Any) -> None:
    """Raises NotImplementedError where the kernels would neither be interpreted nor run on Hopper."""
    backend()
    if interpret:
        interpreted(interpret)
        return
    # A GPU that is only compiled for is named by an abstract mesh.
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device is not None else jax.devices()[0].device_kind
    if not any(name in kind for name in HOPPER):
        raise NotImplementedError(f"Hopper kernels need one of {', '.join(HOPPER)}, found {kind}")


def inside(page: Array, rows: int) -> Array:
    """Page numbers with those of empty entries, which may be anything, made numbers of pages."""
    return jnp.clip(page, 0, rows - 1)


def chunks(head_dim: int) -> list[tuple[int, int]]:
    """Start and size of the column ranges that the accumulator is kept in, one wgmma each."""
    width = head_dim if head_dim <= 128 else 128 if head_dim % 128 == 0 else 64
    return [(start, width) for start in range(0, head_dim, width)]


def full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    """A register array of one value."""
    plgpu = backend()
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def accumulate(acc: Array, weights: Array, values: Any, interpret: Any) -> Array:
    """acc f32[64, H] + weights bf16[64, S] in registers · values bf16[S, H] in shared memory, one wgmma.

    The interpreter knows no wgmma with an operand in registers, there it is a plain product.
    """
    plgpu = backend()
    if interpret:
        return acc + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)

    def multiply(ref: Any) -> None:
        plgpu.wgmma(ref, weights, values)

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def scores(queries: Any, keys: Any) -> Array:
    """f32[64, S] of queries bf16[64, H] and keys bf16[S, H], both in shared memory, one wgmma."""
    plgpu = backend()

    def multiply(ref: Any) -> Array:
        plgpu.wgmma(ref, queries, keys.transpose((1, 0)))
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((queries.shape[0], keys.shape[0]), jnp.float32))


def clear_unreadable(rows: Any, where: Any, head_dim: int) -> None:
    """Zeroes the values of slots that nobody may read: they can hold NaN, and 0 · NaN is NaN.

    Keys need no such care, their scores are replaced.
    """
    plgpu = backend()
    layout = plgpu.Layout.WGMMA
    alive = load(where, layout.reduce(1)) < NOWHERE
    for start in range(head_dim, 2 * head_dim, 64):
        values = rows.at[:, pl.ds(start, 64)]
        found = load(values, layout)
        mask = lax.broadcast_in_dim(alive, found.shape, [0])
        values[...] = jnp.where(mask, found, jnp.zeros_like(found))
    plgpu.commit_smem()


def widen(narrow: Any, where: Any, wide: Any) -> None:
    """int8 or float8 rows of a tile as bfloat16, exactly; zeros where nobody may read."""
    plgpu = backend()
    layout = plgpu.Layout.WGMMA
    alive = load(where, layout.reduce(1)) < NOWHERE
    for start in range(0, wide.shape[1], 128):
        found = load(narrow.at[:, pl.ds(start, 128)], layout)
        if found.dtype != jnp.int8:
            found = found.astype(jnp.float32)  # Hopper goes from float8 to bfloat16 through float16 only
        found = found.astype(jnp.bfloat16)
        mask = lax.broadcast_in_dim(alive, found.shape, [0])
        wide[:, pl.ds(start, 128)] = jnp.where(mask, found, jnp.zeros_like(found))
    plgpu.commit_smem()


def load(ref: Any, layout: Any) -> Array:
    """A shared buffer as a register array of `layout`; jax 0.10 takes an index besides."""
    plgpu = backend()
    if "idx" in inspect.signature(plgpu.load).parameters:
        return plgpu.load(ref, (), layout=layout)
    return plgpu.load(ref, layout=layout)


def interpreted(interpret: Any) -> Any:
    """What `plgpu.kernel` takes as `interpret`; True stands for the interpreter's defaults."""
    if interpret is None or interpret is False:
        return None
    plgpu = backend()
    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        raise NotImplementedError(
            f"Mosaic GPU kernels are interpreted by jax 0.11.2 or newer, found {jax.__version__}"
        )
    return params() if interpret is True else interpret
