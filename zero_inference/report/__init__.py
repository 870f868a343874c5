"""Runs as tables and as a page."""
