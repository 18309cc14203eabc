"""Five training steps by hand, with an advantage estimator and a policy loss of one's own.

python examples/by_hand.py
"""

import numpy as np

import quatrain


def centred(rewards, group_ids):
    """An advantage estimator: the reward minus the mean reward of the group."""
    means = [rewards[group_ids == group].mean() for group in group_ids]
    return rewards - np.array(means)


def reinforce(tokens: quatrain.ScoredTokens, *, scale: float = 1.0) -> quatrain.TokenLoss:
    """A policy loss: REINFORCE, with the mean over each completion's tokens logged."""
    loss = -scale * tokens.advantages * tokens.logprobs
    return quatrain.TokenLoss(loss, {"completion_loss": tokens.sequence_mean(loss)})


settings = ["advantage.estimator=__main__:centred", "update.loss=__main__:reinforce", "update.kl_coef=0"]
config = quatrain.load_config(overrides=settings).config
policy = quatrain.load_policy(config)
prompts = quatrain.load_prompts(config.data.train, config.data, policy.tokenizer, seed=config.seed)
stages = quatrain.build_stages(config, policy, steps=5)
state = stages.update.init(policy.params)

for step in range(5):
    stages.rollout.sync_weights(state.params, state.step)
    rewarded = quatrain.collect(stages, prompts.batch(step, config.data.batch_size), step=step)
    state, advantaged = quatrain.learn(stages, state, rewarded)
    print(f"step {step}: reward {rewarded.metrics['reward/mean'].result():.3f}")
