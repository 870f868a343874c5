"""How much a run does to measure its machine, by the type of the device."""

from __future__ import annotations

LINK_S = {"cuda": 0.4, "cpu": 0.1}  # of copies behind the loops
PRODUCT_S = {"cuda": 0.1, "cpu": 0.05}  # of matrix products
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}  # rows and columns of their matrices
