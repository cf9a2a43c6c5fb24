"""Isolation domains: whose KV it is. Two domains share nothing, whatever their names look like."""

from __future__ import annotations

import dataclasses

from jaxkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Domain:
    """Who may reuse what is cached: equal in every field, or nothing is shared.

    The names of a domain are secrets of whoever runs it: no error and no report about another domain
    shows them.
    """

    tenant: str = ""
    authorization: str = dataclasses.field(default="", repr=False)  # what the tenant's user may read
    instance: str = ""  # which deployment of the model answers
    salt: str = dataclasses.field(default="", repr=False)  # a secret that callers may add

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str):
                raise ConfigError(f"domain.{field.name} is a {type(value).__name__}, expected text")


FIELDS = tuple(field.name for field in dataclasses.fields(Domain))


def as_domain(value: object) -> Domain:
    """A tenant's name, or a Domain, as a Domain; anything else is a ConfigError."""
    if isinstance(value, Domain):
        return value
    if isinstance(value, str):
        return Domain(tenant=value)
    raise ConfigError(f"domain is a {type(value).__name__}, expected a tenant's name or a jaxkv.Domain")
