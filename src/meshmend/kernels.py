"""How inner loops are compiled."""

from numba import njit

# Kept on disk, and run without the interpreter's lock. Nobody takes a C function pointer of a
# kernel: to leave that out saves a tenth of the time to compile.
kernel = njit(cache=True, nogil=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]  # not in Numba's stubs

# For kernels that make no array, nor call one that does: Numba need not count references, which
# would take four fifths of the time where many small kernels call each other.
plain_kernel = njit(cache=True, nogil=True, no_cfunc_wrapper=True, _nrt=False)  # type: ignore[call-overload]  # not in Numba's stubs

# For kernels that only kernels call, many times: the C++ way of "inline". Whole sets of arrays
# as arguments cost more than what a small kernel does with them.
inlined = njit(nogil=True, no_cfunc_wrapper=True, _nrt=False, forceinline=True)  # type: ignore[call-overload]  # not in Numba's stubs
