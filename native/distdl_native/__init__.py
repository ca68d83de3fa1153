"""A shared library in C that decodes crops of JPEGs: `distdl.images.native` loads and explains it.

It knows nothing of Python: one build serves every version, and ctypes releases the interpreter's
lock while it works.
"""

from pathlib import Path

LIBRARY = Path(__file__).with_name("libdistdl_native.so")
