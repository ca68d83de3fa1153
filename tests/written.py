"""What tests write: a folder's files, and programs."""


def write(folder, files):
    """Texts or bytes by their path in the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)


def program(file, script):
    """A shell script that others can run; returns its path."""
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)
