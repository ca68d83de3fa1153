"""`python -m distdl`: see distdl.cli.main."""

if __name__ == "__main__":  # before the other imports, during which Ctrl-C may come
    from distdl.cli.entry import command

    command()
