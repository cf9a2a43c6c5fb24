"""What an engine counts, flattened: one mapping for the operator, one for a domain about itself."""

from __future__ import annotations

from collections.abc import Mapping

from jaxkv.cache.contract import CacheContract
from jaxkv.cache.match import Cause
from jaxkv.memory import Memory

Stats = dict[str, int | float]


def engine_stats(memory: Memory, counters: Mapping[str, int], shapes: int) -> Stats:
    """Everything, over all domains: for whoever runs the engine."""
    pool, index, metrics = memory.pool, memory.index, memory.metrics
    allocated = pool.live_count * pool.page_size
    written = int(pool.filled[pool.refcount > 0].sum())
    stats: Stats = {
        "pages_total": pool.num_pages,
        "pages_free": pool.free_count,
        "pages_live": pool.live_count,
        "pages_cached": index.pages,
        "pages_evicted": memory.evicted,
        "pages_pinned": index.pinned_pages,
        "page_bytes": memory.page_bytes,
        "fragmentation": 1 - written / allocated if allocated else 0.0,  # slots of live pages without a token
        "sequences": len(memory.live),
        "index_nodes": index.nodes,
        "index_tokens": index.tokens,
        "shapes": shapes,
        "matched_tokens": counters.get("matched", 0),
        "relocated_tokens": counters.get("relocated", 0),
        "forwarded_tokens": counters.get("forwarded", 0),
        "generated_tokens": counters.get("generated", 0),
        "lifetime_mean": metrics.lifetimes.mean,  # seconds, of entries that went
        "lifetime_p50": metrics.lifetimes.quantile(0.5),
        "reuse_gap_mean": metrics.gaps.mean,  # seconds between two uses of an entry
        "reuse_gap_p50": metrics.gaps.quantile(0.5),
    }
    if (states := memory.states) is not None:
        stats["states_total"] = states.slots.num_slots
        stats["states_free"] = states.slots.free_count
        stats["snapshots"] = len(states.snapshots)
        stats["snapshots_evicted"] = states.snapshots.evicted
        stats["state_bytes"] = states.nbytes  # of one
    if (held := memory.residency) is not None:
        stats["local_pages_total"] = held.capacity
        stats["local_pages_free"] = held.free_count
        stats["local_pages_evicted"] = held.evicted
        # Against local layers that keep a page for every one of the pool.
        stats["local_bytes_saved"] = (pool.num_pages - held.capacity) * memory.local_page_bytes
    if (tiers := memory.tiers) is not None:
        for name in ("spilled", "restored"):
            stats[f"entries_{name}"] = tiers.counts[name]
            stats[f"tokens_{name}"] = tiers.counts[f"{name}_tokens"]
        corrupt = tiers.disk.corrupt if tiers.disk is not None else 0
        stats["entries_refused"] = tiers.counts["refused"] + corrupt
        stats["host_tier_bytes"] = tiers.host.bytes if tiers.host is not None else 0
        stats["disk_tier_bytes"] = tiers.disk.bytes if tiers.disk is not None else 0
    for cause in ("evicted", "expired", "quota"):
        stats[f"entries_{cause}"] = metrics.removed[cause]
        stats[f"tokens_{cause}"] = metrics.removed[f"{cause}_tokens"]
    return stats | _lookups(metrics.lookups)


def domain_stats(memory: Memory, contract: CacheContract) -> Stats:
    """What a domain may know: its own lookups and what it has cached. Nothing of any other."""
    tree = memory.index.tree(contract.digest())
    quota = memory.quotas.get(contract.domain, memory.quota)
    return {
        "cached_tokens": tree.tokens if tree else 0,
        "cached_nodes": tree.nodes if tree else 0,
        "quota_pages_used": tree.rows if tree else 0,  # an upper bound: branches of a page count for each
        "quota_pages": -1 if quota is None else quota // memory.page_bytes,
        "quota_bytes_used": tree.charge(memory.page_bytes)
        if tree
        else 0,  # of pages and snapshots, in the pool
        "quota_bytes": -1 if quota is None else quota,
    } | _lookups(memory.metrics.of(contract.domain))


def _lookups(counter: Mapping[str, int]) -> Stats:
    names = ["lookups", "lookup_tokens", "hit_tokens", *(f"end_{cause}" for cause in Cause)]
    return {name: counter.get(name, 0) for name in names if name != f"end_{Cause.GRANULARITY}"}
