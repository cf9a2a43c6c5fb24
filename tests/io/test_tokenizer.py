"""Tokenizers: byte-pair models, SentencePiece, special tokens, chat templates, digests."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import pydoc_data.topics
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiny_models
import tokenizers

from jaxkv.errors import FormatError, TokenError
from jaxkv.io.chat import render_chat
from jaxkv.io.pretokenizers import PRE_TOKENIZERS
from jaxkv.io.tokenizer import (
    BytePairTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    tokenizer_from_definition,
    tokenizer_from_file,
    tokenizer_from_gguf,
)

GOLDENS = json.loads((Path(__file__).parent.parent / "goldens" / "tokenizer.json").read_text())
TEXTS = [text for text, _ in GOLDENS["ids"]]


def bpe(**changes) -> Tokenizer:
    return tokenizer_from_gguf({**tiny_models.bpe_metadata(), **changes})


def test_protocol():
    assert isinstance(bpe(), Tokenizer)


def test_merges_and_bytes():
    tokenizer = bpe()
    tokens = tiny_models.bpe_metadata()["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("x the")
    assert ids.dtype == np.int32
    assert [tokens[i] for i in ids] == ["x", "Ġthe"]
    assert tokenizer.vocab_size == 264


@pytest.mark.parametrize("pre", list(PRE_TOKENIZERS))
def test_round_trip_of_any_text(pre):
    tokenizer = bpe(**{"tokenizer.ggml.pre": pre})
    for text in TEXTS:
        expected = text
        if PRE_TOKENIZERS[pre].nfc:
            expected = tokenizers.normalizers.NFC().normalize_str(text)
        assert tokenizer.decode(tokenizer.encode(text)) == expected


CUTS = [
    ("gpt-2", "ab 123 can't  x", ["ab", " 123", " can", "'t", " ", " x"]),
    ("smollm", "ab 123 can't  x", ["ab", " ", "1", "2", "3", " can", "'t", " ", " x"]),
    ("llama-bpe", "ab 1234 CAN'T\n\n x", ["ab", " ", "123", "4", " CAN", "'T", "\n\n", " x"]),
    ("qwen2", "ab 12\n x", ["ab", " ", "1", "2", "\n", " x"]),
    ("qwen2", "कि हि!", ["क", "ि", " ह", "ि!"]),
    ("qwen35", "कि हि! 12", ["कि", " हि", "!", " ", "1", "2"]),
    ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
]


@pytest.mark.parametrize(("pre", "text", "words"), CUTS, ids=[c[0] for c in CUTS])
def test_where_each_pre_tokenizer_cuts(pre, text, words):
    from jaxkv.io.pretokenizers import pre_tokenizer

    cut = pre_tokenizer(pre, "test")[1].pre_tokenize_str(text)
    assert [text[lo:hi] for _, (lo, hi) in cut] == words


def test_special_tokens_are_parsed_only_when_asked():
    tokenizer = bpe()
    text = "<|im_start|>a<|im_end|>"
    assert tokenizer.encode(text).tolist()[::2] == [1, 2]
    plain = tokenizer.encode(text, parse_special=False)
    assert not {0, 1, 2} & set(plain.tolist())
    assert tokenizer.encode(text).tolist()[::2] == [1, 2]  # the switch left no state behind
    assert tokenizer.decode(plain) == text
    # user-defined tokens are part of the language, not control
    assert tokenizer.encode("<tool>", parse_special=False).tolist() == [3]


def test_bos_and_skipping_special_tokens():
    tokenizer = bpe()
    ids = tokenizer.encode("the", add_bos=True)
    assert ids[0] == tokenizer.bos_id == 1
    assert tokenizer.decode(ids) == "<|im_start|>the"
    assert tokenizer.decode(ids, skip_special=True) == "the"
    without = bpe(**{"tokenizer.ggml.bos_token_id": None})
    with pytest.raises(TokenError, match="there is no BOS token"):
        without.encode("x", add_bos=True)


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([1, 264], "token id at index 1 is 264, expected 0 to 263"),
        ([-1], "token id at index 0 is -1"),
        ([0.5], "expected one row of integers"),
        ([[1, 2]], r"shape \[1, 2\]"),
    ],
)
def test_ids_that_cannot_be_decoded(ids, match):
    with pytest.raises(TokenError, match=match):
        bpe().decode(ids)
    assert bpe().decode([]) == ""
    assert bpe().decode(np.asarray([5, 6], np.int64)) == bpe().decode([5, 6])


def test_digests_cover_the_definition_and_the_template_apart():
    base = bpe()
    other_pre = bpe(**{"tokenizer.ggml.pre": "gpt-2"})
    other_chat = bpe(**{"tokenizer.chat_template": "x"})
    assert base.digest == bpe().digest != other_pre.digest
    assert base.digest == other_chat.digest
    assert base.template_digest == other_pre.template_digest != other_chat.template_digest
    assert bpe(**{"tokenizer.chat_template": None}).chat_template is None


def test_definition_survives_json():
    base = bpe()
    again = tokenizer_from_definition(json.loads(json.dumps(base.definition())))
    assert (again.digest, again.template_digest) == (base.digest, base.template_digest)
    assert (again.bos_id, again.eos_ids) == (1, (2,))
    for text in TEXTS:
        np.testing.assert_array_equal(again.encode(text), base.encode(text))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"tokenizer.ggml.pre": "smolm"},
            "tokenizer.ggml.pre is 'smolm', .* did you mean 'smollm'",
        ),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a"] * 264}, "has duplicates"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type does not have 264 entries"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merge 'ab' is not of two tokens"),
        ({"tokenizer.ggml.merges": ["a b"]}, "merge 'a b' is not of two tokens"),
        ({"tokenizer.ggml.bos_token_id": 264}, "bos token id is 264, expected under 264"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is 'x', expected an integer"),
    ],
)
def test_malformed_metadata(changes, match):
    with pytest.raises(FormatError, match=match):
        bpe(**changes)


def test_metadata_without_a_tokenizer():
    assert tokenizer_from_gguf({}) is None


def test_tokenizer_json(tmp_path):
    model = tokenizers.models.BPE(vocab={t: i for i, t in enumerate(tiny_models.byte_tokens())}, merges=[])
    source = tokenizers.Tokenizer(model)
    source.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    source.decoder = tokenizers.decoders.ByteLevel()
    source.add_special_tokens(["<s>", "</s>"])
    path = tmp_path / "tokenizer.json"
    source.save(str(path))
    tokenizer = tokenizer_from_file(path, bos_id=256, eos_ids=[257], chat_template="{{bos_token}}")
    assert tokenizer.encode("é</s>", add_bos=True).tolist()[0::3] == [256, 257]
    assert tokenizer.decode(tokenizer.encode("é</s>")) == "é</s>"
    assert 257 not in tokenizer.encode("</s>", parse_special=False)
    assert tokenizer.apply_chat_template([]) == "<s>"
    path.write_text("{}")
    with pytest.raises(FormatError, match=r"not a tokenizer\.json"):
        tokenizer_from_file(path)
    with pytest.raises(FormatError, match="cannot be read"):
        tokenizer_from_file(tmp_path / "absent.json")


# SentencePiece


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(pydoc_data.topics.topics.values())[:200_000], encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "small"),
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<|user|>"],
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return folder / "small.model"


SPM_TEXTS = [t for t in TEXTS if "\x00" not in t]


def test_sentencepiece_file(sentencepiece_file):
    tokenizer = tokenizer_from_file(sentencepiece_file, bos_id=1, eos_ids=[2])
    assert isinstance(tokenizer, SentencePieceTokenizer)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    assert tokenizer.vocab_size == reference.get_piece_size() == 500
    for text in SPM_TEXTS:
        assert tokenizer.encode(text).tolist() == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference.encode(text))
    assert tokenizer.encode("The", add_bos=True)[0] == 1
    with pytest.raises(TokenError, match="token id at index 0 is 500, expected 0 to 499"):
        tokenizer.decode([500])


def test_sentencepiece_control_tokens(sentencepiece_file):
    tokenizer = tokenizer_from_file(sentencepiece_file, bos_id=1, eos_ids=[2])
    control = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file)).piece_to_id
    ids = tokenizer.encode("<|user|>statement</s>")
    assert ids[0] == control("<|user|>")
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "<|user|>statement</s>"
    assert tokenizer.decode(ids, skip_special=True) == "statement"
    assert not {2, control("<|user|>")} & set(tokenizer.encode("<|user|>a</s>", parse_special=False).tolist())


def test_sentencepiece_definition_survives_json(sentencepiece_file):
    base = tokenizer_from_file(sentencepiece_file)
    again = tokenizer_from_definition(json.loads(json.dumps(base.definition())))
    assert again.digest == base.digest
    np.testing.assert_array_equal(again.encode("Some text."), base.encode("Some text."))


def sentencepiece_metadata(path: Path) -> dict:
    """What llama.cpp's converter stores of a SentencePiece model."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    kinds = [
        (model.is_unknown, 2),
        (model.is_control, 3),
        (model.is_unused, 5),
        (model.is_byte, 6),
    ]
    ids = range(model.get_piece_size())
    types = [next((kind for test, kind in kinds if test(i)), 1) for i in ids]
    types = [4 if model.id_to_piece(i) == "<tool>" else types[i] for i in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_vocabulary_of_a_gguf_gives_the_same_ids(sentencepiece_file):
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(sentencepiece_file))
    reference = tokenizer_from_file(sentencepiece_file, bos_id=1, eos_ids=[2])
    for text in [*SPM_TEXTS, pydoc_data.topics.topics["assert"], "a <tool> b", "<|user|>x</s>"]:
        np.testing.assert_array_equal(tokenizer.encode(text), reference.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference.encode(text))
    bare = tokenizer_from_gguf(
        {**sentencepiece_metadata(sentencepiece_file), "tokenizer.ggml.add_space_prefix": False}
    )
    assert bare.encode("the").tolist() != reference.encode("the").tolist()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokenizer.ggml.scores": None}, "scores does not have 500 numbers"),
        ({"tokenizer.ggml.scores": [float("nan")] * 500}, "scores does not have 500 numbers"),
        ({"tokenizer.ggml.token_type": [1] * 500}, "0 tokens are of the unknown type"),
        ({"tokenizer.ggml.token_type": [2, 9] + [1] * 498}, "entry outside 1 to 6"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2]}, "precompiled_charsmap is present"),
    ],
)
def test_malformed_sentencepiece_metadata(sentencepiece_file, changes, match):
    with pytest.raises(FormatError, match=match):
        tokenizer_from_gguf({**sentencepiece_metadata(sentencepiece_file), **changes})


def test_damaged_sentencepiece_files(sentencepiece_file, tmp_path):
    raw = sentencepiece_file.read_bytes()
    path = tmp_path / "x.model"
    for content in (b"", b"not a model at all", raw[: len(raw) // 2]):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"x\.model: "):
            tokenizer_from_file(path)


def test_mistral_sentencepiece_models():
    if importlib.util.find_spec("mistral_common") is None:
        pytest.skip("mistral-common is not installed: its .model files are not checked")
    data = importlib.resources.files("mistral_common") / "data"
    models = [f for f in data.iterdir() if ".model" in f.name]
    assert models
    for file in models:
        with importlib.resources.as_file(file) as path:
            tokenizer = tokenizer_from_file(path, bos_id=1, eos_ids=[2])
            reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
            rebuilt = tokenizer_from_gguf(sentencepiece_metadata(path))
            for text in SPM_TEXTS:
                expected = reference.encode(text)
                assert tokenizer.encode(text, parse_special=False).tolist() == expected
                assert rebuilt.encode(text, parse_special=False).tolist() == expected


# Chat templates


def test_chat_template_of_the_model():
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    assert bpe().apply_chat_template(messages) == "<|im_start|>user\nhi <|im_end|><|im_end|>\n"
    with pytest.raises(TokenError, match="has no chat template"):
        bpe(**{"tokenizer.chat_template": None}).apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{m.role}}{% endfor %}",
            "a",
        ),
        ("{{ messages[0] | tojson }}", '{"role": "a", "content": "é<b>"}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "é<b>"),
        ("{{ strftime_now('%%') }}", "%"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{% if tools %}t{% else %}none{% endif %}", "none"),
        ("{{ undefined_name }}|{{ add_generation_prompt }}", "|True"),
        ("{{ extra }}", "1"),
    ],
)
def test_what_templates_may_use(template, expected):
    messages = [{"role": "a", "content": "é<b>"}, {"role": "b", "content": ""}]
    assert render_chat(template, messages, variables={"extra": 1}) == expected


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alt"),
        ("{% for %}", "cannot be rendered"),
        ("{{ messages.__class__.__mro__ }}", "cannot be rendered"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "cannot be rendered"),
        ("{{ messages.append(1) }}", "cannot be rendered"),
        ("{% include 'x' %}", "fails on these messages|cannot be rendered"),
        ("{{ 1 / 0 }}", "fails on these messages"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
    ],
)
def test_templates_that_fail_or_try_to_escape(template, match):
    with pytest.raises(TokenError, match=match):
        render_chat(template, [{"role": "user", "content": "x"}])


def test_malformed_definitions():
    with pytest.raises(FormatError, match="tokenizer kind is 'x'"):
        tokenizer_from_definition({"kind": "x"})
    with pytest.raises(FormatError, match="lacks 'bos_id'"):
        tokenizer_from_definition({"kind": "gguf.bpe"})
    assert isinstance(tokenizer_from_definition(bpe().definition()), BytePairTokenizer)
