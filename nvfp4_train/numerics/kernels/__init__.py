"""The C++ twin of the numerics for CPUs: `use` chooses it, `is_compiled` says if it is chosen, `native` calls it."""

from nvfp4_train.numerics.kernels import native
from nvfp4_train.numerics.kernels.loader import Backend, is_compiled, use

__all__ = ["Backend", "is_compiled", "native", "use"]
