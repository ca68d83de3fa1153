"""Machines that are reached by ssh: one mpirun, one rank per device.

`flavours` knows the four mpiruns, `hosts` the machines; `supervisor` watches mpirun in the
background, `rank` is each rank's parent, `mpi_job` is how a later shell finds them.
"""

from distdl.launchers.mpi.mpi_launcher import MpiLauncher

__all__ = ["MpiLauncher"]
