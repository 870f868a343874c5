"""The page of `zero-inference report DIR... --html FILE`: `page` fills page.html, `figures` draws the runs."""
