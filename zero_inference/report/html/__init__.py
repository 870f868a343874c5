"""The page of `zero-inference report DIR... --html FILE`: `labels` names the runs, `summary` puts them in words, `figures` draws
them (`throughput`, `machines` and `roofline`, `predicted` are subjects with a module of their own), `svg` makes the drawings fit to be
embedded, `page` fills `page.html`."""
