"""JSON Schemas of config files, for editors.

It imports no torch: a child process imports the classes that configs name.
"""
