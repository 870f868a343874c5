"""The page of `zero-inference report LOGDIR --html FILE`: `runs` reads records, `summary` puts them in words, `figures` draws
them, `svg` makes the drawings fit to be embedded, `page` fills `page.html`."""
