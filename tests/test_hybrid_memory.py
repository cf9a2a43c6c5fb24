"""States are written in place; a snapshot of the 27B hybrid has the bytes that its config says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_steps_memory import abstract_table, f32, i32
from tiny_hybrid import SHAPE, hybrid_config

import jaxkv
from jaxkv import steps
from jaxkv.cache.pages import storage_dtype
from jaxkv.model.params import abstract_params
from jaxkv.model.sampling import SamplingInput
from jaxkv.reuse.ledger import attention_flops, token_flops

B, SLOTS = 2, 60_000
CONFIG = hybrid_config(num_layers=2, layer_types=("recurrent", "global"))


def abstract_states(dtype: str) -> jaxkv.StatePool:
    rows = len(CONFIG.recurrent_layers) * SLOTS
    conv = (rows, SHAPE.channels, SHAPE.conv_width - 1)
    return jaxkv.StatePool(
        conv=jax.ShapeDtypeStruct(conv, storage_dtype(dtype, jax.default_backend())),
        state=f32(rows, SHAPE.num_value_heads, SHAPE.key_dim, SHAPE.value_dim),
        num_slots=SLOTS,
        dtype=dtype,
    )


def abstract_pages() -> jaxkv.KVPages:
    return jaxkv.KVPages(kv=f32(64, 2, 16, 32), num_pages=64, dtype="float32")


def lower(kind: str, dtype: str) -> Any:
    params = abstract_params(CONFIG, jnp.dtype(dtype))
    pages = (abstract_pages(), abstract_states(dtype))
    states = jaxkv.StateInput(read=i32(B), write=i32(B))
    if kind == "step":
        groups = (jaxkv.GroupInput(slots=i32(B, 16), table=abstract_table(1)),)
        step = jaxkv.StepInput(
            tokens=i32(B, 16), positions=i32(B, 16), lengths=i32(B), groups=groups, states=states
        )
        return steps._step.lower(params, pages, step, config=CONFIG, logits="last", capture=False)
    sampling = SamplingInput(
        temperature=f32(B), top_k=i32(B), top_p=f32(B), seed=jax.ShapeDtypeStruct((B,), jnp.uint32)
    )
    inputs = jaxkv.DecodeInput(
        logits=f32(B, CONFIG.vocab_size), positions=i32(B), limits=i32(B), stop=i32(B, 4),
        slots=(i32(B, 8),), tables=(abstract_table(1),), sampling=sampling, states=states,
    )  # fmt: skip
    return steps._decode_many.lower(params, pages, inputs, config=CONFIG)


@pytest.mark.parametrize(("kind", "dtype"), [("step", "bfloat16"), ("decode_many", "float32")])
def test_states_are_written_in_place(kind: str, dtype: str) -> None:
    """All arrays are aliased, and a step allocates nothing near the pool's size."""
    states = abstract_states(dtype)
    pool = sum(x.size * x.dtype.itemsize for x in (states.conv, states.state))
    assert pool > 60 << 20
    memory = lower(kind, dtype).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool + 64 * 2 * 16 * 32 * 4
    assert memory.temp_size_in_bytes < pool // 16


def qwen27b() -> jaxkv.ModelConfig:
    """The text model of Qwen3.6-27B: 64 layers, each fourth of which attends."""
    kinds = ("recurrent", "recurrent", "recurrent", "global") * 16
    return jaxkv.ModelConfig(
        family="qwen3_5", vocab_size=248_320, num_layers=64, embed_dim=5120, num_heads=24, num_kv_heads=4,
        head_dim=256, mlp_dim=17_408, max_positions=262_144, layer_types=kinds, qk_norm=True,
        attention_gate=True, rope=jaxkv.RopeConfig(theta=1e7, rotary_dim=64),
        recurrent=jaxkv.RecurrentConfig(
            num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128, conv_width=4
        ),
    )  # fmt: skip


def test_a_snapshot_of_the_27b_hybrid_has_its_published_bytes() -> None:
    config = qwen27b()
    shape = config.recurrent
    assert shape is not None
    assert len(config.recurrent_layers) == 48
    states = jax.eval_shape(lambda: jaxkv.make_states(config, num_slots=1, dtype="bfloat16", platform="gpu"))
    assert states.state.size * 4 == 150_994_944
    assert states.conv.size * states.conv.dtype.itemsize == 2_949_120
    assert config.state_bytes(2) == 153_944_064
    # Pages know nothing of it: 65,536 bytes a token, whatever the page size.
    assert config.kv_bytes_per_token(2) == 65_536
    pages = jax.eval_shape(
        lambda: jaxkv.make_pages(
            config, config.groups[0], num_pages=1, page_size=8, dtype="bfloat16", platform="gpu"
        )
    )
    assert pages.kv.size * 2 == 8 * 65_536
    assert config.state_bytes(2) // 65_536 == 2_349  # tokens of KV


def test_flops_of_the_27b_hybrid_are_those_of_the_paper() -> None:
    assert token_flops(qwen27b()) == pytest.approx(48.70e9, rel=1e-3)
    assert attention_flops(qwen27b()) == 393_216


def test_parameters_are_counted() -> None:
    params = abstract_params(CONFIG)
    total = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
    assert total == CONFIG.body_params + 2 * CONFIG.vocab_size * CONFIG.embed_dim


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recurrent": None}, "recurrent is None, expected a RecurrentConfig exactly where"),
        ({"layer_types": ("global",) * 3}, "expected a RecurrentConfig exactly where layer_types"),
        ({"layer_types": ("recurrent",) * 3}, "recurrent layers only, expected at least one that attends"),
        ({"layer_types": ("recurent", "global", "global")}, "did you mean 'recurrent'"),
    ],
)
def test_a_config_that_does_not_fit_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(jaxkv.ConfigError, match=message):
        hybrid_config(**changes)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_value_heads", 3, "a multiple of num_key_heads 2"),
        ("conv_width", 1, "at least 2"),
        ("key_dim", 0, "recurrent.key_dim is 0, expected a positive number"),
    ],
)
def test_a_recurrent_layer_out_of_range_is_refused(field: str, value: int, message: str) -> None:
    values = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 6, "conv_width": 4}
    with pytest.raises(jaxkv.ConfigError, match=message):
        jaxkv.RecurrentConfig(**{**values, field: value})


def test_a_config_is_read_back_from_its_plain_form() -> None:
    config = hybrid_config(image_token_ids=(5,))
    assert jaxkv.ModelConfig.from_dict(config.to_dict()) == config
    plain = jaxkv.ModelConfig.from_dict({**config.to_dict(), "recurrent": {**config.to_dict()["recurrent"]}})
    assert plain.recurrent == SHAPE
    with pytest.raises(jaxkv.ConfigError, match="recurrent config key 'key_dims' is unknown"):
        jaxkv.ModelConfig.from_dict({**config.to_dict(), "recurrent": {"key_dims": 1}})
