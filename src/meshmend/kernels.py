"""How inner loops are compiled."""

from numba import njit

# Compiled code is kept on disk and runs without the interpreter's lock. Nothing uses a C function
# pointer of a kernel; making none saves a tenth of the time to compile.
kernel = njit(cache=True, nogil=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]  # not in Numba's stubs

# For kernels that make no array and call no kernel that does. Numba then counts no references,
# which would take four fifths of the time where many small kernels call each other.
plain_kernel = njit(cache=True, nogil=True, no_cfunc_wrapper=True, _nrt=False)  # type: ignore[call-overload]  # not in Numba's stubs

# For small kernels that other kernels call many times: compiled into the caller, because passing
# many arrays costs more than what a small kernel does with them.
inlined = njit(nogil=True, no_cfunc_wrapper=True, _nrt=False, forceinline=True)  # type: ignore[call-overload]  # not in Numba's stubs

# For kernels that only kernels call: no wrapper that unpacks Python objects is made. With arguments
# of many arrays, making it takes longer than compiling the kernel.
inner_kernel = njit(  # type: ignore[call-overload]  # not in Numba's stubs
    cache=True, nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=True, _nrt=False
)
