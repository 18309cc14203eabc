"""Line 1: prompts to completions."""
