"""Chat templates of families in short, and small tokenizers that have their special tokens.

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


QWEN_CODER = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {%- set is_text = value is string or not (value is mapping or value is iterable) %}
                {%- set value = value | string if is_text else value | tojson %}
                {{- '<parameter=' + key + '>\\n' + value + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MINISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL_LIST = MINISTRAL.replace(
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}",
    """{{- '[TOOL_CALLS] [' if loop.first else ', ' }}
            {{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
            {{- ']' if loop.last else '' }}""",
)
GLM45 = """\
{{- '[gMASK]<sop>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|observation|>\\n' if m.role == 'tool' else '<|user|>\\n' }}{{- m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
GEMMA4 = """\
{%- macro write(value) -%}
    {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}
        {%- for key, each in value.items() -%}
            {{ '{' if loop.first else ',' }}{{ key }}:{{ write(each) }}
        {%- endfor -%}{{ '}' if value else '{}' }}
    {%- elif value is iterable -%}
        [{%- for each in value -%}{{ '' if loop.first else ',' }}{{ write(each) }}{%- endfor -%}]
    {%- else -%}{{ 'null' if value is none else value }}
    {%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- for m in messages -%}
    {{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {%- for call in m.tool_calls or [] -%}
        {{ '<|tool_call>call:' + call.function.name }}{{ write(call.function.arguments) }}{{ '<tool_call|>' }}
    {%- endfor -%}
    {{ m.content + '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}{%- endif -%}
"""
OLMO3 = """\
{%- for m in messages %}
    {{- '<|im_start|>' + ('environment' if m.role == 'tool' else m.role) + '\\n' + m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<function_calls>' if loop.first else '\\n' }}{{- call.function.name + '(' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '' if loop.first else ', ' }}{{- key + '=' + value | tojson }}
        {%- endfor %}
        {{- ')' + ('</function_calls>' if loop.last else '') }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
PHI4 = """\
{%- for m in messages %}
    {{- '<|' + m.role + '|>' + m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<|tool_call|>[' if loop.first else ', ' }}{{- call.function | tojson }}
        {{- ']<|/tool_call|>' if loop.last else '' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
GPT_OSS = """\
{%- set last = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {%- if m.content %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
        {%- set last.name = call.name %}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- set last.name = none %}
    {%- elif m.role == 'tool' %}
        {%- if last.name is none %}{{- raise_exception('a result needs a call before it') }}{%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<｜Assistant｜>' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last else '' }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}{{- '<｜User｜>' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
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

_CHATML = ("<|endoftext|>", "<|im_end|>", "<|endoftext|>", ("<|im_start|>",))
_OF_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_THINK = ("[THINK]", "[/THINK]")
CALLING = {
    "qwen3-coder": Family(QWEN_CODER, *_CHATML, **_QWEN),
    "ministral": Family(MINISTRAL, "<s>", "</s>", "<unk>", (*_OF_MISTRAL, *_THINK)),
    "mistral's list": Family(MISTRAL_LIST, "<s>", "</s>", "<unk>", _OF_MISTRAL),
    "glm-4.5": Family(
        GLM45,
        "<sop>",
        "<|observation|>",
        "<|user|>",
        ("[gMASK]", "<|assistant|>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
        ("<arg_value>", "</arg_value>"),
    ),
    "gemma4": Family(
        GEMMA4,
        "<bos>",
        "<turn|>",
        "<eos>",
        ("<|turn>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    "olmo3": Family(OLMO3, *_CHATML, ("<function_calls>", "</function_calls>")),
    "phi4-mini": Family(
        PHI4, "<|endoftext|>", "<|end|>", "<|endoftext|>", ("<|user|>", "<|tool_call|>", "<|/tool_call|>")
    ),
    "gpt-oss": Family(
        GPT_OSS,
        "<|startoftext|>",
        "<|return|>",
        "<|call|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
    ),
    "deepseek": Family(
        DEEPSEEK,
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        ("<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
}
"""Templates of models that write calls in forms of their own, also without instructions about tools."""


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
