"""The record of a run: its keys (`schema` and what it is made of), writing and reading it."""
