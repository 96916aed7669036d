"""Snapshots of a store: the state of its optimizers at one moment, by hard links."""
