"""The mathematics, in float64 and with no neural network in it.

`gl` has the exact kernels, `density` and `quadrature` the paper's route to sums of exponentials,
`basis` ours (one set of rates for every order), `bounds` the theorems as functions.
"""

from vort.fractional.basis import PowerLawBasis
from vort.fractional.certificate import Certificate
from vort.fractional.density import density, mass_above, mass_below, weight_from_density
from vort.fractional.gl import (
    fractional_sum,
    fractional_sum_direct,
    frequency_response,
    gl_kernel,
    gl_partial_sums,
    gl_weights,
)
from vort.fractional.quadrature import laguerre_soe, legendre_soe, terms_needed
from vort.fractional.soe import SumOfExponentials, bank_memories

__all__ = [
    "Certificate",
    "PowerLawBasis",
    "SumOfExponentials",
    "bank_memories",
    "density",
    "fractional_sum",
    "fractional_sum_direct",
    "frequency_response",
    "gl_kernel",
    "gl_partial_sums",
    "gl_weights",
    "laguerre_soe",
    "legendre_soe",
    "mass_above",
    "mass_below",
    "terms_needed",
    "weight_from_density",
]
