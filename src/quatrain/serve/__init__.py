"""The rollout engine behind an OpenAI-compatible HTTP server (`quatrain serve`)."""
