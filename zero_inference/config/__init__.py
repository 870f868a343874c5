"""The options of a run: their declaration, their checks, and their ways in (command line, YAML file, keywords)."""
