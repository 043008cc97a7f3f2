"""CPU kernels in C++: compiled with any available compiler, called through ctypes."""
