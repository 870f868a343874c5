"""The machine that a plan is for: this one, or one that a file or `--assume` describes."""
