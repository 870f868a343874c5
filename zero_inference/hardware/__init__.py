"""Rates of a machine (copies, memory, matrix products, disk): measured here, kept in a hardware profile, or from datasheets."""
