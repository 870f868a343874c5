"""One file a case, of its name, with the case as `CASE`; `CASES` has them by name."""

import importlib
import pkgutil

CASES = {name: importlib.import_module(f"{__name__}.{name}").CASE for _, name, _ in pkgutil.iter_modules(__path__)}
