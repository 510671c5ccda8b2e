# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Random integers that are the same on every machine and Python version.

Owns: one function, built on raw bits alone. Refuses to know: what is drawn.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def make_draw(name: str) -> Callable[[int], int]:
    """A stream of integers.

    Args:
        name: Names the stream, seed included. A text goes through SHA-512, so near seeds and negative ones give
            unrelated streams.

    Returns:
        A function that draws an integer from 0 to below its argument. It uses `getrandbits` only: how `choice` or
        `shuffle` turn bits into picks has changed between Python versions, the bits have not.
    """
    bits = random.Random(name).getrandbits

    def draw(bound: int) -> int:
        size = bound.bit_length()
        while (value := bits(size)) >= bound:
            pass
        return value

    return draw


def pick(draw: Callable[[int], int], items: Sequence[T], count: int) -> list[T]:
    """Draw `count` different items of a sequence."""
    left = list(items)
    return [left.pop(draw(len(left))) for _ in range(count)]
