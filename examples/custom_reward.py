"""A reward of your own: full marks for a short completion, none from 200 characters on.

quatrain train --set 'reward.functions={correct: 1.0, examples/custom_reward.py:brevity: 0.2}'
"""


def brevity(prompts, completions, **columns):
    """1 for an empty completion, falling to 0 at 200 characters; one number per completion."""
    return [max(0.0, 1.0 - len(completion) / 200) for completion in completions]
