"""Following a run that the console did not start: any run directory, or a bare folder of tables, here or over SSH.

Nothing is installed there and nothing is ever ended or deleted: what is asked are a few commands of a POSIX shell.
"""
