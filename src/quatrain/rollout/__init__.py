"""The rollout stage: prompts to completions."""
