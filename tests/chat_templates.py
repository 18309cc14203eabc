"""Chat templates of seven families in short, and small tokenizers that have their special tokens.

A template here writes what its model's writes, apart from long instructions about tools and what only some
arguments bring. Qwen3's removes the thoughts of earlier turns, Llama 3.1's trims texts and quotes results,
Gemma 3's and Mistral's have alternating roles, Mistral's repeats the tools before the last question, and
Hermes' asks for the name of the tool in a result, and leaves out text beside calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_QWEN_TOOLS = (
    "# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags.<|im_end|>\\n' }}"
)
_QWEN_RESULTS = """\
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
_QWEN_CALL = """\
        {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
        {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
        {{- call.arguments | tojson + '}\\n</tool_call>' }}
"""
QWEN25 = (
    """\
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are Qwen.' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + system + '\\n\\n"""
    + _QWEN_TOOLS
    + """
{%- else %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
"""
    + _QWEN_RESULTS
    + """\
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n' }}
"""
    + _QWEN_CALL
    + """\
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
QWEN3 = (
    """\
{%- if tools %}
    {%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
    {{- '<|im_start|>system\\n' + system + '"""
    + _QWEN_TOOLS
    + """
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_question=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.found = true %}
        {%- set ns.last_question = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
"""
    + _QWEN_RESULTS
    + """\
    {%- elif message.role == 'assistant' %}
        {%- set content, thought = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_question and (loop.last or thought) %}
            {%- set thought = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' %}
            {%- set content = thought + content.lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
"""
    + _QWEN_CALL
    + """\
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
)
LLAMA31 = """\
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content|trim, messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {%- set question, messages = messages[0].content|trim, messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, please ' }}
    {{- 'respond with a JSON for a function call.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {{- question + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
HERMES = """\
{{- bos_token }}
{%- if tools %}
    {{- 'You are a function calling AI model. Here are the available tools: <tools> ' }}
    {%- for tool in tools %}{{- tool.function | tojson + '\\n' }}{%- endfor %}
    {{- ' </tools>For each function call return a json object:\\n<tool_call>\\n{"name": <function-name>, ' }}
    {{- '"arguments": <args-dict>}\\n</tool_call><|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if message.name is not defined %}
            {{- raise_exception("Tool response dicts require a 'name' key!") }}
        {%- endif %}
        {{- '<|im_start|>tool\\n<tool_response>\\n{"name": "' + message.name + '", "content": ' }}
        {{- message.content | tojson + '}\\n</tool_response> <|im_end|>\\n' }}
    {%- elif message.role == 'assistant' and message.tool_calls is defined %}
        {{- '<|im_start|>assistant' }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' }}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '{ ' }}
            {%- if tool_call.arguments is defined %}
                {{- '"arguments": ' + tool_call.arguments | tojson + ', ' }}
            {%- endif %}
            {{- '"name": "' + tool_call.name + '"}\\n</tool_call> ' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GEMMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix, messages = messages[0]['content'] + '\\n\\n', messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {{- message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content, messages[1:] %}
{%- endif %}
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in messages if message.role != 'tool' %}
    {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') }}
        {{- message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- else %}
        {%- if message.tool_call_id is not defined or message.tool_call_id|length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""


@dataclass(frozen=True)
class Family:
    """A chat template, and the special tokens that it writes."""

    template: str
    bos: str
    eos: str
    """The token that ends the assistant's turn."""
    other_end: str
    """Another token at which models of the family stop."""
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    """Added tokens that decoding keeps."""
    sentencepiece: bool = False
    takes_results: bool = True
    adds_space: bool = False
    """Whether the template writes a space before the assistant's text, which a model would sample."""


_QWEN = {"plain": ("<tool_call>", "</tool_call>", "<think>", "</think>")}
FAMILIES = {
    "qwen2.5": Family(QWEN25, "<|endoftext|>", "<|im_end|>", "<|endoftext|>", ("<|im_start|>",), **_QWEN),
    "qwen3": Family(QWEN3, "<|endoftext|>", "<|im_end|>", "<|endoftext|>", ("<|im_start|>",), **_QWEN),
    "llama3.1": Family(
        LLAMA31,
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    "hermes": Family(
        HERMES,
        "<|begin_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        ("<|im_start|>",),
        ("<tool_call>", "</tool_call>"),
    ),
    "smollm2": Family(SMOLLM2, "<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "gemma3": Family(
        GEMMA3,
        "<bos>",
        "<end_of_turn>",
        "<eos>",
        ("<start_of_turn>",),
        sentencepiece=True,
        takes_results=False,
    ),
    "mistral": Family(
        MISTRAL,
        "<s>",
        "</s>",
        "<unk>",
        ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        sentencepiece=True,
        adds_space=True,
    ),
}


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte or letter, so that the ids of a text do not depend on others."""
    tokenizer = _sentencepiece() if family.sentencepiece else _byte_level()
    special = dict.fromkeys((family.bos, family.eos, family.other_end, *family.special))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


def _byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece() -> Tokenizer:
    """As a converted SentencePiece model: a space in front of each text between special tokens."""
    pieces = ["<unk>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
