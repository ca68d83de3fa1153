"""A Slurm cluster: one sbatch script, one srun, one rank per device.

job.sh.template is what is submitted; `script` fills it in, `settings` says what may stand in it,
`controller` talks to Slurm, and `launcher` puts them together.
"""

from distdl.launchers.slurm.launcher import SlurmLauncher

__all__ = ["SlurmLauncher"]
