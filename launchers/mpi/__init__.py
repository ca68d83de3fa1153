"""Machines that are reached by ssh: one mpirun, one rank per device.

`flavours` knows the four mpiruns, `hosts` the machines, `keeper` stays with mpirun in the
background, `rank` with each rank, `job` is how a later shell finds them, and `launcher` puts them
together.
"""

from distdl.launchers.mpi.launcher import MpiLauncher

__all__ = ["MpiLauncher"]
