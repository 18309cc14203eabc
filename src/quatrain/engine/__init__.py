"""The rollout engine of this process: prefill, decode, KV cache, scheduler."""
