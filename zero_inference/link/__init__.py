"""Measured ceilings of this machine, in this process."""
