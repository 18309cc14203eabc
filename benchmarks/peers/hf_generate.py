"""The rollout alone, by transformers `generate` on the CPU; run by `compare.py --peer hf`."""

from __future__ import annotations

import time
from importlib.metadata import version

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from workload import finish, num_prompt_tokens, peer_parser, read_messages


@torch.inference_mode()
def main() -> None:
    args = peer_parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    setting = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": args.tokens,
        "min_new_tokens": args.tokens,
        "use_cache": True,
    }
    chats = read_messages(args)
    steps = []
    for step in range(args.steps + 1):
        drawn = chats[step * args.prompts : (step + 1) * args.prompts]
        repeated = [chat for chat in drawn for _ in range(args.samples)]
        began = time.perf_counter()
        inputs = tokenizer.apply_chat_template(
            repeated, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        sequences = model.generate(**inputs, **setting)
        tokenizer.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rollout_s = time.perf_counter() - began
        steps.append({"rollout_s": rollout_s, "tokens_per_s": len(repeated) * args.tokens / rollout_s})
    finish(
        {
            "peer": f"transformers {version('transformers')} generate, torch {version('torch')}",
            "setting": {**setting, "dtype": "float32", "attention": "sdpa", "threads": args.threads},
            "prompt_tokens": num_prompt_tokens(tokenizer, chats),
            "steps": steps[1:],
        }
    )


if __name__ == "__main__":
    main()
