"""The page of `zero-inference report DIR... --html FILE`.

`page` fills `page.html`; `summary` words the headlines; `figures` draws the runs with the axes, rows and SVG of `plot`.
"""
