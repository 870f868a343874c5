"""From a model's name to its config, empty model, sizes, weights and prompts."""
