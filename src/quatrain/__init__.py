"""Reinforcement-learning post-training of language models in JAX: rollout, reward, advantages, update."""

__version__ = "0.1.0.dev0"
