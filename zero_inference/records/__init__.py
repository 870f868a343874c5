"""The record of a run: its keys, writing and reading it."""
