"""A Slurm cluster: one sbatch script, one srun, one rank per device.

job.sh.template is what is submitted; `script` fills it in, `slurm_settings` says with what,
`commands` runs Slurm's own commands, and `slurm_launcher` puts them together.
"""

from distdl.launchers.slurm.slurm_launcher import SlurmLauncher

__all__ = ["SlurmLauncher"]
