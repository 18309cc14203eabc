"""Line 2: completions to rewards."""
