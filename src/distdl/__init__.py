"""distdl: one command trains here, on a cluster, or on Azure: the same run in every respect."""

import os

__version__ = "0.1.0"

# In a checkout `conf/` and `launchers/` lie beside `src/` so that they are the first thing a reader
# sees; the wheel holds them as `distdl.conf` and `distdl.launchers`. Adding the checkout's root to
# the package path makes both names mean the same without an install (PYTHONPATH=src).
_checkout = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
if os.path.isfile(os.path.join(_checkout, "conf", "distdl.yaml")):
    __path__.append(_checkout)
