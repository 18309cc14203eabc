"""The update and the rollout of `first_gpu_run.py` by PyTorch and transformers, on the same card.

    python benchmarks/gpu_peer.py train OUT        # beside item `update` of first_gpu_run.py
    python benchmarks/gpu_peer.py generate OUT     # beside item `rollout`
    python benchmarks/gpu_peer.py train OUT --small

train: 64 sequences (8 prompts x 8 samples) of the lengths that item `update` has, float32 master weights,
bfloat16 autocast, sdpa attention, sequences of like lengths padded together, fused AdamW; the loss is that
of a policy gradient over completion tokens. Tokens a second count real tokens of prompt and completion, as
item `update` does. generate: 256 prompts of 256 tokens. Needs torch and
transformers; writes OUT/peer-WHAT.json.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

SHAPES = {"0.5B": (896, 4864, 24, 14), "1.5B": (1536, 8960, 28, 12), "tiny": (64, 96, 1, 4)}
cuda = torch.cuda.is_available()
device = "cuda" if cuda else "cpu"


def sync() -> None:
    if cuda:
        torch.cuda.synchronize()


def model_of(shape: str, dtype: torch.dtype):
    hidden, middle, layers, heads = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=500 if shape == "tiny" else 151936, hidden_size=hidden, intermediate_size=middle,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=2,
        max_position_embeddings=32768, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device), config


def lengths(small: bool):
    """Those of `accelerator.random_table`."""
    count, group, median, longest, prompt = (16, 8, 22, 40, 20) if small else (64, 8, 400, 1024, 256)
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.6, count // group * group)
    return prompt, np.clip(drawn, 1, longest).astype(int)


def train(shape: str, small: bool, rows: int, checkpointing: bool) -> dict:
    model, config = model_of(shape, torch.float32)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    prompt, own = lengths(small)
    total = prompt + own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=cuda)
    order = np.argsort(-total)  # sequences of like lengths together: the least padding
    generator = np.random.default_rng(1)
    parts = []
    for first in range(0, len(order), rows):
        part = order[first : first + rows]
        width = int(total[part].max())
        ids = torch.tensor(generator.integers(0, config.vocab_size, (len(part), width)), device=device)
        columns = torch.arange(width, device=device)[None]
        mask = (columns >= prompt) & (columns < torch.tensor(total[part], device=device)[:, None])
        parts.append((ids, mask))
    tokens, scored = int(total.sum()), int(own.sum())
    seconds = []
    for _ in range(4):
        sync()
        began = time.perf_counter()
        for ids, mask in parts:
            with torch.autocast(device, torch.bfloat16):
                hidden = model.model(input_ids=ids).last_hidden_state[:, prompt - 1 : -1]
                chosen, targets = hidden[mask[:, prompt:]], ids[:, prompt:][mask[:, prompt:]]
                loss = 0.0
                for state, target in zip(chosen.split(4096), targets.split(4096)):
                    logits = model.lm_head(state).float()
                    logps = logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(1)
                    loss = loss - (logps * 0.5).sum() / scored
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sync()
        seconds.append(time.perf_counter() - began)
    step = statistics.median(seconds[1:])
    computed = sum(ids.numel() for ids, _ in parts)
    return {
        "seconds_per_step": step, "first_step_s": seconds[0], "tokens": tokens, "tokens_per_s": tokens / step,
        "padding_fraction": 1 - tokens / computed, "rows": rows, "checkpointing": checkpointing,
        "most_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }  # fmt: skip


def generate(shape: str, small: bool) -> dict:
    model, config = model_of(shape, torch.float32 if small else torch.bfloat16)
    model.eval()
    slots, prompt, new = (16, 20, 8) if small else (256, 256, 128)
    ids = torch.randint(0, config.vocab_size, (slots, prompt), device=device)
    options = {"do_sample": True, "top_k": 0, "min_new_tokens": new, "max_new_tokens": new, "use_cache": True}
    found = {}
    for _ in range(2):
        sync()
        began = time.perf_counter()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        sync()
        seconds = time.perf_counter() - began
    found |= {"seconds": seconds, "tokens_per_s": slots * new / seconds, "new_tokens": out.shape[1] - prompt}
    return found


def main() -> None:
    what, out, small = sys.argv[1], Path(sys.argv[2]), "--small" in sys.argv
    report = {"item": f"peer-{what}", "torch": torch.__version__, "transformers": transformers.__version__}
    torch.backends.cuda.matmul.allow_tf32 = True
    tries = [("0.5B", 16, False), ("0.5B", 8, False), ("0.5B", 16, True)] if what == "train" else [("0.5B",)]
    if small:
        tries = [("tiny", *tries[0][1:])]
    for shape, *args in tries:
        try:
            found = train(shape, small, *args) if what == "train" else generate(shape, small)
            report |= {"status": "done", "shape": shape, "figures": found}
            break
        except torch.OutOfMemoryError as error:
            report |= {"status": "failed", "error": str(error)[:300]}
            torch.cuda.empty_cache()
        except Exception as error:
            report |= {"status": "failed", "error": f"{type(error).__name__}: {error}"[:500]}
            break
    (out / f"peer-{what}.json").write_text(json.dumps(report, indent=1), "utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
