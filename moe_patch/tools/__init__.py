"""The self-test, the warm-up and the replay of a kept call."""
