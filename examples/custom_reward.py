"""An example of a reward function: 1 for an empty completion, falling to 0 at 200 characters.

quatrain train --set 'reward.functions={correct: 1.0, examples/custom_reward.py:brevity: 0.2}'
"""


def brevity(prompts, completions, **columns):
    """Returns one number per completion: 1 for an empty one, falling to 0 at 200 characters."""
    return [max(0.0, 1.0 - len(completion) / 200) for completion in completions]
