"""Builds the shared library with a C compiler and the headers of libjpeg-turbo.

On Debian: apt-get install gcc libc6-dev libjpeg62-turbo-dev (on Ubuntu libjpeg-turbo8-dev).
CC and CFLAGS are heeded.
"""

import os
import shlex
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = ("header.c", "resize.c", "decode.c")
OPTIONS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
OPTIONS += ("-fstack-protector-strong", "-D_FORTIFY_SOURCE=2", "-Wall", "-Wextra")
OPTIONS += ("-Wl,-z,relro,-z,now",)


class WithLibrary(build_py):
    """Copies the package, and compiles the library into it."""

    editable_mode = False

    def run(self):
        super().run()
        here = Path(__file__).parent
        package = here if self.editable_mode else Path(self.build_lib)
        to = package / "distdl_native" / "libdistdl_native.so"
        to.parent.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        flags = shlex.split(os.environ.get("CFLAGS", ""))
        sources = [str(here / name) for name in SOURCES]
        subprocess.run(
            [*compiler, *OPTIONS, *flags, "-o", str(to), *sources, "-ljpeg", "-lm"], check=True
        )


class OfAnyPython(bdist_wheel):
    """The library knows nothing of Python: the wheel is for every version of it on a platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class OfPlatform(Distribution):
    def has_ext_modules(self):
        return True


setup(
    distclass=OfPlatform,
    cmdclass={"build_py": WithLibrary, "bdist_wheel": OfAnyPython},
)
