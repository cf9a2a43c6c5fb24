"""Hyperparameters: what config.json and GGUF metadata say, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from jaxkv.errors import FormatError
from jaxkv.io.configs import config_from_hf
from jaxkv.io.gguf_configs import config_from_gguf
from jaxkv.model.config import RopeConfig
from jaxkv.model.rope import inverse_frequencies

GOLDENS = Path(__file__).parent.parent / "goldens"
ROPES = json.loads((GOLDENS / "rope.json").read_text())
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**changes):
    return config_from_hf({**tiny_models.CONFIG, **changes})


@pytest.mark.parametrize("row", ROPES, ids=lambda r: r["config"]["rope_parameters"]["rope_type"])
def test_rope_scalings_equal_those_of_transformers(row):
    rope = config(rope_theta=None, **row["config"]).rope
    expected = np.asarray(row["inverse_frequencies"])  # computed in float32
    np.testing.assert_allclose(inverse_frequencies(rope), expected, rtol=2e-6)
    assert math.isclose(rope.magnitude, row["magnitude"], rel_tol=1e-12)


def test_both_spellings_of_rope_settings_are_the_same():
    new = config(rope_theta=None, rope_parameters={**LLAMA3, "rope_theta": 500_000.0})
    old = config(rope_theta=500_000.0, rope_scaling=LLAMA3)
    oldest = {"type" if k == "rope_type" else k: v for k, v in LLAMA3.items()}
    assert new == old == config(rope_theta=500_000.0, rope_scaling=oldest)
    assert old.rope.scaling == "llama3"


def test_defaults_are_those_of_the_family():
    keys = ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta")
    data = {k: v for k, v in tiny_models.CONFIG.items() if k not in keys}
    found = config_from_hf(data)
    assert (found.max_positions, found.norm_eps, found.tie_embeddings) == (2048, 1e-6, False)
    assert found.rope == RopeConfig(theta=10_000.0, rotary_dim=8)


def test_head_dim_and_kv_heads_are_derived_when_absent():
    data = {k: v for k, v in tiny_models.CONFIG.items() if "key_value" not in k and k != "head_dim"}
    found = config_from_hf({**data, "num_attention_heads": 4})
    assert (found.head_dim, found.num_kv_heads) == (8, 4)
    with pytest.raises(FormatError, match=r"hidden_size is 32, expected a multiple of num_att.* 6"):
        config(head_dim=None)


@pytest.mark.parametrize(("eos", "expected"), [(5, (5,)), ([3, 4], (3, 4)), (None, ())])
def test_eos_may_be_one_several_or_none(eos, expected):
    assert config(eos_token_id=eos).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_scaling": {**LLAMA3, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        ({"sliding_window": 4096}, "sliding_window is 4096, expected it absent"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor is -1"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "more than low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0, expected more than 1"),
        ({"model_type": "mistral"}, "model_type is 'mistral' .* LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_size": None}, "hidden_size is None, expected a non-negative integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": "32000"}, "vocab_size is '32000'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"eos_token_id": 264}, "eos token id is 264, expected under vocab_size 264"),
        ({"num_key_value_heads": 4}, "num_heads is 6, expected a multiple of num_kv_heads 4"),
    ],
)
def test_settings_that_are_refused_by_name(changes, match):
    with pytest.raises(FormatError, match=match) as caught:
        config(**changes)
    assert str(caught.value).startswith("config.json: ")


def gguf_config(rope_factors=None, **changes):
    named = {"llama." + k: v for k, v in changes.items()}
    metadata = {"general.architecture": "llama", **tiny_models.gguf_metadata(), **named}
    return config_from_gguf(metadata, vocab_size=264, tied=True, rope_factors=rope_factors)


def test_gguf_linear_and_yarn():
    linear = gguf_config(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert (linear.rope.scaling, linear.rope.factor) == ("linear", 4.0)
    assert gguf_config(**{"rope.scale_linear": 4.0}) == linear
    settings = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    hf = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert gguf_config(**settings).rope == config(rope_scaling=hf).rope


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_gguf_llama3_is_recovered_from_its_factors(factor):
    plain = RopeConfig(theta=500_000.0, rotary_dim=8)
    scaled = config(rope_theta=500_000.0, rope_scaling={**LLAMA3, "factor": factor}).rope
    factors = (inverse_frequencies(plain) / inverse_frequencies(scaled)).astype(np.float32)
    theta = {"rope.freq_base": 500_000.0}
    found = gguf_config(factors, **theta).rope
    np.testing.assert_allclose(inverse_frequencies(found), inverse_frequencies(scaled), rtol=1e-6)
    assert gguf_config(np.ones(4, np.float32)).rope.scaling == "default"
    with pytest.raises(FormatError, match="rope factors are not those of llama3"):
        gguf_config(np.asarray([1, 3, 5, 9], np.float32), **theta)
    with pytest.raises(FormatError, match=r"rope factors have shape \[3\], expected 4 positive"):
        gguf_config(np.ones(3, np.float32))
    with pytest.raises(FormatError, match="expected none beside a tensor of rope factors"):
        gguf_config(factors, **{"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
