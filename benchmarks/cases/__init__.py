"""One file a case; `CASES` has them by name."""

from . import add_layer, add_rms, grouped_mul_poly, layer, mul_poly, poly, rms

CASES = {module.CASE.name: module.CASE for module in (rms, add_rms, layer, add_layer, poly, mul_poly, grouped_mul_poly)}
