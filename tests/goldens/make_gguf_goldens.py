"""Makes hybrid_gguf.npz and .json beside this script: tiny Qwen3.5 hybrids, and their logits by Hugging Face
transformers and, from GGUF files, by llama.cpp.

    goldens/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0
    goldens/bin/python tests/goldens/make_gguf_goldens.py

in the environment that make_hybrid_goldens.py describes; some seconds, and prints how far the two are apart.
Neither torch nor transformers nor llama.cpp is needed to run the tests, which read:

hybrid_gguf.json  variant -> config.json of the text model
hybrid_gguf.npz   weights.<variant>.<name> f16, random weights under their Hugging Face names, to be read as
                  f32; tokens i32[64]; transformers.<variant> and llama.cpp.<variant> f32[64,64], logits

llama.cpp reads what `tests/hybrid_gguf.py` writes from those weights, in float32 with a float32 cache. It
takes key and value heads of recurrent layers to be of one size, as they are here and not in tiny_hybrid.npz.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
import transformers
from make_hybrid_goldens import draw

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import hybrid_gguf  # noqa: E402

TOKENS, VOCAB = 64, 64
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
RECURRENT, ATTENDS = "linear_attention", "full_attention"
# As many value heads as key heads; and three for each of two, whose order is not its own inverse.
VARIANTS: dict[str, dict[str, Any]] = {
    "equal": {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "num_hidden_layers": 2,
        "layer_types": [RECURRENT, ATTENDS],
    },
    "more": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "num_hidden_layers": 3,
        "layer_types": [RECURRENT, ATTENDS, RECURRENT],
    },
}


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, data: Any) -> None:
    """Takes the place of llama.cpp's log."""


def by_llama_cpp(path: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits f32[n, V] of all tokens in one batch."""
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model, path
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, params)
    assert context, path
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = int(token), i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert llama_cpp.llama_decode(context, batch) == 0
    pointers = [llama_cpp.llama_get_logits_ith(context, i) for i in range(len(tokens))]
    logits = np.array([np.ctypeslib.as_array(pointer, (VOCAB,)) for pointer in pointers], np.float32)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return logits


def main() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(35)
    tokens = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    arrays: dict[str, np.ndarray] = {"tokens": tokens}
    configs = {}
    for variant, settings in VARIANTS.items():
        config = transformers.Qwen3_5TextConfig(**copy.deepcopy({**TINY, **settings}))
        config.architectures = ["Qwen3_5ForCausalLM"]
        model = (
            transformers.Qwen3_5ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
        )
        weights = {}
        for name, value in model.state_dict().items():
            drawn = draw(name, tuple(value.shape), rng).astype(np.float16)
            arrays[f"weights.{variant}.{name}"] = drawn
            weights[name] = drawn.astype(np.float32)
        model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens).long()[None]).logits[0].numpy()
        configs[variant] = {**config.to_dict(), "dtype": "float32"}
        with tempfile.TemporaryDirectory() as folder:
            path = hybrid_gguf.write(
                Path(folder) / "model.gguf",
                configs[variant],
                weights,
                changes={"tokenizer.ggml.model": "none"},
            )
            peer = by_llama_cpp(path, tokens)
        arrays |= {f"transformers.{variant}": logits, f"llama.cpp.{variant}": peer}
        print(f"{variant}: largest logit {np.abs(logits).max():.3f}, apart {np.abs(logits - peer).max():.2e}")
    np.savez_compressed(HERE / "hybrid_gguf.npz", **arrays)
    text = json.dumps(configs, ensure_ascii=False, indent=1) + "\n"
    (HERE / "hybrid_gguf.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
