"""A node: a process that computes its share of a model's experts for front ends (`colibri node`)."""
