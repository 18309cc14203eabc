"""A model as reward (`reward.judge`): questions, the answers to them, and who gives these."""
