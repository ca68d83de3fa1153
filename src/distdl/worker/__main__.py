"""`python -m distdl.worker BUNDLE STORE`: see distdl.worker.main."""

import os

if __name__ == "__main__":
    # Before the slow imports: a signal during the start-up must not be lost.
    from distdl.ranks.stopping import StopRequest
    from distdl.util.orphans import PARENT, die_with_parent

    early = StopRequest()
    early.install()
    if PARENT in os.environ:
        die_with_parent()

    from distdl.ranks.environment import LAUNCHER_VARIABLE
    from distdl.ranks.process_exit import exit_process
    from distdl.worker.main import main

    # Read now: the user's code may change the environment.
    launcher = os.environ.get(LAUNCHER_VARIABLE, "")
    exit_process(main(stop=early), launcher)
