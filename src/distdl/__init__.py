"""distdl: one command trains here, on a cluster, or on Azure: the same run in every respect."""

import os
import sys

__version__ = "0.1.0"

# pip refuses an older one, but a job's code is a folder, and an image or a cluster has its own.
if tuple(sys.version_info) < (3, 11):
    _version = ".".join(map(str, sys.version_info[:3]))
    print(f"distdl: needs Python 3.11 or newer: {sys.executable} is {_version}", file=sys.stderr)
    sys.exit(2)

# In a checkout `conf/` and `launchers/` lie beside `src/` so that they are the first thing a reader
# sees; the wheel holds them as `distdl.conf` and `distdl.launchers`. Adding the checkout's root to
# the package path makes both names mean the same without an install (PYTHONPATH=src).
_checkout = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
if os.path.isfile(os.path.join(_checkout, "conf", "distdl.yaml")):
    __path__.append(_checkout)
