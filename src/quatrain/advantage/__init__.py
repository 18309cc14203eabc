"""Line 3: rewards to per-token advantages."""
