"""This package's C++: importing it gives the extension module that was built for the torch and the Python that run."""

import sys

from primtorch.extensions import load

sys.modules[__name__] = load(__name__, __path__[0])
