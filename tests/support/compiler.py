"""Whether this machine can build the compiled kernels, which are optional."""

import pytest

from nvfp4_train.numerics.kernels import loader

HAS_COMPILER = loader.find_compiler() is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="the compiled kernels need a C++ compiler")
