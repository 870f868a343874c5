"""Loops and their timing, and the limits of the machine beside them."""
