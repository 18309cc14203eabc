"""Line 4: advantages to new weights."""
