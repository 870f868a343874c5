"""Configurations of a model compared by what their plans predict, before anything is loaded."""
