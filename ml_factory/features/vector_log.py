"""Natural logarithms of arrays, vectorized: the math library takes them one by one.

x = 2^k m with m in [sqrt(1/2), sqrt(2)), and log m = 2 atanh s for s = f / (2 + f), f = m - 1 (Abramowitz and Stegun
4.1.27). Written as f - (f^2 / 2 - s (f^2 / 2 + R)), with R the series from its second term on, the exact f carries most
of the value, so that rounding stays below one unit in the last place. Every row is independent: the bits do not depend
on its neighbours or on the machine's registers.
"""

import numpy as np
from numba import njit

_ROOT_HALF = np.int64(0x3FE6A09E667F3BCD)  # bits of sqrt(1/2)
_ONE, _MANTISSA = np.int64(0x3FF0000000000000), np.int64(0x000FFFFFFFFFFFFF)
_TWO_52 = np.int64(0x4330000000000000)  # bits of 2^52: a small whole number in its last bits is added to it
_BIAS = 2.0**52 + 1023.0
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # log 2, cut so that k times it is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_LEAST, _MOST = float(np.finfo(np.float64).tiny), float(np.finfo(np.float64).max)


@njit(cache=True, nogil=True, error_model="numpy")
def vectorized_log(x, out):
    """Set out[i] = log x[i], float64, within one unit in the last place; NaN stays, 0 gives -inf, less than 0 NaN."""
    scale = np.empty(len(x), np.int64)
    _split(x.view(np.int64), scale, out.view(np.int64))
    _series(scale.view(np.float64), out)
    usual = 0
    for i in range(len(x)):
        usual += np.int64((x[i] >= _LEAST) & (x[i] <= _MOST))
    if usual < len(x):
        for i in range(len(x)):
            if not (_LEAST <= x[i] <= _MOST):
                out[i] = np.log(x[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _split(bits, scale, mantissa):
    """Compute the bits of 2^52 + k + 1023 and of m, from the bits of 2^k m."""
    for i in range(len(bits)):
        shifted = bits[i] + (_ONE - _ROOT_HALF)
        scale[i] = (shifted >> 52) | _TWO_52
        mantissa[i] = (shifted & _MANTISSA) + _ROOT_HALF


@njit(cache=True, nogil=True, error_model="numpy")
def _series(scale, out):
    """Replace m in `out` by log(2^k m)."""
    for i in range(len(out)):
        k, f = scale[i] - _BIAS, out[i] - 1.0
        s, half = f / (2.0 + f), 0.5 * f * f
        z = s * s
        tail = 2.0 / 17.0 + z * (2.0 / 19.0 + z * (2.0 / 21.0))
        tail = 2.0 / 9.0 + z * (2.0 / 11.0 + z * (2.0 / 13.0 + z * (2.0 / 15.0 + z * tail)))
        rest = z * (2.0 / 3.0 + z * (2.0 / 5.0 + z * (2.0 / 7.0 + z * tail)))
        out[i] = k * _LN2_HIGH - ((half - (s * (half + rest) + k * _LN2_LOW)) - f)
