"""The self-test, trust in a release of Triton, the warm-up and the replay of a saved call."""
