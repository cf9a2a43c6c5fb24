"""Errors that jaxkv raises on purpose. Each message is one sentence: field, found, expected."""

from __future__ import annotations


class JaxkvError(Exception):
    """Base of every error that jaxkv raises on purpose."""


class ConfigError(JaxkvError, ValueError):
    """A configuration value is unknown, missing or out of range."""


class TokenError(JaxkvError, ValueError):
    """Token ids are empty, of the wrong type or outside the vocabulary."""


class CapacityError(JaxkvError):
    """The request does not fit: too few pages, or more positions than the model has."""


class HandleError(JaxkvError):
    """A sequence or pages value is used after it was released or donated."""


class ContractError(JaxkvError):
    """KV state made under one contract is offered to another."""


class RelocationError(JaxkvError):
    """The model's positions do not compose, so keys cannot be moved."""


class FormatError(JaxkvError, ValueError):
    """A file is truncated, corrupt, of an unknown format or does not hold what it must."""


class FetchError(JaxkvError):
    """A model could not be fetched."""


class ProcessError(JaxkvError):
    """Another process of a distributed run ended, or is not there."""


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str:
    """Returns ", did you mean 'x'?" for the closest known name, or "" when nothing is close."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
