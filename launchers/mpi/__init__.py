"""Machines reached over ssh: one mpirun, one rank per device.

`flavours` has what differs between the four kinds of mpirun, `hosts` checks and prepares machines.
`supervisor` watches mpirun in the background, `rank` is each rank's parent process, and `mpi_job`
lets a later shell find the job.
"""

from distdl.launchers.mpi.mpi_launcher import MpiLauncher

__all__ = ["MpiLauncher"]
