"""Products of a mixture's experts on GPUs."""
