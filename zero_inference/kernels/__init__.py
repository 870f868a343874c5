"""Quantized weights and their products, decode attention and rotary embedding: CUDA operators, and how they are compiled."""
