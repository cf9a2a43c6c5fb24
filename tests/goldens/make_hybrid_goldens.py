"""Makes the golden files of the Qwen3.5 hybrid from Hugging Face transformers.

    python -m venv goldens && goldens/bin/pip install torch==2.13.0 transformers==5.24.0
    goldens/bin/python tests/goldens/make_hybrid_goldens.py

Seconds on one core. Neither torch nor transformers is needed to run the tests, which read:

tiny_hybrid.npz   random weights under their Hugging Face names (f16, to be read as f32), tokens i32[200],
                  logits f32[200,128], and state.<layer> f32[Hv,Dk,Dv] and conv.<layer> f32[C,k-1] behind
                  the last token
tiny_hybrid.json  "text": config.json of the text model; "nested": that of the model with a vision tower,
                  whose text_config is the same
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
TOKENS = 200
TEXT = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}  # fmt: skip
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
IMAGES = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values that make every part matter: norms off 1, decays from slow to fast, open and closed gates."""
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.5, 8, shape))
    if name.endswith("dt_bias"):
        return rng.uniform(-6, -1, shape)
    normal = rng.standard_normal(shape)
    if "norm" in name:  # those of heads' outputs multiply by the weight, all others by 1 + weight
        return 0.3 * normal + ("linear_attn.norm" in name)
    if "conv1d" in name:
        return normal + 0.5
    return normal / math.sqrt(shape[-1]) * (3.0 if "embed" in name else 0.8)


def main() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    config = transformers.Qwen3_5TextConfig(**TEXT)
    config.architectures = ["Qwen3_5ForCausalLM"]
    nested = transformers.Qwen3_5Config(text_config=dict(TEXT), vision_config=VISION, **IMAGES)
    nested.architectures = ["Qwen3_5ForConditionalGeneration"]
    model = transformers.Qwen3_5ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    arrays: dict[str, np.ndarray] = {}
    weights = {}
    for name, value in model.state_dict().items():
        arrays[name] = draw(name, tuple(value.shape), rng).astype(np.float16)
        weights[name] = torch.from_numpy(arrays[name].astype(np.float32))
    model.load_state_dict(weights)
    tokens = rng.integers(0, 119, TOKENS).astype(np.int32)
    with torch.no_grad():
        out = model(torch.from_numpy(tokens).long()[None], use_cache=True)
    arrays |= {"tokens": tokens, "logits": out.logits[0].numpy()}
    for i, kind in enumerate(TEXT["layer_types"]):
        if kind == "linear_attention":
            arrays[f"state.{i}"] = out.cache.get_recurrent_state(i, state_idx=0)[0].numpy()
            arrays[f"conv.{i}"] = out.cache.get_conv_state(i, state_idx=0)[0, :, -3:].numpy()
    np.savez_compressed(HERE / "tiny_hybrid.npz", **arrays)
    configs = {"text": config.to_dict(), "nested": nested.to_dict()}
    for found in (configs["text"], configs["nested"]):
        found["dtype"] = "float32"
    text = json.dumps(configs, ensure_ascii=False, indent=1) + "\n"
    (HERE / "tiny_hybrid.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
