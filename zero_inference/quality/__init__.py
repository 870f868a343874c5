"""How good the answers of a loaded model are: choices, code and perplexity, of the very model that was timed."""
