"""CPU kernels in C++: built by whatever compiler is there, called through ctypes."""
