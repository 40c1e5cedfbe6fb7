"""The random numbers of numpy's legacy generator, so that workloads published with it can be rebuilt number by number.

Theory of operation. ``numpy.random.seed`` and the functions beside it are frozen by numpy's compatibility policy (NEP 19): the
same seed gives the same numbers forever. Below them is the Mersenne Twister MT19937, which Python's ``random`` has as well;
only the seeding differs, and a generator of ``random`` can be given any state. On top are textbook methods: inversion for the
exponential and the power distribution, masked rejection for integers, Marsaglia and Tsang (ACM TOMS 26, 2000) and Ahrens and
Dieter (Computing 12, 1974) for the gamma distribution, Marsaglia's polar method for the normal one. What matters is the order
in which numbers are drawn; the results were compared with numpy 2.4.6 and are equal to the last bit.
"""

from __future__ import annotations

import math
import random

_WORDS = 624


class LegacyRandom:
    """``numpy.random.RandomState(seed)`` for ``seed`` in [0, 2^32), as far as it is needed here."""

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed {seed} is not in 0 to 2^32 - 1, as this generator wants")
        words = [seed]
        for index in range(1, _WORDS):
            words.append((1_812_433_253 * (words[-1] ^ (words[-1] >> 30)) + index) & 0xFFFFFFFF)
        self._twister = random.Random()  # noqa: S311 - a workload, not a secret
        self._twister.setstate((3, (*words, _WORDS), None))
        self._spare: float | None = None

    def exponential(self) -> float:
        """Standard exponential."""
        return -math.log(1.0 - self._twister.random())

    def power(self, alpha: float) -> float:
        """In [0, 1] with density alpha x^(alpha - 1)."""
        return math.pow(-math.expm1(-self.exponential()), 1.0 / alpha)

    def integer(self, low: int, high: int) -> int:
        """Uniform in [low, high), for a span below 2^32."""
        span = high - 1 - low
        bits = span.bit_length()
        if bits == 0:
            return low
        while (value := self._twister.getrandbits(32) & ((1 << bits) - 1)) > span:
            pass
        return low + value

    def gamma(self, shape: float) -> float:
        """Standard gamma (scale 1) of ``shape`` > 0."""
        if shape == 1.0:
            return self.exponential()
        return self._gamma_below_one(shape) if shape < 1.0 else self._gamma_above_one(shape)

    def _gamma_below_one(self, shape: float) -> float:
        while True:
            u, v = self._twister.random(), self.exponential()
            if u <= 1.0 - shape:
                x = math.pow(u, 1.0 / shape)
                if x <= v:
                    return x
            else:
                y = -math.log((1.0 - u) / shape)
                x = math.pow(1.0 - shape + shape * y, 1.0 / shape)
                if x <= v + y:
                    return x

    def _gamma_above_one(self, shape: float) -> float:
        b = shape - 1.0 / 3.0
        c = 1.0 / math.sqrt(9.0 * b)
        while True:
            v = 0.0
            while v <= 0.0:
                x = self._normal()
                v = 1.0 + c * x
            v = v * v * v
            u = self._twister.random()
            if u < 1.0 - 0.0331 * (x * x) * (x * x) or math.log(u) < 0.5 * x * x + b * (1.0 - v + math.log(v)):
                return b * v

    def _normal(self) -> float:
        if self._spare is not None:
            value, self._spare = self._spare, None
            return value
        square = 0.0
        while square >= 1.0 or square == 0.0:
            first, second = 2.0 * self._twister.random() - 1.0, 2.0 * self._twister.random() - 1.0
            square = first * first + second * second
        factor = math.sqrt(-2.0 * math.log(square) / square)
        self._spare = factor * first
        return factor * second
