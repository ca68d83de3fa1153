"""A Slurm cluster: one sbatch script, one srun, one rank per device.

`script` fills in job.sh.template from `slurm_settings`, `commands` runs Slurm's own commands, and
`slurm_launcher` combines them.
"""

from distdl.launchers.slurm.slurm_launcher import SlurmLauncher

__all__ = ["SlurmLauncher"]
