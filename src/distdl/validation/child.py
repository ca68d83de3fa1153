"""The child process of validation's stage 2: `python -m distdl.validation.child`.

The request is JSON on stdin, the answer JSON on stdout. Importing takes seconds, runs the user's
code and may print, crash or hang; the command line itself must not. What is checked is in
`binding.py`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

from distdl.config.own_code import make_importable
from distdl.util import lightning_names
from distdl.util.errors import Problem
from distdl.util.redact import hide_shapes
from distdl.util.shadowing import shadowing
from distdl.validation.binding import Binding


def check(request: dict[str, Any]) -> dict[str, Any]:
    """The problems, notes and facts that `distdl.validation.validate` reads."""
    lightning_names.serve()
    make_importable(request["trust"][0])  # instead of the folder that `python -m` adds
    binding = Binding(request)
    findings = binding.findings
    try:
        binding.run()
    except Exception as error:  # imports of user code may raise anything
        if (shadow := shadowing(error, binding.trust.folders)) is None:
            raise
        findings.problems = [Problem(*shadow, code="hidden-module")]
    problems = [[p.path, hide_shapes(p.what), p.remedy, p.code] for p in findings.problems]
    return {"problems": problems, "notes": findings.notes, "facts": findings.facts}


def main() -> None:
    gc.disable()  # the child lives for seconds and mostly imports
    # Libraries print: their stdout goes to stderr, so that the real stdout has the answer only.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from distdl.util.orphans import die_with_parent

    die_with_parent(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    json.dump(check(json.load(sys.stdin)), answer)
    answer.close()
    sys.stderr.flush()
    os._exit(0)  # a normal exit would take another second to unload torch and Lightning


if __name__ == "__main__":
    main()
