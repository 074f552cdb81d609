"""The loop of training, its step, and the hooks that watch it."""
