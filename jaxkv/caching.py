"""What an engine lets its user do with the cache: declare, pin, limit, forget. Part of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxkv.cache.contract import PUBLIC
from jaxkv.cache.domain import Domain, as_domain
from jaxkv.cache.sequence import Sequence
from jaxkv.cache.tree import Pin
from jaxkv.checks import check_seconds, check_tokens
from jaxkv.core import EngineCore, interruptible
from jaxkv.errors import ConfigError, HandleError
from jaxkv.persistence import CacheLoaded, CacheSaved, load, save
from jaxkv.results import Reuse
from jaxkv.windows import refuse_bound


class CacheControl(EngineCore):
    """The methods of `Engine` that decide what stays in its cache."""

    @interruptible
    def publish_prefix(self, tokens: Any, *, pin_seconds: float | None = None) -> Reuse:
        """Declares a prefix that every domain may read, such as a system prompt, and computes it.

        Its pages are shared read-only and count towards no quota; what domains put behind it stays
        theirs. Only what `reuse_granularity` lets be cached is shared: with "chunk", whole chunks.

        Args:
          tokens: the prefix.
          pin_seconds: keeps it in the cache for so long; None leaves it to eviction.

        Raises:
          TokenError, CapacityError: as in `prefill`.
          ConfigError: the engine caches nothing, or `pin_seconds` is no positive time.
        """
        seconds = check_seconds("pin_seconds", pin_seconds)
        if not self._prefix_cache:
            raise ConfigError("prefix_cache is False, expected an engine that caches prefixes")
        contract = self._contract.within(Domain(), scope=PUBLIC)
        result = self._prefill(tokens, contract, reuse=True, priority=0)
        if seconds is not None:
            self._memory.pin(contract, result.sequence.tokens, seconds)
        # The sequence is not handed out: what would be appended to it would be public as well.
        self.release(result.sequence)
        return result.reuse

    @interruptible
    def cached(self, tokens: Any, domain: str | Domain = "default") -> int:
        """Leading tokens of a prompt that `prefill` would find in the pool now; changes nothing."""
        tokens = check_tokens(tokens, self.config)
        self._memory.begin()
        if not self._prefix_cache:
            return 0
        limit = len(tokens) if self._grid == 1 else len(tokens) - 1
        return self._memory.peek(self._contract.within(as_domain(domain)), tokens, limit=limit)[0]

    @interruptible
    def withdraw_prefixes(self) -> None:
        """Takes back all declared prefixes. Sequences that use their pages keep them."""
        self._memory.begin()
        self._memory.forget(self._contract.within(Domain(), scope=PUBLIC))

    @interruptible
    def forget_domain(self, domain: str | Domain) -> None:
        """Drops all that a domain has cached. Its live sequences keep their pages."""
        self._memory.begin()
        self._memory.forget(self._contract.within(as_domain(domain)))

    @interruptible
    def pin(
        self, text: Sequence | Any, *, seconds: float | None = None, domain: str | Domain = "default"
    ) -> Pin:
        """Keeps a text's cached prefix from eviction, for `seconds` or until `unpin`.

        Args:
          text: a sequence, or token ids of a prompt of `domain`.
          seconds: None keeps it until `unpin`.
          domain: whose cache, if `text` is token ids.

        Returns:
          The pin; its `length` says how many tokens were cached and are kept.
        """
        seconds = check_seconds("seconds", seconds)
        if isinstance(text, Sequence):
            self._require_live(text)
            return self._memory.pin(text.contract, text.tokens, seconds)
        self._memory.begin()
        tokens = check_tokens(text, self.config)
        return self._memory.pin(self._contract.within(as_domain(domain)), tokens, seconds)

    @interruptible
    def unpin(self, pin: Pin) -> None:
        """Takes a pin off; one that has expired is off already."""
        if not isinstance(pin, Pin):
            raise HandleError(f"pin is a {type(pin).__name__}, expected what Engine.pin returned")
        self._memory.begin()
        self._memory.index.unpin(pin.id)

    @interruptible
    def set_quota(self, domain: str | Domain, quota_bytes: int | None) -> None:
        """Limits the KV and snapshots that a domain may have cached, in bytes; None lifts the limit.

        It holds in the pool, in host memory and on disk, in each of them. Where the domain has more, its own
        entries go, in the eviction policy's order, in tiers the oldest first. Domains whose quotas together
        fit into the pool beside all running sequences never evict each other.
        """
        contract = self._contract.within(as_domain(domain))
        self._memory.begin()
        self._memory.set_quota(contract, self._check_quota(quota_bytes))

    @interruptible
    def save_cache(self, path: str | Path) -> CacheSaved:
        """Writes everything that the pool has cached, of all domains, into a directory.

        An earlier cache there is replaced in one step: a process that dies before leaves it as it was.
        Secrets of domains stand in it in plain text; it is created readable by its owner only.

        Raises:
          FormatError: `path` holds something else.
          OSError: it cannot be written.
        """
        self._memory.begin()
        refuse_bound(self._memory, "a saved cache")
        return save(self._memory, self._contract, path)

    @interruptible
    def load_cache(self, path: str | Path) -> CacheLoaded:
        """Loads a saved cache, most valuable entries first, as far as there are free pages.

        Nothing that is cached goes for it. The result says what was taken and what was left out.

        Raises:
          FormatError: not a saved cache, or a damaged one; says what is wrong.
          ContractError: saved under another contract; names the first field that differs.
        """
        self._memory.begin()
        refuse_bound(self._memory, "a saved cache")
        return load(self._memory, self._contract, path)
