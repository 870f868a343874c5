"""What to load: built-in presets, hub or local configs, tokenizers, dummy weights, checkpoints."""
