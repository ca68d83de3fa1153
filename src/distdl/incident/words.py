"""The words in which a rank describes itself, and by which its incident is read."""

import psutil

# The state of a process, in psutil's words.
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)  # by a signal, by a debugger
RUNNING, ON_DISK = psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP
BETWEEN_EPOCHS = "fit_loop."  # so begin the actions before and after the batches of an epoch
OF_PROGRAM = "program"  # how a rank was seen whose program, not a training, was stopped
