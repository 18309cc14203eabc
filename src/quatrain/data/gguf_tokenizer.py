"""Builds the tokenizer that a GGUF file describes: vocabulary, merges, splitting rule, special tokens.

Data flow: `GGUFHeader.metadata` -> `gguf_tokenizer` -> `tokenizer.py`. The splitting rules and their
names are those of llama.cpp's `llama-vocab.cpp`, which match the `tokenizer.json` of each model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from quatrain.config.errors import shown
from quatrain.config.files import checked
from quatrain.weights.gguf_header import SpecialIds

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

# Token types of the GGUF specification.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The rule of Llama 3, except that each digit is a separate piece.
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

# Value of tokenizer.ggml.pre -> splitting rule; the names on one line are synonyms.
_RULES = {
    "smollm": "smollm",
    **dict.fromkeys(("gpt-2", "default"), "gpt2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
}

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


Token = Annotated[str, Field(max_length=1024)]
"""Longer than any token in use; SentencePiece's merges take quadratic time in the length of a token."""


class _Metadata(SpecialIds):
    """The `tokenizer.*` keys of a GGUF file; with a key missing, the functions below say what it means."""

    model: Annotated[str | None, Field(alias="tokenizer.ggml.model")] = None
    pre: Annotated[str | None, Field(alias="tokenizer.ggml.pre")] = None
    tokens: Annotated[list[Token] | None, Field(alias="tokenizer.ggml.tokens")] = None
    merges: Annotated[list[str] | None, Field(alias="tokenizer.ggml.merges")] = None
    scores: Annotated[list[float] | None, Field(alias="tokenizer.ggml.scores")] = None
    token_type: Annotated[list[int] | None, Field(alias="tokenizer.ggml.token_type")] = None
    add_bos: Annotated[bool | None, Field(alias="tokenizer.ggml.add_bos_token")] = None
    add_eos: Annotated[bool | None, Field(alias="tokenizer.ggml.add_eos_token")] = None
    space_prefix: Annotated[bool | None, Field(alias="tokenizer.ggml.add_space_prefix")] = None
    chat_template: Annotated[str | None, Field(alias="tokenizer.chat_template")] = None


def gguf_tokenizer(metadata: Mapping[str, Any], source: str = "the GGUF file") -> PreTrainedTokenizerFast:
    """The tokenizer described by the `tokenizer.*` keys of a GGUF file, which `source` names.

    `tokenizer.ggml.model` must be `gpt2` (byte-level BPE; splitting rules smollm, gpt-2, llama-bpe, qwen2) or
    `llama` (SentencePiece BPE with byte fallback; merges are ordered by score). The file's `add_bos_token`
    decides whether a BOS token is added in front of a string; without that key it is added for `llama` and
    for the rule llama-bpe. The chat template is read from the file; if there is none and the vocabulary
    contains `<|im_start|>`, plain ChatML is used.

    Raises ValueError for another tokenizer kind or splitting rule, and for missing or inconsistent metadata.
    """
    from transformers import PreTrainedTokenizerFast

    checked(_Metadata, metadata, source)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        rule = _rule(metadata)
        tokenizer, add_bos = _byte_level_bpe(metadata, rule), rule == "llama3"
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(metadata), True
    else:
        raise ValueError(
            f"GGUF tokenizers of the kinds gpt2 and llama are supported; tokenizer.ggml.model is "
            f"{shown(kind)}; set model.tokenizer to the model's Hugging Face folder or hub id"
        )
    special = _special_tokens(metadata)
    _add_tokens(tokenizer, metadata)
    _add_template(tokenizer, metadata, special, add_bos)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **special,
        chat_template=_chat_template(metadata),
        clean_up_tokenization_spaces=False,
    )


def _rule(metadata: Mapping[str, Any]) -> str:
    # Files written before this key existed use GPT-2's rule.
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in _RULES:
        raise ValueError(
            f"the splitting rule (tokenizer.ggml.pre) must be one of {', '.join(_RULES)}; the file has "
            f"{shown(name)}; set model.tokenizer to the model's Hugging Face folder or hub id"
        )
    return _RULES[name]


def _byte_level_bpe(metadata: Mapping[str, Any], rule: str) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = [tuple(merge.split(" ")) for merge in _array(metadata, "merges")]
    try:
        # Llama 3 uses a piece that is in the vocabulary as one token, without applying merges.
        model = models.BPE(_vocabulary(metadata), merges, ignore_merges=rule == "llama3")
    except Exception as error:  # tokenizers raises plain Exception; its text names the invalid merge
        raise ValueError(
            f"tokenizer.ggml.merges must consist of tokens in tokenizer.ggml.tokens: {error!s:.200}"
        ) from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _splitter(rule)
    tokenizer.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _splitter(rule: str) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == "gpt2":
        return gpt2
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    pattern = Regex({"llama3": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}[rule])
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), to_bytes])


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(metadata)
    unknown = checked(SpecialIds, metadata, "the GGUF file").unknown or 0
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_from_scores(metadata, vocabulary),
            unk_token=_token(metadata, "tokenizer.ggml.unknown_token_id", unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    prefix = [normalizers.Prepend("▁")] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if space_prefix else []))
    return tokenizer


def _merges_from_scores(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    # SentencePiece joins the two neighbouring pieces whose concatenation has the highest score. This is BPE
    # with merges ordered by the score of their result. Only pieces of the type "normal" are results.
    scores, types = _array(metadata, "scores"), _types(metadata)
    ranked = []
    for token, index in vocabulary.items():
        if types[index] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], index, (left, right)))
    return [pair for _, _, pair in sorted(ranked)]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken

    tokens, types = _array(metadata, "tokens"), _types(metadata)
    typed = list(zip(tokens, types, strict=True))
    special = [
        AddedToken(t, special=True, normalized=False) for t, kind in typed if kind in (_CONTROL, _UNKNOWN)
    ]
    tokenizer.add_special_tokens(special)
    # User-defined tokens are always matched whole, but are not special: decoding keeps them.
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED])


def _add_template(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], special: Mapping[str, str], add_bos: bool
) -> None:
    """Makes the tokenizer add BOS and EOS around a string, if the file's metadata asks for it."""
    from tokenizers import processors

    bos, eos = [], []
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos) and "bos_token" in special:
        bos = [special["bos_token"]]
    if metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special:
        eos = [special["eos_token"]]
    ids = [(token, tokenizer.token_to_id(token)) for token in bos + eos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos], pair=[*bos, "$A", *eos, *bos, "$B:1", *eos], special_tokens=ids
    )


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = checked(SpecialIds, metadata, "the GGUF file").model_dump()
    return {
        name: _token(metadata, f"tokenizer.ggml.{word}_token_id", ids[word])
        for name, word in names.items()
        if ids[word] is not None
    }


def _chat_template(metadata: Mapping[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is None and {"<|im_start|>", "<|im_end|>"} <= set(_array(metadata, "tokens")):
        return CHATML
    return template


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens = _array(metadata, "tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ValueError(f"tokenizer.ggml.tokens must contain each token once; {shown(twice)} occurs twice")
    return vocabulary


def _types(metadata: Mapping[str, Any]) -> Sequence[int]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [_NORMAL] * len(_array(metadata, "tokens"))
    return _array(metadata, "token_type")


def _array(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise ValueError(f"the GGUF file has no tokenizer.ggml.{name}, which its tokenizer needs")
    if name in ("scores", "token_type"):
        tokens = _array(metadata, "tokens")
        if len(values) != len(tokens):
            raise ValueError(
                f"tokenizer.ggml.{name} must have one entry per token ({len(tokens)}); the file has "
                f"{len(values)}"
            )
    return values


def _token(metadata: Mapping[str, Any], key: str, index: int) -> str:
    tokens = _array(metadata, "tokens")
    if not 0 <= index < len(tokens):
        raise ValueError(
            f"{key} must be an id in the vocabulary of {len(tokens)} tokens; the file has {index}"
        )
    return tokens[index]
