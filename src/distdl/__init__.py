"""distdl: one command trains the same run on this machine, on a cluster, or in a cloud."""

import os
import sys

__version__ = "0.1.0"

# pip refuses an older Python, but a job gets distdl as a folder, run by the image's own Python.
if tuple(sys.version_info) < (3, 11):
    _version = ".".join(map(str, sys.version_info[:3]))
    print(f"distdl: needs Python 3.11 or newer: {sys.executable} is {_version}", file=sys.stderr)
    sys.exit(2)

# In a checkout `conf/` and `launchers/` are beside `src/`, so that a reader sees them first. The
# wheel has them as `distdl.conf` and `distdl.launchers`. With the checkout's root on the package
# path, these names also work without an installation (PYTHONPATH=src).
_checkout = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
if os.path.isfile(os.path.join(_checkout, "conf", "distdl.yaml")):
    __path__.append(_checkout)

from distdl import moved_names  # noqa: E402 - by the path above

moved_names.serve()
