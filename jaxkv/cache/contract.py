"""What must be equal for KV state to be reusable, as one typed record that names its differences.

The record's bytes are the root key of the prefix index and the head of a persisted cache. Every
field carries its tag, its type and its length, so no value of one field can look like another one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import Any

from jaxkv.cache import domain
from jaxkv.cache.domain import Domain
from jaxkv.errors import ConfigError, ContractError, FormatError
from jaxkv.model.config import ModelConfig

PAGE_LAYOUT = 1  # of what the bytes of pages and states mean; raise it with every change to them
# Isolation domains: whoever reads an error about a foreign cache must not learn whose it is.
WITHHELD_FIELDS = domain.FIELDS
WITHHELD = "(withheld)"
PUBLIC = "public"  # the scope of a declared prefix, which every domain may read

_MAGIC = b"jaxkv.contract.2\n"
_INT, _STR = b"i", b"s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheContract:
    """Everything that KV state depends on, and whom it belongs to.

    Digests are hex strings of content, never names: "" means that there is no such part.
    `docs/contract.md` says for each field which fault it prevents.
    """

    weights_digest: str
    architecture: str  # canonical JSON of the ModelConfig, RoPE included: `describe`
    kv_dtype: str
    scale_format: str = ""  # how quantized KV is scaled
    page_layout: int = PAGE_LAYOUT
    chunk_grid: int = 1  # exact hits end on multiples of this, in tokens
    tokenizer_digest: str = ""
    template_digest: str = ""
    adapter_digest: str = ""
    scope: str = ""  # "" = one domain's, `PUBLIC` = a declared prefix; no Domain can set it
    tenant: str = ""
    authorization: str = dataclasses.field(default="", repr=False)
    instance: str = ""
    salt: str = dataclasses.field(default="", repr=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), _kind(field)
            if type(value) is not kind:
                raise ConfigError(
                    f"contract field {field.name} is a {type(value).__name__}, expected {kind.__name__}"
                )
            if isinstance(value, int) and not 0 < value < 2**63:
                raise ConfigError(
                    f"contract field {field.name} is {value}, expected a positive 64-bit number"
                )

    def serialize(self) -> bytes:
        """The record as bytes: for each field, in order, tag, type, length, value. Injective."""
        parts = [_MAGIC]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # surrogatepass: any str has bytes, and no two have the same.
            text = str(value) if isinstance(value, int) else value
            kind = _INT if isinstance(value, int) else _STR
            raw = text.encode("utf-8", "surrogatepass")
            parts += [_sized(field.name.encode()), kind, _sized(raw)]
        return b"".join(parts)

    @classmethod
    def deserialize(cls, data: bytes) -> CacheContract:
        """Reads what `serialize` wrote; anything else is a FormatError that says where."""
        if not data.startswith(_MAGIC):
            raise FormatError(f"contract starts with {data[: len(_MAGIC)]!r}, expected {_MAGIC!r}")
        at = len(_MAGIC)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            tag, at = _read_sized(data, at)
            if tag != field.name.encode():
                raise FormatError(f"contract field is tagged {tag!r}, expected {field.name}")
            expected = _INT if _kind(field) is int else _STR
            kind, at = data[at : at + 1], at + 1
            if kind != expected:
                raise FormatError(f"contract field {field.name} has type {kind!r}, expected {expected!r}")
            raw, at = _read_sized(data, at)
            try:
                text = raw.decode("utf-8", "surrogatepass")
                values[field.name] = int(text) if kind == _INT else text
            except ValueError as error:
                raise FormatError(
                    f"contract field {field.name} is {raw[:40]!r}, expected a readable value"
                ) from error
        if at != len(data):
            raise FormatError(f"contract has {len(data) - at} bytes behind its last field, expected 0")
        try:
            contract = cls(**values)
        except ConfigError as error:
            raise FormatError(str(error)) from error
        if contract.serialize() != data:  # "+1" and "01" read as 1
            raise FormatError("contract has a number in another form than jaxkv writes")
        return contract

    def digest(self) -> bytes:
        """SHA-256 of the serialized record, 32 bytes: root key of the prefix index."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(self.serialize()).digest()

    def mismatch(self, other: CacheContract) -> tuple[tuple[str, Any, Any], ...]:
        """Fields that differ, as (name, ours, theirs), in the record's order.

        The architecture is taken apart: its names read like `architecture.rope.theta`. Values of
        `WITHHELD_FIELDS` are not given.
        """
        found: list[tuple[str, Any, Any]] = []
        for field in dataclasses.fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours == theirs:
                continue
            if field.name in WITHHELD_FIELDS:
                ours = theirs = WITHHELD
            inner = _inner_mismatch(ours, theirs) if field.name == "architecture" else []
            named = [(f"architecture.{n}", a, b) for n, a, b in inner]
            found += named or [(field.name, ours, theirs)]
        return tuple(found)

    @functools.cached_property
    def roots(self) -> tuple[bytes, bytes]:
        """Roots under which a prompt of this domain is looked up: its own, and that of declared prefixes."""
        return self.digest(), self.within(Domain(), scope=PUBLIC).digest()

    @property
    def domain(self) -> Domain:
        """Whose KV it is."""
        return Domain(**{name: getattr(self, name) for name in domain.FIELDS})

    def within(self, owner: Domain, *, scope: str = "") -> CacheContract:
        """The same contract for what belongs to `owner`."""
        return _within(self, owner, scope)

    def require(self, other: CacheContract) -> None:
        """Raises a ContractError naming the first field that differs and both values, if any."""
        if found := self.mismatch(other):
            name, ours, theirs = found[0]
            more = _more(len(found) - 1)
            raise ContractError(f"contract field {name} is {theirs!r}, expected {ours!r}{more}")


@functools.lru_cache(maxsize=4096)  # so that a request of a known domain hashes nothing
def _within(contract: CacheContract, owner: Domain, scope: str) -> CacheContract:
    return dataclasses.replace(contract, scope=scope, **dataclasses.asdict(owner))


def describe(config: ModelConfig) -> str:
    """Canonical JSON of a model's architecture: sorted keys, no spaces, ASCII."""
    return json.dumps(
        config.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def _more(count: int) -> str:
    if not count:
        return ""
    return f" ({count} more field differs)" if count == 1 else f" ({count} more fields differ)"


def _kind(field: dataclasses.Field[Any]) -> type:
    return int if field.type in ("int", int) else str


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def _read_sized(data: bytes, at: int) -> tuple[bytes, int]:
    size = int.from_bytes(data[at : at + 8], "big")
    end = at + 8 + size
    if at + 8 > len(data) or end > len(data):
        raise FormatError(f"contract is truncated: {len(data)} bytes, expected at least {end}")
    return data[at + 8 : end], end


def _inner_mismatch(ours: str, theirs: str) -> list[tuple[str, Any, Any]]:
    try:
        left, right = _flat(json.loads(ours)), _flat(json.loads(theirs))
    except (ValueError, RecursionError):
        return []
    return [
        (name, left.get(name), right.get(name))
        for name in sorted(left.keys() | right.keys())
        if name and (name not in left or name not in right or left[name] != right[name])
    ]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{name}.{key}" if name else key)
    return flat
