"""Score the loaded model of a run: choices, code and perplexity."""
