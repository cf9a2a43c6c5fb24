"""The tiny random models of families, and that their configs run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from experiments.config import ExperimentConfig
from experiments.subject import TINY_FAMILIES, load_subject, tiny_model
from jaxkv.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs" / "families"


@pytest.mark.parametrize("family", list(TINY_FAMILIES))
def test_a_familys_tiny_model_differs_by_what_sets_it_apart(family: str) -> None:
    """Two things at once: the row is honoured by the decoder, and there is a config that runs it."""
    model = load_subject(ExperimentConfig(model=f"tiny-random-{family}"))
    assert model.name == f"tiny-random-{family}"
    assert (CONFIGS / f"{family}.py").is_file()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 80)), jnp.int32)
    logits = jaxkv.forward_dense(model.params, tokens, config=model.config)
    assert bool(jnp.isfinite(logits).all())
    for name in TINY_FAMILIES[family]:
        if name in ("window", "rope", "rope_local", "activation", "embed_scale"):
            other = {
                "window": 7,
                "rope": tiny_model().config.rope,
                "rope_local": None,
                "activation": "silu",
                "embed_scale": 1.0,
            }[name]
            changed = dataclasses.replace(model.config, **{name: other})
            assert changed != model.config
            found = jaxkv.forward_dense(model.params, tokens, config=changed)
            assert float(jnp.abs(found - logits).max()) > 1e-4, name


def test_an_unknown_family_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'tiny-random-gema3'.*did you mean 'tiny-random-gemma3'"):
        tiny_model(0, "float32", "gema3")
