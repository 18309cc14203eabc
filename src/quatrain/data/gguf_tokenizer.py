"""Builds the tokenizer that a GGUF file describes: vocabulary, merges, splitting rule, special tokens.

Data flow: `GGUFHeader.metadata` -> `gguf_tokenizer` -> `tokenizer.py`. The splitting rules and their
names are those of llama.cpp's `llama-vocab.cpp`, which match the `tokenizer.json` of each model.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    # Files written before this key existed use GPT-2's rule.
    pre: Annotated[str, Field(alias="tokenizer.ggml.pre")] = "gpt-2"
    tokens: Annotated[list[Token] | None, Field(alias="tokenizer.ggml.tokens")] = None
    merges: Annotated[list[str] | None, Field(alias="tokenizer.ggml.merges")] = None
    scores: Annotated[list[float] | None, Field(alias="tokenizer.ggml.scores")] = None
    token_type: Annotated[list[int] | None, Field(alias="tokenizer.ggml.token_type")] = None
    add_bos: Annotated[bool | None, Field(alias="tokenizer.ggml.add_bos_token")] = None
    add_eos: Annotated[bool, Field(alias="tokenizer.ggml.add_eos_token")] = False
    space_prefix: Annotated[bool, Field(alias="tokenizer.ggml.add_space_prefix")] = True
    chat_template: Annotated[str | None, Field(alias="tokenizer.chat_template")] = None

    def array(self, name: str) -> Any:
        """The array `tokenizer.ggml.<name>`; raises ValueError if it is missing or of the wrong length."""
        values = getattr(self, name)
        if values is None:
            raise ValueError(f"the GGUF file has no tokenizer.ggml.{name}, which its tokenizer needs")
        count = len(self.array("tokens")) if name in ("scores", "token_type") else len(values)
        if len(values) != count:
            raise ValueError(
                f"tokenizer.ggml.{name} must have one entry per token ({count}); the file has {len(values)}"
            )
        return values

    def token(self, name: str, index: int) -> str:
        """The token `index`, which the file names for `tokenizer.ggml.<name>_token_id`."""
        tokens = self.array("tokens")
        if not 0 <= index < len(tokens):
            raise ValueError(
                f"tokenizer.ggml.{name}_token_id must be an id in the vocabulary of {len(tokens)} tokens; "
                f"the file has {index}"
            )
        return tokens[index]

    def types(self) -> list[int]:
        if self.token_type is None:
            return [_NORMAL] * len(self.array("tokens"))
        return self.array("token_type")

    def vocabulary(self) -> dict[str, int]:
        tokens = self.array("tokens")
        vocabulary = {token: index for index, token in enumerate(tokens)}
        if len(vocabulary) != len(tokens):
            twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
            raise ValueError(
                f"tokenizer.ggml.tokens must contain each token once; {shown(twice)} occurs twice"
            )
        return vocabulary


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

    file = checked(_Metadata, metadata, source)
    remedy = "set model.tokenizer to the model's Hugging Face folder or hub id"
    if file.model == "gpt2":
        if file.pre not in _RULES:
            raise ValueError(
                f"the splitting rule (tokenizer.ggml.pre) must be one of {', '.join(_RULES)}; the file has "
                f"{shown(file.pre)}; {remedy}"
            )
        rule = _RULES[file.pre]
        tokenizer, add_bos = _byte_level_bpe(file, rule), rule == "llama3"
    elif file.model == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(file), True
    else:
        raise ValueError(
            f"GGUF tokenizers of the kinds gpt2 and llama are supported; tokenizer.ggml.model is "
            f"{shown(file.model)}; {remedy}"
        )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: (key, getattr(file, key)) for name, key in names.items()}
    special = {name: file.token(key, index) for name, (key, index) in ids.items() if index is not None}
    _add_tokens(tokenizer, file)
    _add_template(tokenizer, file, special, add_bos)
    template = file.chat_template
    if template is None and {"<|im_start|>", "<|im_end|>"} <= set(file.array("tokens")):
        template = CHATML
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, chat_template=template, clean_up_tokenization_spaces=False
    )


def _byte_level_bpe(file: _Metadata, rule: str) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = [tuple(merge.split(" ")) for merge in file.array("merges")]
    try:
        # Llama 3 uses a piece that is in the vocabulary as one token, without applying merges.
        model = models.BPE(file.vocabulary(), merges, ignore_merges=rule == "llama3")
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


def _sentencepiece_bpe(file: _Metadata) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = file.vocabulary()
    merges = _merges_from_scores(file, vocabulary)
    unknown = file.token("unknown", file.unknown or 0)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend("▁")] if file.space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if file.space_prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(file: _Metadata, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    # SentencePiece joins the two neighbouring pieces whose concatenation has the highest score. This is BPE
    # with merges ordered by the score of their result. Only pieces of the type "normal" are results.
    scores, types = file.array("scores"), file.types()
    ranked = []
    for token, index in vocabulary.items():
        if types[index] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], index, (left, right)))
    return [pair for _, _, pair in sorted(ranked)]


def _add_tokens(tokenizer: Tokenizer, file: _Metadata) -> None:
    from tokenizers import AddedToken

    typed = list(zip(file.array("tokens"), file.types(), strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in typed if kind in (_CONTROL, _UNKNOWN)]
    )
    # User-defined tokens are always matched whole, but are not special: decoding keeps them.
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED])


def _add_template(tokenizer: Tokenizer, file: _Metadata, special: Mapping[str, str], add_bos: bool) -> None:
    """Makes the tokenizer add BOS and EOS around a string, if the file's metadata asks for it."""
    from tokenizers import processors

    add_bos = add_bos if file.add_bos is None else file.add_bos
    bos = [special["bos_token"]] if add_bos and "bos_token" in special else []
    eos = [special["eos_token"]] if file.add_eos and "eos_token" in special else []
    ids = [(token, tokenizer.token_to_id(token)) for token in bos + eos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos], pair=[*bos, "$A", *eos, *bos, "$B:1", *eos], special_tokens=ids
    )
