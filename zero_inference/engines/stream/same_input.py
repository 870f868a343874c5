"""Linear modules that are called with one tensor, one behind the other, as queries, keys and values are: one product serves them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Products = Callable[[tuple[str, ...], torch.Tensor], Sequence[torch.Tensor]]


class SameInput:
    """Which modules of a block are called so is seen where they compute for themselves; from then on the first one's call computes all.

    Attributes:
        together: by name of a module, those that are computed with it, in order.
    """

    def __init__(self) -> None:
        self.together: dict[str, tuple[str, ...]] = {}
        self.input: torch.Tensor | None = None  # of the products that were made or seen last
        self.group: list[str] = []
        self.ready: dict[str, torch.Tensor] = {}

    def saw(self, name: str, x: torch.Tensor, alike: Callable[[str, str], bool]) -> None:
        """Module `name` was called with `x`, and computed by itself.

        Args:
            alike: whether the products of two modules can be made together.
        """
        if name in self.together:
            return
        if x is self.input and alike(name, self.group[0]):
            self.group.append(name)
        else:
            self.input, self.group = x, [name]
        for each in self.group:
            self.together[each] = tuple(self.group)

    def product(self, name: str, x: torch.Tensor, products: Products) -> torch.Tensor:
        """Of module `name` with x; those of the others with the same input are made with it.

        Args:
            products: of the named modules with x [..., columns]: [..., rows] each.
        """
        if x is not self.input or name not in self.ready:
            names = self.together.get(name, (name,))
            self.input, self.ready = x, dict(zip(names, products(names, x)))
        return self.ready.pop(name)

    def ends(self) -> None:
        """The block was called to its end: its input may go."""
        self.input, self.group, self.ready = None, [], {}
