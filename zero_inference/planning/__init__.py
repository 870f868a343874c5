"""Plans: placement, memory and times of a run before anything is loaded, and the search over configurations."""
