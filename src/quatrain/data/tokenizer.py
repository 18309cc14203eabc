"""Loads tokenizers, renders prompts to token ids and finds the tokens that end a completion.

Data flow: `model.tokenizer` -> `load_tokenizer`; a row's prompt -> `render` -> `Prompt.input_ids`; the
model's end-of-sequence ids -> `stop_token_ids` -> the rollout engine; a prompt and its completion ->
`render_completed` -> a reward model. transformers is imported on first use, because importing it is slow.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from quatrain.config.buckets import local_copy
from quatrain.config.errors import shown
from quatrain.config.files import MAX_DEPTH, Description, checked, read_json, too_deep
from quatrain.config.places import HUB_ID, MODEL_FILES, is_bucket, local_path
from quatrain.data.builtin import CHAT_TEMPLATE, builtin_tokenizer
from quatrain.data.expansion import expanded
from quatrain.data.gguf_tokenizer import CHATML, gguf_tokenizer
from quatrain.data.left_out import REFUSED, Kind, LeftOut, Messages, Tools, left_out
from quatrain.data.messages import checked_messages, forms_for, pictures_of, unfit_text, with_picture_parts
from quatrain.models.hf_config import MAX_LAYERS
from quatrain.types.pictures import Tokens
from quatrain.weights.gguf_header import read_header
from quatrain.weights.offline_hub import hub_without_retries
from quatrain.workers.pool import Failure, Pool
from quatrain.workers.worker_process import log_output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from quatrain.types.batches import PromptText

logger = logging.getLogger(__name__)

# quatrain does not need PyTorch, which transformers advises to install.
logging.getLogger("transformers").addFilter(lambda r: not r.getMessage().startswith("PyTorch was not found"))

# Tokens that end a turn in the chat templates of ChatML, Llama 3, Gemma and gpt-oss.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|call|>", "<|return|>")
MAX_REASON_CHARS = 500
TEMPLATE_CPU_S, TEMPLATE_WALL_S, TEMPLATE_MEMORY_MB = 2.0, 60.0, 1024
"""Limits of rendering with a template; a process may wait for a core."""
MOST_GROWTH = 100
_CONFIG, _JSON, _MODEL = "tokenizer_config.json", "tokenizer.json", "config.json"
_TEMPLATE = "chat_template.json"


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer at `path`: `builtin:…`, a `.gguf` file, a Hugging Face folder, or a hub id.

    Code in a model's folder or repository is never run. Raises ValueError if there is no tokenizer, the Hub
    cannot be reached, or the tokenizer needs custom code or is not a fast tokenizer.
    """
    if path.startswith("builtin:"):
        return builtin_tokenizer(path.removeprefix("builtin:"))
    if path.endswith(".gguf"):
        return gguf_tokenizer(read_header(path).metadata, path)
    from transformers import PreTrainedTokenizerFast

    folder = local_copy(path, MODEL_FILES) if is_bucket(path) else local_path(path)
    tokenizer = _from_folder(str(folder)) if folder.is_dir() else _from_hub(path)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"only fast tokenizers (tokenizer.json) are supported; {path} has a {type(tokenizer).__name__}; "
            "convert it with transformers and save it again"
        )
    return tokenizer


def _from_folder(path: str) -> Any:
    names = (_JSON, "tokenizer.model", "vocab.json", _CONFIG)
    if not any((Path(path) / name).is_file() for name in names):
        raise ValueError(
            f"a tokenizer folder must contain one of {', '.join(names)}; {path} has none of them; save a "
            "tokenizer there, or set model.tokenizer to a folder or hub id that has one"
        )
    _check_files(Path(path))
    try:
        return _loaded(path, (Path(path) / _JSON).is_file(), local_files_only=True)
    except Exception as error:  # for a broken folder, transformers raises exceptions of any class
        _refuse_code(path, error)
        raise ValueError(
            f"the tokenizer in {path} cannot be loaded: {error!s:.{MAX_REASON_CHARS}}"
        ) from error


def _from_hub(model_id: str) -> Any:
    if not HUB_ID.fullmatch(model_id):
        raise ValueError(
            f"a model is `builtin:…`, a .gguf file, a folder or a hub id such as org/name; "
            f"{model_id!r} is none of these (looked in {Path.cwd()}); check the path"
        )
    try:
        file = _hub_file(model_id, _JSON)
        described = file or _hub_file(model_id, _MODEL)
        if described is not None:
            _check_files(described.parent)
        return _loaded(model_id, file is not None)
    except Exception as error:  # no network, an unknown name or a broken repository
        _refuse_code(model_id, error)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:MAX_REASON_CHARS]
        raise ValueError(
            f"there is no folder {model_id!r}, and loading a tokenizer of that name from the Hub failed "
            f"({reason}); check the name and the network, or give a local folder"
        ) from error


def _loaded(source: str, has_json: bool, **options: bool) -> Any:
    """The tokenizer as transformers loads it, with its own rules; raises any exception if it fails."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer replaces the splitting rule in tokenizer.json by the one of the model type (qwen2, ...).
    # It is therefore used only if that file is missing and the tokenizer is converted from other files.
    loader = PreTrainedTokenizerFast if has_json else AutoTokenizer
    with _panic_is_an_error():
        tokenizer = loader.from_pretrained(source, trust_remote_code=False, **options)
        tokenizer.decode(tokenizer.encode("a b"))
        int(tokenizer.eos_token_id or 0)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _beside(source)
    template = tokenizer.chat_template or ""
    if not all(isinstance(text, str) for text in _templates_of(template)):
        raise ValueError(f"a chat template must be text, not {shown(template)}")
    return tokenizer


def _beside(source: str) -> Any:
    """The template of chat_template.json, where models that see had it: only their processors read it."""
    path: Path | None = Path(source) / _TEMPLATE
    if not Path(source).is_dir():
        path = None
        with contextlib.suppress(
            Exception
        ):  # a copy of a model on this machine may lack it, as most models do
            path = _hub_file(source, _TEMPLATE)
    return read_json(path).get("chat_template") if path is not None and path.is_file() else None


def _templates_of(template: Any) -> list[Any]:
    """The texts of a tokenizer's templates: one, or several by their names."""
    return list(template.values()) if isinstance(template, dict) else [template]


def _refuse_code(path: str, error: Exception) -> None:
    """Raises ValueError if transformers raised `error` because the tokenizer needs custom code."""
    if "trust_remote_code" in str(error):
        raise ValueError(
            f"code in a model's folder or repository is never run; the tokenizer of {path} needs custom code "
            "(auto_map in its configuration); convert it to a tokenizer.json, or set another model.tokenizer"
        ) from error


class _Config(Description):
    """What tokenizer_config.json says beyond what transformers checks itself."""

    tokenizer_class: str | None = None
    model_max_length: float | None = None


@contextlib.contextmanager
def _panic_is_an_error() -> Iterator[None]:
    """Raises ValueError where the tokenizers library, which is written in Rust, panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a class that cannot be imported, and no Exception
            raise
        raise ValueError(f"the tokenizer fails: {error!s:.{MAX_REASON_CHARS}}") from error


def _check_files(folder: Path) -> None:
    """Raises ValueError if loading the tokenizer in `folder` might take all time or memory.

    Replacements of a tokenizer.json may each lengthen a text, and together fill any memory. Without a
    tokenizer.json, transformers reads config.json, and makes a list of its layers. Values of the wrong type
    in tokenizer_config.json are an error too.
    """
    if (folder / _CONFIG).is_file():
        checked(_Config, read_json(folder / _CONFIG), str(folder / _CONFIG))
    if (folder / _JSON).is_file():
        content = read_json(folder / _JSON)
        for part in ("normalizer", "decoder"):
            node = content.get(part)
            if too_deep(node) or math.prod(_growths(node)) > MOST_GROWTH:
                raise ValueError(
                    f"{folder / _JSON}: a {part} must not make a text {MOST_GROWTH} times as long, nor be "
                    f"nested deeper than {MAX_DEPTH} levels; correct the file, or fetch it again"
                )
    elif (folder / _MODEL).is_file():
        layers = [n for n in _numbers(read_json(folder / _MODEL), "layer") if n > MAX_LAYERS]
        if layers:
            raise ValueError(
                f"{folder / _MODEL}: a model has at most {MAX_LAYERS} layers, not {shown(layers[0])}; "
                "correct the file, or fetch it again"
            )


def _growths(node: Any) -> Iterator[float]:
    """How many times longer each replacement of a normalizer or decoder can make a text."""
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _growths(part)
    if isinstance(node, dict) and node.get("type") == "Replace" and isinstance(node.get("content"), str):
        pattern, size = node.get("pattern"), len(node["content"])
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        # A regular expression and an empty text may match where there is nothing.
        yield max(1.0, size / len(replaced)) if isinstance(replaced, str) and replaced else size + 1.0


def _numbers(node: Any, name: str) -> Iterator[int]:
    """The whole numbers in JSON under keys that contain `name`."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if name in key and isinstance(value, int):
            yield value
        yield from _numbers(value, name)


def save_tokenizer(
    tokenizer: PreTrainedTokenizerFast, directory: str | Path, *, closed: bool = False
) -> None:
    """Writes a tokenizer as a folder from which transformers 4 and 5 load a tokenizer with the same ids.

    The class in tokenizer_config.json is always `PreTrainedTokenizerFast`, which uses tokenizer.json as it
    is, as `load_tokenizer` does: the classes of model families replace parts of it by their own rules, some
    in transformers 4 (a BOS in front of Llama's text), others in 5. Unless it is `closed` (`for_scoring`), no
    token is added behind a text, because a policy continues it. Padding is on the left, as generation needs
    it, unless the source says otherwise.
    """
    from tokenizers import Tokenizer

    tokenizer.save_pretrained(directory)
    path = Path(directory) / _CONFIG
    config = json.loads(path.read_text("utf-8"))
    front, behind = _added_around(tokenizer)
    if behind and not closed:
        rules = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        rules.post_processor = _adding(tokenizer, front, [])
        rules.save(str(Path(directory) / _JSON))
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],  # by default, version 4 has token_type_ids
        "add_bos_token": tokenizer.bos_token_id in front,
        "add_eos_token": closed and tokenizer.eos_token_id in behind,
        "padding_side": config.get("padding_side", "left"),
    }
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if splitter is not None and "add_prefix_space" in (rule := json.loads(splitter.__getstate__())):
        config["add_prefix_space"] = rule["add_prefix_space"]  # version 4 sets tokenizer.json's to this
    if isinstance(config.get("extra_special_tokens"), list):  # transformers 4 knows only the older name
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    for name in ("auto_map", "is_local", "local_files_only"):  # describe the source, not this folder
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def for_scoring(tokenizer: PreTrainedTokenizerFast, stop_ids: Collection[int]) -> PreTrainedTokenizerFast:
    """`tokenizer` as that of a reward model whose completions end with one of `stop_ids`; changed in place.

    It adds the end token behind every text, where a completion has it: `render_completed` and whoever loads
    the exported folder then score the token that was scored in training. A classifier of transformers pools
    before the padding token wherever it stands, so that must be none of `stop_ids`, though many tokenizers
    pad with an end token: it becomes another special token, the likeliest first, and None if there is none.

    Raises ValueError for template variables, which nobody passes who reads for a reward model.
    """
    if variables := getattr(tokenizer, "template_variables", {}):
        raise ValueError(
            "a reward model must be trained on what its tokenizer renders by itself, because its scores are "
            f"computed without data.chat_template_kwargs; got {shown(variables)}; leave the key out, or set "
            "data.chat_template to a template with these values in it"
        )
    front, _ = _added_around(tokenizer)
    behind = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = _adding(tokenizer, front, behind)
    special = sorted(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    padding = [index for index in special if "pad" in str(tokenizer.added_tokens_decoder[index]).lower()]
    likely = (tokenizer.pad_token_id, *padding, tokenizer.unk_token_id, tokenizer.bos_token_id, *special)
    taken = {None, *stop_ids, *behind}
    chosen = next((index for index in likely if index not in taken), None)
    if chosen is None:
        logger.warning(
            "the tokenizer has no special token but those that end a completion, so that the reward model "
            "has no padding token: transformers scores one sequence at a time with it"
        )
    tokenizer.pad_token = None if chosen is None else tokenizer.convert_ids_to_tokens(chosen)
    return tokenizer


def _added_around(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """(ids that the tokenizer adds in front of any text, ids that it adds behind it)."""
    found = tokenizer("a", return_special_tokens_mask=True)
    ids, added = found["input_ids"], found["special_tokens_mask"]
    front = [*added, 0].index(0)
    return ids[:front], ids[len(ids) - [*reversed(added), 0].index(0) :] if 0 in added else []


def _adding(tokenizer: PreTrainedTokenizerFast, front: Sequence[int], behind: Sequence[int]) -> Any:
    """What adds these ids around any text, for a tokenizer of the library tokenizers."""
    from tokenizers import processors

    before, after = (tokenizer.convert_ids_to_tokens(list(ids)) for ids in (front, behind))
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=list(dict(zip([*before, *after], [*front, *behind], strict=True)).items()),
    )


def _hub_file(model_id: str, name: str) -> Path | None:
    """A file of a repository on the Hub, downloaded unless it is cached; None if it has no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    unreachable = ""
    try:
        with hub_without_retries() as unreachable:
            return Path(hf_hub_download(model_id, name))
    except RemoteEntryNotFoundError:
        return None
    except Exception as error:
        if unreachable:
            raise OSError(unreachable) from error
        raise


def stop_token_ids(tokenizer: PreTrainedTokenizerFast, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The sorted ids of the tokens that end a completion.

    They are the end-of-sequence ids of the model and of the tokenizer, and the end-of-turn tokens (such as
    `<|im_end|>` and `<|eot_id|>`) that are both in the vocabulary and in the chat template: chat models end a
    turn with these even if their configuration names another token.
    """
    text, vocabulary = "".join(_templates_of(tokenizer.chat_template or "")), tokenizer.get_vocab()
    turns = [vocabulary[token] for token in _END_OF_TURN if token in vocabulary and token in text]
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(sorted({int(index) for index in (*eos_token_ids, *turns, *eos)}))


def render(
    tokenizer: PreTrainedTokenizerFast,
    prompt: PromptText | Sequence[Mapping[str, str]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    variables: Mapping[str, Any] | None = None,
    begun: str = "",
    refused: Collection[Kind] = REFUSED,
) -> Tokens:
    """The tokens of a prompt.

    A string is tokenised with the special tokens that the tokenizer adds in front of any text (for Llama a
    BOS, none for Qwen and SmolLM), unless it begins with them; what it adds at the end, such as an EOS, is
    left out. Messages (see `checked_messages`) are rendered with the chat template, which writes all special
    tokens, up to the start of the assistant's answer, and `begun`, which the answer begins with. The template
    also gets `tools`, the JSON schemas of functions that the model may call, and `variables`.

    Raises ValueError for malformed messages, messages that the template rejects or does not write (`refused`:
    `fill_template`), messages without a chat template, and a prompt that has no tokens.
    """
    if isinstance(prompt, str):
        found = expanded(tokenizer, prompt, prompt, partial(encode, tokenizer, closed=False))
    else:
        messages = checked_messages(prompt)
        text = fill_template(
            tokenizer, messages, add_generation_prompt=True, tools=tools, variables=variables, refused=refused
        )
        found = expanded(
            tokenizer, text + begun, messages, partial(encode, tokenizer, add_special_tokens=False)
        )
    if not found.ids:
        raise ValueError(f"a prompt must have at least one token; {shown(prompt)} has none")
    return found


def render_completed(
    tokenizer: PreTrainedTokenizerFast,
    prompt: PromptText | Sequence[Mapping[str, str]],
    completion: str | Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    variables: Mapping[str, Any] | None = None,
    refused: Collection[Kind] = REFUSED - {"text"},
) -> list[int]:
    """The token ids of a prompt followed by its completion, as a reward model reads them.

    A string prompt and the completion are joined and tokenised with the special tokens that the tokenizer
    adds around any text. Messages and the completion, as the assistant's message, are rendered with the chat
    template, which writes all special tokens; it also gets `tools` and `variables`. Raises ValueError for
    messages that `render` refuses, but by default only warns of texts that the template leaves out: a run
    cannot give a reward model another template. Pictures are an error too, because no reward model sees them.
    """
    if isinstance(prompt, str):
        return encode(tokenizer, f"{prompt}{completion}")
    if pictures_of(prompt):
        raise ValueError(
            "a prompt that is read together with its answer, as reward models do, must have no pictures; "
            "this one has some; remove reward models from reward.models, or the rows with pictures"
        )
    answer = {"role": "assistant", "content": completion} if isinstance(completion, str) else completion
    text = fill_template(
        tokenizer,
        [*checked_messages(prompt), dict(answer)],
        add_generation_prompt=False,
        tools=tools,
        variables=variables,
        refused=refused,
    )
    return encode(tokenizer, text, add_special_tokens=False)


def fill_template(
    tokenizer: PreTrainedTokenizerFast,
    messages: Messages,
    *,
    add_generation_prompt: bool,
    tools: Tools = (),
    variables: Mapping[str, Any] | None = None,
    since: int = 0,
    refused: Collection[Kind] = REFUSED,
) -> str:
    """The text that the chat template makes of `messages`, with the start of the assistant's answer if asked.

    It gets the special tokens, the tokenizer's `template_variables` and `variables`.

    A template from a model's folder is a program: it runs in a child process with limits. quatrain's own
    templates do not. Templates differ in the form in which they take messages (`forms_for`): the first that
    the template takes, without leaving out a text, is rendered. Raises ValueError if there is no template, if
    it rejects the messages, and if it leaves out what is of a kind in `refused`, of messages from number
    `since` on; of other kinds it warns, once for each tokenizer.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "messages need a chat template; the tokenizer has none; use a chat model's tokenizer "
            "(model.tokenizer), or give prompts as plain strings"
        )
    # `chat_template.with_chat_template` sets the tokenizer's own on the policy's only.
    own = getattr(tokenizer, "template_variables", {})
    given = {**tokenizer.special_tokens_map, **own, **(variables or {})}
    template = "".join(_templates_of(tokenizer.chat_template))
    messages = with_picture_parts(messages, lambda picture: {"type": "image"})

    def fill(form: Messages, described: Tools) -> str | None:
        taken, text = _filled(tokenizer, form, add_generation_prompt, described, given)
        return text if taken else None

    problem = ""
    settings = json.dumps([given, add_generation_prompt], sort_keys=True, default=str)
    others = hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()
    for form in forms_for(template, messages):
        taken, text = _filled(tokenizer, form, add_generation_prompt, tools, given)
        reason = text
        if taken:
            missing = left_out(form, tools, text, fill, template=template, others=others, since=since)
            first = next((each for each in missing if each.kind in refused), None)
            if first is None:
                _warn_once(tokenizer, missing)
                return text
            reason = str(first)
            problem = problem or (reason if first.kind != "call" else "")
        if not problem:
            roles = shown([message["role"] for message in messages])
            problem = f"the chat template rejects messages with the roles {roles}: {reason}"
    raise ValueError(problem)


def _warn_once(tokenizer: PreTrainedTokenizerFast, missing: Sequence[LeftOut]) -> None:
    """Warns of what the tokenizer's template leaves out, once for each kind of place."""
    warned = _WARNED.setdefault(tokenizer, set())
    for each in missing:
        place = (tokenizer.chat_template, each.kind, each.role, each.field if each.kind != "tool" else "")
        if str(place) not in warned:
            warned.add(str(place))
            logger.warning("%s", each)


_WARNED: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _filled(
    tokenizer: PreTrainedTokenizerFast,
    messages: Messages,
    add_generation_prompt: bool,
    tools: Tools,
    given: Mapping[str, Any],
) -> tuple[bool, str]:
    """Whether the template takes the messages, and the text, or else the reason."""
    template = tokenizer.chat_template
    if template in (CHAT_TEMPLATE, CHATML):
        add = add_generation_prompt
        return True, tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add)
    variables = {**given, "tools": list(tools)} if tools else given
    request = json.dumps([template, variables, list(messages), add_generation_prompt])
    limits = {"timeout_s": TEMPLATE_WALL_S, "cpu_s": TEMPLATE_CPU_S}
    outcome = _TEMPLATES.submit(_RENDER, {"request": request}, **limits).result()
    return (False, outcome.detail) if isinstance(outcome, Failure) else (outcome[0], outcome[1])


_RENDER = "quatrain.data.template_worker:render"
_TEMPLATES = Pool(
    "chat template",
    1,
    memory_mb=TEMPLATE_MEMORY_MB,
    on_output=lambda _, text: log_output(logger, "the chat template", text),
)


def encode(
    tokenizer: PreTrainedTokenizerFast, text: str, *, add_special_tokens: bool = True, closed: bool = True
) -> list[int]:
    """The token ids of a text; raises ValueError for text that is too long or no valid Unicode.

    Special tokens are those that the tokenizer adds around any text. Those in front are not added to a text
    that begins with them, as one that a chat template has written does, nor those behind to one that ends
    with them; without `closed`, none are added at the end.
    """
    reason = unfit_text(text)
    if reason:
        raise ValueError(f"a prompt {reason}")
    with _panic_is_an_error():
        if not add_special_tokens:
            plain: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return plain
        found = tokenizer(text or "a", return_special_tokens_mask=True)
    ids: list[int] = found["input_ids"]
    of_text = [at for at, added in enumerate(found["special_tokens_mask"]) if not added] or [len(ids)]
    front, inner, behind = ids[: of_text[0]], ids[of_text[0] : of_text[-1] + 1], ids[of_text[-1] + 1 :]
    inner = inner if text else []
    ends = not closed or inner[len(inner) - len(behind) :] == behind
    return [*([] if inner[: len(front)] == front else front), *inner, *([] if ends else behind)]


_BEFORE = ("\n", ".", "a", "0")
"""What stands before a text that goes on; one of these merges with no text."""


def encode_further(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The token ids of a text that goes on after other tokens; raises ValueError as `encode` does.

    Tokenizers in the manner of SentencePiece write a space before a text, which a text that goes on does not
    have: it is encoded behind another, whose tokens are taken off.
    """
    ids = encode(tokenizer, text, add_special_tokens=False)
    if not ids or not str(tokenizer.convert_ids_to_tokens(ids[0])).startswith("\u2581"):
        return ids
    for before in _BEFORE:
        head = encode(tokenizer, before, add_special_tokens=False)
        whole = encode(tokenizer, before + text, add_special_tokens=False)
        if head and whole[: len(head)] == head:
            return whole[len(head) :]
    return ids
