"""Set up a model as the plan says: keyed dropout, activation checkpointing, packed samples."""
